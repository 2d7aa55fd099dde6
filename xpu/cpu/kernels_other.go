//go:build !amd64 || purego

package cpu

// kernelSets lists the sets that this machine can run, the best first.
func kernelSets() []*kernelSet { return []*kernelSet{&goKernels} }
