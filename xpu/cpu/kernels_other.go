//go:build !amd64 || purego

package cpu

import "mula/xpu"

// Lacks returns nil: this build has no assembly kernels.
func Lacks(xpu.Precision) []string { return nil }

// kernelSets lists the sets of fp32 that this machine can run, the best first.
func kernelSets() []*kernelSet { return []*kernelSet{&goKernels} }

// pairSets lists the sets of pairs that this machine can run.
func pairSets() []*kernelSet { return nil }

func roundBF16(x []float32) { roundBF16Go(x) }

func halves([]uint16, []float32) int { return 0 }
