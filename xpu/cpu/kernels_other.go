//go:build !amd64 || purego

package cpu

import "mula/xpu"

// Lacks returns nil: this build has no assembly kernels.
func Lacks(xpu.Precision) []string { return nil }

// kernelSets lists the fp32 sets that this machine supports, the best first.
func kernelSets() []*kernelSet { return []*kernelSet{&goKernels} }

// pairSets lists the sets with pairs that this machine supports.
func pairSets() []*kernelSet { return nil }

func roundBF16(x []float32) { roundBF16Go(x) }

func halves([]uint16, []float32) int { return 0 }

func widen([]float32, []uint16) int { return 0 }
