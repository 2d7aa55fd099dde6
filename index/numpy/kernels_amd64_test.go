//go:build !purego

package numpy

import "golang.org/x/sys/cpu"

// setVectors switches the assembly on, if the machine can run it, or off. It returns whether it is
// on.
func setVectors(on bool) bool {
	vectors = on && cpu.X86.HasAVX512F && cpu.X86.HasBMI1 && cpu.X86.HasBMI2 && cpu.X86.HasPOPCNT
	return vectors
}
