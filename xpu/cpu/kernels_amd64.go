//go:build !purego

package cpu

//go:generate go run ./gen

import "golang.org/x/sys/cpu"

var avx512Kernels = kernelSet{
	name: "avx512", arithmetic: "fma", mr: 14, nr: 32, tile: tileAVX512,
	packRowsA: packRows14, packRowsB: packRows32, packColumnsA: packColumns14, packColumnsB: packColumns32,
}

var avx2Kernels = kernelSet{
	name: "avx2", arithmetic: "fma", mr: 6, nr: 16, tile: tileAVX2,
	packRowsA: packRows6, packRowsB: packRows16, packColumnsA: packColumns6, packColumnsB: packColumns16,
}

// kernelSets lists the sets that this machine can run, the best first.
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

//go:noescape
func tileAVX512(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, add int64)

//go:noescape
func tileAVX2(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, add int64)

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
