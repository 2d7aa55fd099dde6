package cpu

import (
	"math"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"mula/xpu"
	"mula/xpu/devicetest"
)

// fence is memory before a page that is not accessible.
type fence struct{ memory []byte }

func newFence(t *testing.T, elements int) *fence {
	page := unix.Getpagesize()
	size := (4*elements + page - 1) / page * page
	memory, err := unix.Mmap(-1, 0, size+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(memory) })
	if err := unix.Mprotect(memory[size:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	return &fence{memory[:size]}
}

// last is the last n elements before the fence, set to x.
func (f *fence) last(x []float32) []float32 {
	if len(x) == 0 {
		return nil
	}
	s := unsafe.Slice((*float32)(unsafe.Pointer(&f.memory[len(f.memory)-4*len(x)])), len(x))
	copy(s, x)
	return s
}

// TestFence: no kernel touches memory behind a slice, or the test dies. (Kernels proceed upwards,
// so none touches memory before a slice.)
func TestFence(t *testing.T) {
	all := devices(t)
	const largest = 200 * 320
	var fences [5]*fence
	for i := range fences {
		fences[i] = newFence(t, largest)
	}
	defer func(s *kernelSet) { vectorSet = s }(vectorSet)
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.OneOf(rapid.IntRange(1, 30), rapid.IntRange(160, 200)).Draw(t, "m")
		n := rapid.IntRange(1, 70).Draw(t, "n")
		k := rapid.OneOf(rapid.IntRange(1, 40), rapid.IntRange(240, 280)).Draw(t, "k")
		transA, transB := rapid.Bool().Draw(t, "transA"), rapid.Bool().Draw(t, "transB")
		gap := rapid.IntRange(0, 20).Draw(t, "gap")
		a, lda := matrix(1, m, k, gap, transA)
		b, ldb := matrix(2, k, n, gap, transB)
		c, ldc := matrix(3, m, n, gap, false)
		for _, d := range all {
			d.MatMul(devicetest.Stored(flat(fences[2].last(c)), m, n, ldc, false),
				devicetest.Stored(flat(fences[0].last(a)), m, k, lda, transA),
				devicetest.Stored(flat(fences[1].last(b)), k, n, ldb, transB),
				xpu.MatMulOptions{Accumulate: true})
		}
		v := func(i int) []float32 { return fences[i].last(a[:min(len(a), n)]) }
		for _, set := range kernelSets() {
			vectorSet = set
			Max(v(0))
			ExpSum(v(0), v(1), 1)
			SwiGLU(v(0), v(1), v(2))
			SwiGLUGrad(v(0), v(1), v(2), v(3), v(4))
			Dot(v(0), v(1))
			sumScaled(v(0), v(1), 2, v(2))
			Scale(v(0), 2)
			SumSquares(v(0))
			MulScaled(v(0), v(1), 2, v(2))
			AddProduct(v(0), 2, v(1), v(2))
			SoftmaxGrad(v(0), v(1), v(2), 2)
			h := min(len(a), n) / 2
			Rotate(fences[0].last(a[:2*h]), fences[1].last(a[:2*h]), fences[2].last(a[:h]), fences[3].last(a[:h]), 2)
			updateAdamW(xpu.AdamW{Step: 1}, v(0), v(1), v(2), v(3))
		}
	})
}

// TestPack: the panels hold what they should, and the packs write nothing behind them.
func TestPack(t *testing.T) {
	out, edge := newFence(t, 3*maxNR*blockKBF16), make([]float32, maxNR*blockKBF16)
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 70).Draw(t, "n")
		kc := rapid.OneOf(rapid.IntRange(1, 40), rapid.Just(blockK), rapid.Just(blockKBF16)).Draw(t, "kc")
		trans := rapid.Bool().Draw(t, "trans")
		first, k0 := rapid.IntRange(0, 3).Draw(t, "first"), rapid.IntRange(0, 3).Draw(t, "k0")
		a, lda := matrix(1, first+n, k0+kc, 2, trans)
		b, ldb := matrix(2, k0+kc, first+n, 2, trans)
		for _, set := range allSets() {
			ra, rb := operand(set.precision, a), operand(set.precision, b)
			size := set.elements(kc)
			check := func(name string, width int, dst []float32, want func(i, k int) float64) {
				at := func(i, k int) float32 { return dst[i/width*width*size+k*width+i%width] }
				for i := range n {
					for k := range kc {
						got := float32(0)
						if set.pairs() {
							got = math.Float32frombits(math.Float32bits(at(i, k/2)) << (k % 2 * 16) & 0xffff0000)
						} else {
							got = at(i, k)
						}
						if float64(got) != want(first+i, k0+k) {
							t.Fatalf("%s %s: line %d, term %d of %s is %v, want %v", set.precision, set.name, i, k,
								name, got, want(first+i, k0+k))
						}
					}
					if set.pairs() && kc%2 == 1 && math.Float32bits(at(i, kc/2))&0x7fff != 0 {
						t.Fatalf("%s: line %d of %s has a term too many", set.name, i, name)
					}
				}
			}
			panel := func(width int) []float32 { return out.last(make([]float32, (n+width-1)/width*width*size)) }
			dst := panel(set.mr)
			set.packA(dst, a, lda, trans, first, n, k0, kc, edge)
			check("A", set.mr, dst, func(i, k int) float64 { return at(ra, lda, trans, i, k) })
			dst = panel(set.nr)
			set.packB(dst, b, ldb, trans, first, n, k0, kc, edge)
			check("B", set.nr, dst, func(i, k int) float64 { return at(rb, ldb, trans, k, i) })
		}
	})
}
