//go:build !purego

package tokenize

import "testing"

// eachInstructionSet runs a test with each instruction set that this processor has, and without
// vector instructions.
func eachInstructionSet(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	avx2, bmi2, avx512 := hasAVX2, hasBMI2, hasAVX512
	defer func() { hasAVX2, hasBMI2, hasAVX512 = avx2, bmi2, avx512 }()
	if avx512 {
		test(t)
		hasAVX512 = false
	}
	if avx2 {
		test(t)
	}
	hasAVX2, hasBMI2, hasAVX512 = false, false, false
	test(t)
}
