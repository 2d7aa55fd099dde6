package cpu

import (
	"cmp"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"mula/xpu"
)

// kernelSet is the innermost loop of a product for one instruction set. Operands are packed into
// panels: a panel of op(A) holds mr rows, with element (i, k) at k*mr+i; a panel of op(B) holds nr
// columns, with element (k, j) at k*nr+j. With pairs, an element of a panel is a word of two
// bfloat16 terms, the first in its upper half: element (i, k) has the terms 2k and 2k+1. If the
// number of terms is odd, the last one is padded with 0 in op(A) and -0 in op(B); their product
// changes no sum, not even a sum of -0.
type kernelSet struct {
	name       string
	precision  xpu.Precision
	arithmetic string // sets with the same value compute the same bits
	mr, nr     int
	blockK     int // number of terms in a block; see product.go

	// tile computes rows × nr elements of C, rows ≥ 1, from kc ≥ 1 elements of each panel: chains
	// of multiply-adds that start from zero, stored in c, or added to it with the mode tileAdd. a
	// consists of ⌈rows/mr⌉ consecutive panels. Row k of b starts at k*ldb, so that b is a panel
	// with ldb = nr, or a stored matrix. Nil in the set go, which has no assembly.
	tile func(rows, kc int64, a, b *float32, ldb int64, c *float32, ldc, mode int64)
	mode int64 // mode of all tiles, tileFlush or 0

	// The pack functions create panels of full width. packRows packs op(A) or the transpose of
	// op(B) as stored: line i is at src[i*ld:], and kc is a multiple of 4. packColumns packs the
	// reverse: line k is at src[k*ld:], kc is arbitrary, and several adjacent panels are stored one
	// after the other in dst. Nil where not available. With pairs, packRows reads lines of words
	// from pairLines, and packColumns lines of kc float32.
	packRowsA, packRowsB       func(dst, src *float32, kc, ld int64)
	packColumnsA, packColumnsB func(dst, src *float32, kc, ld, panels int64)

	// pairLines converts lines of kc elements to lines of pairs, ⌈kc/32⌉·16 words each; missing
	// elements at the end have the bits of pad. Nil in sets without pairs.
	pairLines func(dst, src *float32, kc, ld, lines, pad int64)

	round   func(panels []float32) // rounds panels of float32 to bfloat16; nil if packing does so
	rounded *kernelSet             // with round: packs operands that are rounded already
}

func (s *kernelSet) pairs() bool { return s.pairLines != nil }

// Modes of a tile; they can be added.
const (
	tileAdd = 1 // C += instead of C =
	// a multiply-add with a denormal result returns zero, as with pairs; this does not apply to the
	// addition to C
	tileFlush = 2
)

// elements returns the number of panel elements for kc terms.
func (s *kernelSet) elements(kc int) int {
	if s.pairs() {
		return (kc + 1) / 2
	}
	return kc
}

var goKernels = kernelSet{name: "go", precision: xpu.FP32, arithmetic: "go " + runtime.GOARCH, mr: 4, nr: 4,
	blockK: blockK}

// kernelsFor lists the sets of this machine for a precision, the fastest first. Every fp32 set has
// a counterpart for bf16, which rounds the packed panels. It computes the same bits as pairs,
// because both are chains of fused multiply-adds in ascending order.
func kernelsFor(precision xpu.Precision) []*kernelSet {
	if precision == xpu.FP32 {
		return kernelSets()
	}
	return bf16Sets()
}

// bf16Sets lists the sets for bf16. AVX512_BF16 is measured, because the speed of its instruction
// does not follow from the processor's features: on an AMD Zen 4 a tile of pairs is twice as fast
// as a tile of float32, and on an Intel Emerald Rapids half as fast.
var bf16Sets = sync.OnceValue(func() []*kernelSet {
	sets := pairSets()
	pairs := len(sets)
	for _, s := range kernelSets() {
		twin := *s
		twin.precision, twin.arithmetic, twin.blockK, twin.mode, twin.round, twin.rounded = xpu.BF16,
			s.arithmetic+" bf16", blockKBF16, tileFlush, roundBF16, s
		sets = append(sets, &twin)
	}
	if pairs > 0 {
		fastestFirst(sets[:pairs+1], (*kernelSet).tileTime)
	}
	return sets
})

// fastestFirst sorts sets by their times; sets with equal times keep their order.
func fastestFirst(sets []*kernelSet, time func(*kernelSet) time.Duration) {
	times := map[*kernelSet]int64{}
	for _, s := range sets {
		times[s] = int64(time(s))
	}
	slices.SortStableFunc(sets, func(x, y *kernelSet) int { return cmp.Compare(times[x], times[y]) })
}

// tileTime returns the shortest time in which the set computed 1,000 elements of full tiles, in
// some tries. They take less than a millisecond.
func (s *kernelSet) tileTime() time.Duration {
	const tries = 16
	a, b, c := make([]float32, s.mr*s.blockK), make([]float32, s.nr*s.blockK), make([]float32, s.mr*s.nr)
	best := time.Hour
	for range tries {
		start := time.Now()
		s.multiply(s.mr, s.elements(s.blockK), a, b, s.nr, c, s.nr, false)
		best = min(best, time.Since(start))
	}
	return 1000 * best / time.Duration(s.mr*s.nr)
}

// Kernels returns the name of the kernel set that products of a precision use on this machine, as
// in [Device.Name].
func Kernels(precision xpu.Precision) string { return kernelsFor(precision)[0].name }

// RoundBF16 rounds every x[i] to bfloat16, like products of [xpu.BF16] round their operands.
func RoundBF16(x []float32) { roundBF16(x) }

// BF16 sets dst[i] to the bits of x[i] rounded as by [RoundBF16]: the upper half of a float32. dst
// must have the length of x.
func BF16(dst []uint16, x []float32) {
	sameLength(len(dst), len(x))
	var some [64]float32
	for done := halves(dst, x); done < len(x); {
		n := copy(some[:], x[done:])
		roundBF16(some[:n])
		for i, v := range some[:n] {
			dst[done+i] = uint16(math.Float32bits(v) >> 16)
		}
		done += n
	}
}

// Widen sets dst[i] to the number with the bits x[i], the inverse of [BF16]. dst must have the
// length of x.
func Widen(dst []float32, x []uint16) {
	sameLength(len(dst), len(x))
	for i := widen(dst, x); i < len(x); i++ {
		dst[i] = math.Float32frombits(uint32(x[i]) << 16)
	}
}

// addHalves adds x to the bfloat16 numbers dst, in float32, and rounds the sums. x is overwritten.
func addHalves(dst []uint16, x []float32) {
	var memory [256]float32
	for begin := 0; begin < len(dst); begin += len(memory) {
		d := dst[begin:min(begin+len(memory), len(dst))]
		wide, sum := memory[:len(d)], x[begin:][:len(d)]
		Widen(wide, d)
		sumScaled(sum, wide, 1, sum)
		BF16(d, sum)
	}
}

// roundBF16Go rounds to bfloat16; see [xpu.BF16].
func roundBF16Go(x []float32) {
	for i, v := range x {
		switch b := math.Float32bits(v); {
		case b&0x7f800000 == 0:
			x[i] = math.Float32frombits(b & 0x80000000)
		case v != v:
			x[i] = math.Float32frombits((b | 0x00400000) & 0xffff0000)
		default:
			x[i] = math.Float32frombits((b + 0x7fff + b>>16&1) & 0xffff0000)
		}
	}
}

// maxMR and maxNR are the size of the largest tile of any set.
const maxMR, maxNR = 14, 32

// multiply calls tile after checking the bounds of everything it accesses. kc counts elements of
// panels. len(b) and len(c) may exceed the elements used.
func (s *kernelSet) multiply(rows, kc int, a, b []float32, ldb int, c []float32, ldc int, add bool) {
	_, _, _ = a[kc*((rows+s.mr-1)/s.mr*s.mr)-1], b[(kc-1)*ldb+s.nr-1], c[(rows-1)*ldc+s.nr-1]
	if s.tile == nil {
		for r := 0; r < rows; r += s.mr {
			multiplyGo(min(s.mr, rows-r), kc, a[r*kc:], b, ldb, c[r*ldc:], ldc, add)
		}
		return
	}
	mode := s.mode
	if add {
		mode |= tileAdd
	}
	s.tile(int64(rows), int64(kc), &a[0], &b[0], int64(ldb), &c[0], int64(ldc), mode)
}

// multiplyGo is the tile of the set go. Products are rounded by a conversion before they are added,
// because a compiler may otherwise fuse them, on some architectures and in some places only.
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

// packA packs n rows, from row0, and kc terms, from k0, of op(A) into consecutive panels in dst.
func (s *kernelSet) packA(dst, a []float32, lda int, trans bool, row0, n, k0, kc int, edge []float32) {
	if trans {
		s.packColumns(s.packColumnsA, dst, a[k0*lda+row0:], lda, s.mr, n, kc, edge)
	} else {
		s.packRows(s.packRowsA, dst, a[row0*lda+k0:], lda, s.mr, n, kc, 0, edge)
	}
}

// packB packs n columns, from column0, and kc terms, from k0, of op(B) into consecutive panels in
// dst.
func (s *kernelSet) packB(dst, b []float32, ldb int, trans bool, column0, n, k0, kc int, edge []float32) {
	if !trans {
		s.packColumns(s.packColumnsB, dst, b[k0*ldb+column0:], ldb, s.nr, n, kc, edge)
	} else {
		s.packRows(s.packRowsB, dst, b[column0*ldb+k0:], ldb, s.nr, n, kc, 1<<31, edge)
	}
}

// packHalves is packB, or else packA, for a matrix of bfloat16. lines means that a line of memory
// is a row of op(A) or a column of op(B). Panels are converted to float32 one after another, in
// wide, which has space for the lines of a panel.
func (s *kernelSet) packHalves(ofB bool, dst []float32, x []uint16, ld int, lines bool, first, n, k0, kc int,
	edge, wide []float32) {
	width := s.mr
	if ofB {
		width = s.nr
	}
	pack := s
	if s.round != nil {
		pack = s.rounded
	}
	for done := 0; done < n; done += width {
		m := min(width, n-done)
		count, length, at := kc, m, k0*ld+first+done
		if lines {
			count, length, at = m, kc, (first+done)*ld+k0
		}
		for i := range count {
			Widen(wide[i*length:][:length], x[at+i*ld:][:length])
		}
		panel, converted := dst[done*s.elements(kc):], wide[:count*length]
		if ofB {
			pack.packB(panel, converted, length, lines, 0, m, 0, kc, edge)
		} else {
			pack.packA(panel, converted, length, !lines, 0, m, 0, kc, edge)
		}
	}
}

// packColumns copies n elements of kc lines to panels of the given width and fills the last panel
// with zeros. edge has space for width*kc elements.
func (s *kernelSet) packColumns(fast func(dst, src *float32, kc, ld, panels int64), dst, src []float32, ld, width, n,
	kc int, edge []float32) {
	done, size := 0, s.elements(kc)
	if panels := n / width; fast != nil && panels > 0 {
		done = panels * width
		_, _ = dst[size*done-1], src[(kc-1)*ld+done-1]
		fast(&dst[0], &src[0], int64(kc), int64(ld), int64(panels))
	}
	for ; done < n; done += width {
		panel, m := dst[done*size:][:size*width], min(width, n-done)
		lines := panel
		if s.pairs() { // only the assembly creates pairs, from complete lines
			lines = edge[:kc*width]
		}
		for k := range kc {
			d := lines[k*width:][:width]
			clear(d[copy(d, src[k*ld+done:][:m]):])
		}
		if s.pairs() {
			fast(&panel[0], &lines[0], int64(kc), int64(width), 1)
		}
	}
	if s.round != nil {
		s.round(dst[:done*size])
	}
}

// packRows transposes n lines of kc elements to panels of the given width. The rest of the last
// panel is undefined (no element of C that is kept depends on it). pad is the bits of the term that
// completes the last pair. edge has space for width lines of kc elements, at least 32.
func (s *kernelSet) packRows(fast func(dst, src *float32, kc, ld int64), dst, src []float32, ld, width, n, kc int,
	pad int64, edge []float32) {
	size := s.elements(kc)
	for i := 0; i < n; i += width {
		panel, lines := dst[i*size:][:size*width], min(width, n-i)
		if s.pairs() {
			stride := (kc + 31) / 32 * 16
			words := edge[:width*stride]
			_ = src[(i+lines-1)*ld+kc-1]
			s.pairLines(&words[0], &src[i*ld], int64(kc), int64(ld), int64(lines), pad)
			if lines > 1 {
				lines = width // all lines exist; the last ones contain old data of other panels
			}
			packPanel(fast, panel, words, stride, width, lines, size, nil)
		} else {
			packPanel(fast, panel, src[i*ld:], ld, width, lines, kc, edge)
		}
		if s.round != nil {
			s.round(panel)
		}
	}
}

// packPanel transposes n lines to one panel.
func packPanel(fast func(dst, src *float32, kc, ld int64), dst, src []float32, ld, width, n, kc int, edge []float32) {
	done := 0
	if fast != nil && kc >= 4 {
		if n < width && n > 1 { // the assembly needs all lines
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
