//go:build !purego

package cpu

//go:generate go run ./gen

import (
	"golang.org/x/sys/cpu"

	"mula/xpu"
)

var avx512Kernels = kernelSet{
	name: "avx512", precision: xpu.FP32, arithmetic: "fma", mr: 14, nr: 32, blockK: blockK, tile: tileAVX512,
	packRowsA: packRows14, packRowsB: packRows32, packColumnsA: packColumns14, packColumnsB: packColumns32,
}

var avx2Kernels = kernelSet{
	name: "avx2", precision: xpu.FP32, arithmetic: "fma", mr: 6, nr: 16, blockK: blockK, tile: tileAVX2,
	packRowsA: packRows6, packRowsB: packRows16, packColumnsA: packColumns6, packColumnsB: packColumns16,
}

// pairKernels needs AVX512_BF16 and AVX-512BW.
var pairKernels = kernelSet{
	name: "avx512_bf16", precision: xpu.BF16, arithmetic: "fma bf16", mr: 14, nr: 32, blockK: blockKBF16,
	tile: tilePairs, pairLines: pairLines,
	packRowsA: packRows14, packRowsB: packRows32, packColumnsA: packPairColumns14, packColumnsB: packPairColumns32,
}

// kernelSets lists the fp32 sets that this machine supports, the best first.
func kernelSets() []*kernelSet {
	var sets []*kernelSet
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
		if cpu.X86.HasAVX512F {
			sets = append(sets, &avx512Kernels)
		}
		sets = append(sets, &avx2Kernels)
	}
	return append(sets, &goKernels)
}

// pairSets lists the sets with pairs that this machine supports.
func pairSets() []*kernelSet {
	if x := cpu.X86; x.HasAVX512BF16 && x.HasAVX512F && x.HasAVX512BW && x.HasAVX2 && x.HasFMA {
		return []*kernelSet{&pairKernels}
	}
	return nil
}

// Lacks lists the processor features that this machine lacks for the fastest kernel set of a
// precision.
func Lacks(precision xpu.Precision) []string {
	type feature struct {
		name string
		has  bool
	}
	x := cpu.X86
	features := []feature{{"AVX2", x.HasAVX2}, {"FMA", x.HasFMA}, {"AVX-512F", x.HasAVX512F}}
	if precision == xpu.BF16 {
		features = append(features, feature{"AVX-512BW", x.HasAVX512BW}, feature{"AVX512_BF16", x.HasAVX512BF16})
	}
	var lacks []string
	for _, f := range features {
		if !f.has {
			lacks = append(lacks, f.name)
		}
	}
	return lacks
}

// roundBF16 rounds to bfloat16; see [xpu.BF16].
func roundBF16(x []float32) {
	if n := len(x) &^ 31; n > 0 && hasPairs {
		roundAVX512(&x[0], int64(n))
		x = x[n:]
	}
	if n := len(x) &^ 7; n > 0 && cpu.X86.HasAVX2 {
		roundAVX2(&x[0], int64(n))
		x = x[n:]
	}
	roundBF16Go(x)
}

//go:noescape
func tileAVX512(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, mode int64)

//go:noescape
func tileAVX2(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, mode int64)

//go:noescape
func tilePairs(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, mode int64)

//go:noescape
func packRows32(dst, src *float32, kc, ld int64)

//go:noescape
func packRows16(dst, src *float32, kc, ld int64)

//go:noescape
func packRows14(dst, src *float32, kc, ld int64)

//go:noescape
func packRows6(dst, src *float32, kc, ld int64)

//go:noescape
func packColumns32(dst, src *float32, kc, ld, panels int64)

//go:noescape
func packColumns16(dst, src *float32, kc, ld, panels int64)

//go:noescape
func packColumns14(dst, src *float32, kc, ld, panels int64)

//go:noescape
func packColumns6(dst, src *float32, kc, ld, panels int64)

//go:noescape
func packPairColumns32(dst, src *float32, kc, ld, panels int64)

//go:noescape
func packPairColumns14(dst, src *float32, kc, ld, panels int64)

//go:noescape
func pairLines(dst, src *float32, kc, ld, lines, pad int64)

var hasPairs = len(pairSets()) > 0

// halves rounds the first elements of src to bfloat16 and returns their number.
func halves(dst []uint16, src []float32) int {
	n := len(src) &^ 15
	if hasPairs {
		n = len(src) &^ 31
	}
	if n == 0 || !cpu.X86.HasAVX2 {
		return 0
	}
	_ = dst[n-1]
	if hasPairs {
		halvesAVX512(&dst[0], &src[0], int64(n))
	} else {
		halvesAVX2(&dst[0], &src[0], int64(n))
	}
	return n
}

//go:noescape
func halvesAVX512(dst *uint16, src *float32, n int64)

//go:noescape
func halvesAVX2(dst *uint16, src *float32, n int64)

// widen converts the first elements of src to float32 and returns their number.
func widen(dst []float32, src []uint16) int {
	n := len(src) &^ 15
	if n == 0 || !cpu.X86.HasAVX2 {
		return 0
	}
	_ = dst[n-1]
	widenAVX2(&dst[0], &src[0], int64(n))
	return n
}

//go:noescape
func widenAVX2(dst *float32, src *uint16, n int64)

//go:noescape
func roundAVX512(x *float32, n int64)

//go:noescape
func roundAVX2(x *float32, n int64)
