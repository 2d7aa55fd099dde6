//go:build !purego

package comm

import "golang.org/x/sys/cpu"

//go:noescape
func addAVX(dst, src *float32, n int64)

// addMany adds as many elements as the vector kernel handles, and returns their number.
func addMany(dst, src []float32) int {
	n := len(dst) &^ 31
	if n == 0 || !cpu.X86.HasAVX {
		return 0
	}
	_ = src[n-1]
	addAVX(&dst[0], &src[0], int64(n))
	return n
}
