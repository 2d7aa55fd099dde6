package cpu

import "runtime"

// kernelSet is the innermost work of a product for one instruction set. Operands come as panels: a panel of op(A) holds mr rows, element
// (i, k) at k*mr+i; a panel of op(B) nr columns, element (k, j) at k*nr+j.
type kernelSet struct {
	name       string
	arithmetic string // sets with the same one give the same bits
	mr, nr     int

	// tile computes rows × nr elements of C, 1 ≤ rows ≤ mr, from kc ≥ 1 terms each: chains of multiply-adds that start from zero, stored in
	// c or with add ≠ 0 added to it. a is a panel; row k of b starts at k*ldb, so that b is a panel with ldb = nr, or a matrix itself.
	tile func(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, add int64)

	// The packs make panels of full width. packRows: of op(A) or the transpose of op(B) as stored, line i at src[i*ld:], kc a multiple of 4.
	// packColumns: the reverse, line k at src[k*ld:], any kc, and several panels side by side, one after the other in dst. Nil where there
	// are none.
	packRowsA, packRowsB       func(dst, src *float32, kc, ld int64)
	packColumnsA, packColumnsB func(dst, src *float32, kc, ld, panels int64)
}

var goKernels = kernelSet{name: "go", arithmetic: "go " + runtime.GOARCH, mr: 4, nr: 4, tile: nil}

// maxMR and maxNR are the largest tile of any set.
const maxMR, maxNR = 14, 32

// multiply is tile behind a check of all that it will touch. len(b) and len(c) may exceed what is used.
func (s *kernelSet) multiply(rows, kc int, a, b []float32, ldb int, c []float32, ldc int, add bool) {
	_, _, _ = a[kc*s.mr-1], b[(kc-1)*ldb+s.nr-1], c[(rows-1)*ldc+s.nr-1]
	if s.tile == nil {
		multiplyGo(rows, kc, a, b, ldb, c, ldc, add)
		return
	}
	flag := int64(0)
	if add {
		flag = 1
	}
	s.tile(int64(rows), int64(kc), &a[0], &b[0], int64(ldb), &c[0], int64(ldc), flag)
}

// multiplyGo is the tile of the set go. Products are rounded by conversion before they are added, because a compiler may fuse them
// otherwise, on some architectures and in some places only.
func multiplyGo(rows, kc int, a, b []float32, ldb int, c []float32, ldc int, add bool) {
	for i := 0; i < rows; i += 2 { // an odd last row is computed with the padding of the panel below it
		var s00, s01, s02, s03, s10, s11, s12, s13 float32
		for k := range kc {
			x, r := (*[2]float32)(a[4*k+i:]), (*[4]float32)(b[ldb*k:])
			s00 += float32(x[0] * r[0])
			s01 += float32(x[0] * r[1])
			s02 += float32(x[0] * r[2])
			s03 += float32(x[0] * r[3])
			s10 += float32(x[1] * r[0])
			s11 += float32(x[1] * r[1])
			s12 += float32(x[1] * r[2])
			s13 += float32(x[1] * r[3])
		}
		storeGo(c[i*ldc:], s00, s01, s02, s03, add)
		if i+1 < rows {
			storeGo(c[(i+1)*ldc:], s10, s11, s12, s13, add)
		}
	}
}

func storeGo(c []float32, s0, s1, s2, s3 float32, add bool) {
	c = c[:4]
	if add {
		s0, s1, s2, s3 = c[0]+s0, c[1]+s1, c[2]+s2, c[3]+s3
	}
	c[0], c[1], c[2], c[3] = s0, s1, s2, s3
}

// packA makes panels of rows row0… (n of them, any number) and terms k0… (kc of them) of op(A), one after the other in dst.
func (s *kernelSet) packA(dst, a []float32, lda int, trans bool, row0, n, k0, kc int, edge []float32) {
	if trans {
		packColumns(s.packColumnsA, dst, a[k0*lda+row0:], lda, s.mr, n, kc)
		return
	}
	for r := 0; r < n; r += s.mr {
		packRows(s.packRowsA, dst[r*kc:], a[(row0+r)*lda+k0:], lda, s.mr, min(s.mr, n-r), kc, edge)
	}
}

// packB makes panels of columns column0… (n of them, any number) and terms k0… (kc of them) of op(B), one after the other in dst.
func (s *kernelSet) packB(dst, b []float32, ldb int, trans bool, column0, n, k0, kc int, edge []float32) {
	if !trans {
		packColumns(s.packColumnsB, dst, b[k0*ldb+column0:], ldb, s.nr, n, kc)
		return
	}
	for j := 0; j < n; j += s.nr {
		packRows(s.packRowsB, dst[j*kc:], b[(column0+j)*ldb+k0:], ldb, s.nr, min(s.nr, n-j), kc, edge)
	}
}

// packColumns copies n elements of kc lines to panels of the given width; what the last has too much of becomes zero.
func packColumns(fast func(dst, src *float32, kc, ld, panels int64), dst, src []float32, ld, width, n, kc int) {
	done := 0
	if panels := n / width; fast != nil && panels > 0 {
		done = panels * width
		_, _ = dst[kc*done-1], src[(kc-1)*ld+done-1]
		fast(&dst[0], &src[0], int64(kc), int64(ld), int64(panels))
	}
	for ; done < n; done += width {
		panel, m := dst[done*kc:][:kc*width], min(width, n-done)
		for k := range kc {
			d := panel[k*width:][:width]
			clear(d[copy(d, src[k*ld+done:][:m]):])
		}
	}
}

// packRows transposes n lines of kc elements to a panel of the given width; what stands in the rest of the width is undefined (no element
// of C that is kept comes from it). edge has room for width*kc elements.
func packRows(fast func(dst, src *float32, kc, ld int64), dst, src []float32, ld, width, n, kc int, edge []float32) {
	dst = dst[:kc*width]
	done := 0
	if fast != nil && kc >= 4 {
		if n < width && n > 1 { // the assembly wants all lines
			edge = edge[:width*kc]
			for i := range n {
				copy(edge[i*kc:][:kc], src[i*ld:])
			}
			src, ld = edge, kc
		}
		if n > 1 {
			done = kc &^ 3
			_ = src[(width-1)*ld+done-1]
			fast(&dst[0], &src[0], int64(done), int64(ld))
		}
	}
	for i := range n {
		for k, x := range src[i*ld:][done:kc] {
			dst[(done+k)*width+i] = x
		}
	}
}
