package cpu

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"mula/internal/alloctest"
	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/devicetest"
)

// uniform returns n numbers in ±0.5 that depend on the seed only.
func uniform(seed uint64, n int) []float32 {
	r := rand.New(rand.NewPCG(seed, 1))
	x := make([]float32, n)
	for i := range x {
		x[i] = r.Float32() - .5
	}
	return x
}

// allSets lists the kernel sets of this machine, of all precisions.
func allSets() []*kernelSet { return append(kernelsFor(xpu.FP32), kernelsFor(xpu.BF16)...) }

// operand is x as a product takes it.
func operand(precision xpu.Precision, x []float32) []float32 {
	if precision == xpu.FP32 {
		return x
	}
	y := make([]float32, len(x))
	for i, v := range x {
		if y[i] = v; math.Abs(float64(v)) < 0x1p-126 {
			y[i] = float32(math.Copysign(0, float64(v)))
		} else if v == v {
			y[i], _ = new(big.Float).SetPrec(8).SetFloat64(float64(v)).Float32() // 8 bits; ties to even
		}
	}
	return y
}

// devices makes a device for every kernel set of this machine and number of threads up to 3.
func devices(t *testing.T) (all []*Device) {
	for _, k := range allSets() {
		for threads := 1; threads <= 3; threads++ {
			d := newDevice(k, threads)
			t.Cleanup(d.Close)
			all = append(all, d)
		}
	}
	return all
}

// matrix is a stored matrix whose leading dimension leaves gap elements between rows.
func matrix(seed uint64, rows, columns, gap int, trans bool) (x []float32, ld int) {
	if trans {
		rows, columns = columns, rows
	}
	ld = columns + gap
	return uniform(seed, max(0, (rows-1)*ld+columns)), ld
}

// at is element (i, j) of op(x).
func at(x []float32, ld int, trans bool, i, j int) float64 {
	if trans {
		i, j = j, i
	}
	return float64(x[i*ld+j])
}

// flat returns host memory as a tensor.
func flat(x []float32) xpu.Tensor { return xpu.Of(x, len(x)) }

func TestMatMul(t *testing.T) {
	all := devices(t)
	for _, size := range [][3]int{{1, 1, 1}, {1, 64, 300}, {2, 33, 5}, {3, 31, 256}, {5, 16, 257}, {8, 100, 64},
		{14, 32, 4}, {6, 16, 8},
		{15, 47, 3}, {33, 70, 513}, {100, 129, 30}, {169, 64, 260}, {0, 5, 5}, {5, 0, 5}, {5, 5, 0}, {200, 0, 5}, {0, 0,
			0}} {
		m, n, k := size[0], size[1], size[2]
		for flags := range 8 {
			transA, transB, accumulate := flags&1 != 0, flags&2 != 0, flags&4 != 0
			a, lda := matrix(1, m, k, 3, transA)
			b, ldb := matrix(2, k, n, 5, transB)
			c, ldc := matrix(3, m, n, 7, false)
			wants := map[xpu.Precision][]float64{}
			for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
				a, b, want := operand(precision, a), operand(precision, b), make([]float64, len(c))
				for i, v := range c {
					row, column := i/ldc, i%ldc
					if accumulate || column >= n { // between the rows nothing may be written
						want[i] = float64(v)
					}
					if column < n {
						for p := range k {
							want[i] += at(a, lda, transA, row, p) * at(b, ldb, transB, p, column)
						}
					}
				}
				wants[precision] = want
			}
			for _, d := range all {
				want := wants[d.Precision()]
				got := append([]float32(nil), c...)
				d.MatMul(xpu.Of(got, len(got)).Strided(m, n, ldc), devicetest.Stored(flat(a), m, k, lda, transA),
					devicetest.Stored(flat(b), k, n, ldb, transB), xpu.MatMulOptions{Accumulate: accumulate})
				for i, w := range want {
					if !(math.Abs(w-float64(got[i])) < 1e-5) {
						t.Fatalf("%s: %v, flags %d: c[%d][%d] = %v, want %v", d.Name(), size, flags, i/ldc, i%ldc,
							got[i], w)
					}
				}
			}
		}
	}
}

// fma is x·y+z rounded once. With flush what is denormal, once rounded to 24 bits, becomes zero.
func fma(x, y, z float32, flush bool) float32 {
	wide := new(big.Float).SetPrec(600).SetFloat64(float64(x))
	wide.Mul(wide, new(big.Float).SetFloat64(float64(y)))
	wide.Add(wide, new(big.Float).SetFloat64(float64(z)))
	f, _ := wide.Float32()
	if flush && wide.SetPrec(24).MantExp(nil) <= -126 {
		return 0
	}
	return f
}

// TestDefinition compares the products with the definition of their bits in the package comment.
func TestDefinition(t *testing.T) {
	const m, n, k = 17, 37, 1301
	for _, scale := range []float32{1, 0x1p-61} { // the second makes chains that pass through denormal numbers
		a, b, c := uniform(1, m*k), uniform(2, k*n), uniform(3, m*n)
		for _, x := range [][]float32{a, b, c} {
			for i := range x {
				x[i] *= scale
			}
		}
		for i := range c { // of the size of the products
			c[i] *= scale
		}
		for _, kernels := range allSets() {
			d := newDevice(kernels, 2)
			got := append([]float32(nil), c...)
			d.MatMul(xpu.Of(got, m, n), xpu.Of(a, m, k), xpu.Of(b, k, n),
				xpu.MatMulOptions{Accumulate: true})
			d.Close()
			a, b := operand(kernels.precision, a), operand(kernels.precision, b)
			for i := 0; i < m*n; i += 23 {
				want := c[i]
				block := map[xpu.Precision]int{xpu.FP32: 256, xpu.BF16: 512}[kernels.precision]
				for k0 := 0; k0 < k; k0 += block {
					s := float32(0)
					for p := k0; p < min(k, k0+block); p++ {
						x, y := a[i/n*k+p], b[p*n+i%n]
						if kernels.name == "go" {
							s += float32(x * y)
						} else {
							s = fma(x, y, s, kernels.precision == xpu.BF16)
						}
					}
					want += s
				}
				if got[i] != want {
					t.Fatalf("%s: element %d of scale %g is %x, want %x", d.Name(), i, scale, got[i], want)
				}
			}
		}
	}
}

// TestRounding holds every way of rounding to bfloat16 to the definition, on numbers of all kinds.
func TestRounding(t *testing.T) {
	inf := float32(math.Inf(1))
	x := []float32{0, 1, 0x1.01p0, 0x1.03p0, 0x1.010002p0, 0x1.fep127, 0x1.fefffep127, 0x1.ffp127, math.MaxFloat32, inf,
		0x1p-126, 0x1.01p-126,
		0x1.fffffcp-127, 0x1p-127, 0x1p-149, float32(math.NaN()), math.Float32frombits(0x7f800001),
		math.Float32frombits(0x7fffffff)}
	for _, v := range x {
		x = append(x, -v)
	}
	r := rand.New(rand.NewPCG(1, 1))
	for len(x) < 20000 {
		x = append(x, math.Float32frombits(r.Uint32()))
	}
	want := operand(xpu.BF16, x)
	if got := want[2:5]; got[0] != 1 || got[1] != 0x1.04p0 || got[2] != 0x1.02p0 {
		t.Fatalf("the reference rounds to %x", got)
	}
	check := func(how string, got func(i int) uint32) {
		t.Helper()
		for i, v := range x {
			g := math.Float32frombits(got(i))
			if v != v {
				if g == g || math.Signbit(float64(g)) != math.Signbit(float64(v)) || got(i)&0xffff != 0 {
					t.Fatalf("%s: NaN %#x became %#x", how, math.Float32bits(v), got(i))
				}
			} else if got(i) != math.Float32bits(want[i]) {
				t.Fatalf("%s: %x (%#x) became %x (%#x), want %x", how, v, math.Float32bits(v), g, got(i), want[i])
			}
		}
	}
	got := append([]float32(nil), x...)
	roundBF16Go(got)
	check("roundBF16Go", func(i int) uint32 { return math.Float32bits(got[i]) })
	got = append([]float32(nil), x...)
	roundBF16(got)
	check("roundBF16", func(i int) uint32 { return math.Float32bits(got[i]) })
	bits := make([]uint16, len(x))
	BF16(bits, x)
	check("BF16", func(i int) uint32 { return uint32(bits[i]) << 16 })
	for _, set := range pairSets() {
		panel, edge := make([]float32, 14), make([]float32, 14*blockKBF16)
		word := func(trans bool) func(i int) uint32 {
			return func(i int) uint32 {
				set.packA(panel, []float32{1, x[i]}, 1, trans, 0, 1, 0, 2, edge)
				return math.Float32bits(panel[0]) << 16
			}
		}
		check("the pack of columns", word(true))
		x2 := func(i int) uint32 {
			set.packA(panel, []float32{x[i], 1}, 2, false, 0, 1, 0, 2, edge)
			return math.Float32bits(panel[0]) & 0xffff0000
		}
		check("the pack of rows", x2)
	}
}

// The list of kernel sets has every set once, whatever their times are, and the fastest first.
func TestFastestFirst(t *testing.T) {
	a, b, c, d := &kernelSet{name: "a"}, &kernelSet{name: "b"}, &kernelSet{name: "c"}, &kernelSet{name: "d"}
	times := map[*kernelSet]time.Duration{a: 20, b: 10, c: 20, d: 5}
	sets := []*kernelSet{a, b, c, d}
	fastestFirst(sets, func(s *kernelSet) time.Duration { return times[s] })
	if !slices.Equal(sets, []*kernelSet{d, b, a, c}) {
		t.Errorf("the order is %s, %s, %s, %s; want d, b, a, c", sets[0].name, sets[1].name, sets[2].name, sets[3].name)
	}
	var names []string
	for _, s := range kernelsFor(xpu.BF16) {
		names = append(names, s.name)
	}
	want := len(pairSets()) + len(kernelSets())
	if slices.Sort(names); len(slices.Compact(names)) != want || len(names) != want {
		t.Errorf("the sets of bf16 are %v; want %d", names, want)
	}
}

// TestSameBits draws products and computes each in many ways: one row alone, all rows, in groups,
// transposed, with 1 and 3 threads, and by every kernel set that promises the same bits.
func TestSameBits(t *testing.T) {
	classes := map[string][]*Device{}
	for _, d := range devices(t) {
		if d.Threads() != 2 {
			classes[d.Arithmetic()] = append(classes[d.Arithmetic()], d)
		}
	}
	longtest.Check(t, 40, func(t *rapid.T) {
		counts := rapid.SliceOfN(rapid.OneOf(rapid.Int32Range(0, 3), rapid.Int32Range(0, 60),
			rapid.Int32Range(160, 180)), 1, 2).Draw(t, "counts")
		n := rapid.IntRange(1, 40).Draw(t, "n")
		k := rapid.OneOf(rapid.IntRange(1, 10), rapid.IntRange(1, 40), rapid.IntRange(250, 270),
			rapid.IntRange(505, 520)).Draw(t, "k")
		accumulate := rapid.Bool().Draw(t, "accumulate")
		// denormal products; denormal operands
		scale := rapid.SampledFrom([]float32{1, 0x1p-61, 0x1p-125}).Draw(t, "scale")
		m := total(counts)
		a, b, c0 := uniform(1, m*k), uniform(2, n*k), uniform(3, m*n)
		for _, x := range [][]float32{a, b, c0} {
			for i := range x {
				x[i] *= scale
			}
		}
		for range min(len(a), rapid.IntRange(0, 3).Draw(t, "special")) {
			a[rapid.IntRange(0, len(a)-1).Draw(t, "element")] = rapid.SampledFrom([]float32{float32(math.NaN()),
				float32(math.Inf(-1)), math.MaxFloat32,
				float32(math.Copysign(0, -1)), 0x1p-149}).Draw(t, "value")
		}
		at, bt := transpose(a, m, k), transpose(b, k, n)
		bs, bts := slices.Repeat(b, len(counts)), slices.Repeat(bt, len(counts))
		for _, class := range classes {
			var want []float32
			same := func(how string, d *Device, f func(c []float32)) {
				c := append([]float32(nil), c0...)
				f(c)
				if want == nil {
					want = c
				}
				for i := range c {
					if math.Float32bits(c[i]) != math.Float32bits(want[i]) && (c[i] == c[i] || want[i] == want[i]) {
						t.Fatalf("%s, %s: element %d is %x, elsewhere %x", d.Name(), how, i, c[i], want[i])
					}
				}
			}
			for _, d := range class {
				same("NN", d, func(c []float32) {
					d.MatMul(xpu.Of(c, m, n), xpu.Of(a, m, k),
						xpu.Of(b, k, n), xpu.MatMulOptions{Accumulate: accumulate})
				})
				same("NT", d, func(c []float32) {
					d.MatMul(xpu.Of(c, m, n), xpu.Of(a, m, k),
						xpu.Of(bt, n, k).T(), xpu.MatMulOptions{Accumulate: accumulate})
				})
				same("TN", d, func(c []float32) {
					d.MatMul(xpu.Of(c, m, n), xpu.Of(at, k, m).T(),
						xpu.Of(b, k, n), xpu.MatMulOptions{Accumulate: accumulate})
				})
				same("TT", d, func(c []float32) {
					d.MatMul(xpu.Of(c, m, n), xpu.Of(at, k, m).T(),
						xpu.Of(bt, n, k).T(), xpu.MatMulOptions{Accumulate: accumulate})
				})
				same("grouped", d, func(c []float32) {
					d.GroupedMatMul(xpu.Of(c, m, n), xpu.Of(a, m, k),
						xpu.Of(bs, len(counts), k, n), xpu.OfInts(counts, len(counts)),
						xpu.MatMulOptions{Accumulate: accumulate})
				})
				same("grouped, transposed", d, func(c []float32) {
					d.GroupedMatMul(xpu.Of(c, m, n), xpu.Of(a, m, k), xpu.Of(bts, len(counts), n, k).T(),
						xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{Accumulate: accumulate})
				})
				same("weight gradient", d, func(c []float32) {
					d.GroupedWeightGrad(xpu.Of(c, 1, m, n), xpu.Of(at, k, m),
						xpu.Of(b, k, n), xpu.OfInts([]int32{int32(k)}, 1),
						xpu.MatMulOptions{Accumulate: accumulate})
				})
				same("row by row", d, func(c []float32) {
					d.Parallel(m, func(i int) {
						d.MatMul(xpu.Of(c[i*n:], 1, n), xpu.Of(a[i*k:], 1, k),
							xpu.Of(bt, n, k).T(), xpu.MatMulOptions{Accumulate: accumulate})
					})
				})
			}
		}
	})
}

func total(counts []int32) (rows int) {
	for _, c := range counts {
		rows += int(c)
	}
	return rows
}

func transpose(x []float32, rows, columns int) []float32 {
	y := make([]float32, len(x))
	for i := range rows {
		for j := range columns {
			y[j*rows+i] = x[i*columns+j]
		}
	}
	return y
}

func TestGrouped(t *testing.T) {
	all := devices(t)
	for _, counts := range [][]int32{{}, {0, 0}, {20, 0, 31, 180, 1, 14}, {0, 33, 0}} {
		rows := total(counts)
		for _, size := range [][2]int{{40, 265}, {70, 16}, {1, 5}} {
			n, k := size[0], size[1]
			for flags := range 8 {
				transB, accumulate, precision := flags&1 != 0, flags&2 != 0, xpu.FP32
				if flags&4 != 0 {
					precision = xpu.BF16
				}
				start, base := float32(math.NaN()), 0.0 // what was there must not matter
				if accumulate {
					start, base = 0.25, 0.25
				}
				ldb := n
				if transB {
					ldb = k
				}
				a, dc := uniform(1, rows*k), uniform(2, rows*n)
				b := fill(len(counts)*k*n, float32(math.NaN())) // of a group of no rows it must not matter
				for g, count := range counts {
					if count > 0 {
						copy(b[g*k*n:], uniform(uint64(10+g), k*n))
					}
				}
				ra, rdc, rb := operand(precision, a), operand(precision, dc), operand(precision, b)
				wantC, wantDB := make([]float64, rows*n), make([][]float64, len(counts))
				row := 0
				for g, count := range counts {
					count := int(count)
					for i := row; i < row+count; i++ {
						for j := range n {
							wantC[i*n+j] = base
							for p := range k {
								wantC[i*n+j] += float64(ra[i*k+p]) * at(rb[g*k*n:][:k*n], ldb, transB, p, j)
							}
						}
					}
					if count > 0 || !accumulate {
						wantDB[g] = make([]float64, k*n)
					}
					for i := range wantDB[g] {
						wantDB[g][i] = base
						for r := row; r < row+count; r++ {
							wantDB[g][i] += float64(ra[r*k+i/n]) * float64(rdc[r*n+i%n])
						}
					}
					row += count
				}
				for _, d := range all {
					if d.Precision() != precision {
						continue
					}
					c, db := fill(rows*n, start), fill(len(counts)*k*n, start)
					d.GroupedMatMul(xpu.Of(c, rows, n), xpu.Of(a, rows, k),
						devicetest.Stack(flat(b), len(counts), k, n, transB), xpu.OfInts(counts, len(counts)),
						xpu.MatMulOptions{Accumulate: accumulate})
					d.GroupedWeightGrad(xpu.Of(db, len(counts), k, n), xpu.Of(a, rows, k),
						xpu.Of(dc, rows, n), xpu.OfInts(counts, len(counts)),
						xpu.MatMulOptions{Accumulate: accumulate})
					for i, want := range wantC {
						if !(math.Abs(want-float64(c[i])) < 1e-5) {
							t.Fatalf("%s: counts %v, %v, flags %d: c[%d] = %v, want %v", d.Name(), counts, size, flags,
								i, c[i], want)
						}
					}
					for g := range counts {
						for i, got := range db[g*k*n:][:k*n] {
							if want := wantDB[g]; want == nil && got != start || want != nil &&
								!(math.Abs(want[i]-float64(got)) < 1e-5) {
								t.Fatalf("%s: counts %v, %v, flags %d: element %d of db %d is %v, want %v", d.Name(),
									counts, size, flags, i, g, got, want)
							}
						}
					}
				}
			}
		}
	}
}

func fill(n int, v float32) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = v
	}
	return x
}

// TestSpans leaves little room for packed panels, so that a product takes several rounds: same
// bits.
func TestSpans(t *testing.T) {
	const m, n, k = 390, 70, 300
	a, b, counts := uniform(1, m*k), uniform(2, 3*n*k), []int32{170, 20, 200}
	for _, d := range devices(t) {
		var want []float32
		for _, bound := range []int{packedElements, 70 * 300, 40 * 300, 1} {
			d.packedElements = bound
			c := make([]float32, m*n)
			d.GroupedMatMul(xpu.Of(c, m, n), xpu.Of(a, m, k), xpu.Of(b, len(counts), n, k).T(),
				xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{})
			if want == nil {
				want = c
			}
			for i := range c {
				if c[i] != want[i] {
					t.Fatalf("%s: with room for %d elements, element %d is %x, otherwise %x", d.Name(), bound, i, c[i],
						want[i])
				}
			}
		}
	}
}

// TestPiecesWithinLoop: a product is cut for all workers, but not within a loop that has work for
// them.
func TestPiecesWithinLoop(t *testing.T) {
	d := New(2, xpu.FP32)
	defer d.Close()
	const m, n, k = 32, 512, 512 // one block of rows
	a, b, c := uniform(1, m*k), uniform(2, n*k), make([]float32, m*n)
	pieces := func() int {
		p := &product{dev: d, problems: []problem{{m: m, n: n, k: k, a: a, b: b, c: c, lda: k, ldb: n, ldc: n}}}
		p.fill(0, 0)
		p.cut()
		return len(p.pieces)
	}
	if n := pieces(); n < 2 {
		t.Errorf("%d pieces for two threads", n)
	}
	counted := make(chan struct{})
	d.Parallel(3, func(i int) {
		if i > 0 {
			<-counted // the last call is not handed out before
			return
		}
		if n := pieces(); n != 1 {
			t.Errorf("%d pieces within a loop", n)
		}
		close(counted)
	})
}

// TestWrongCounts checks that counts that do not add up to the rows are refused before anything is
// written.
func TestWrongCounts(t *testing.T) {
	d := New(2, xpu.FP32)
	defer d.Close()
	a, b, c := xpu.Of(make([]float32, 15), 3, 5), xpu.Of(make([]float32, 40), 2, 5, 4), fill(40, 7)
	for _, counts := range [][]int32{{2, 2}, {2, 0}, {4, -1}} {
		groups, o := xpu.OfInts(counts, 2), xpu.MatMulOptions{}
		for name, f := range map[string]func(){
			"GroupedMatMul":     func() { d.GroupedMatMul(xpu.Of(c, 3, 4), a, b, groups, o) },
			"GroupedWeightGrad": func() { d.GroupedWeightGrad(xpu.Of(c, 2, 5, 4), a, xpu.Of(c, 3, 4), groups, o) },
		} {
			t.Run(fmt.Sprint(name, counts), func(t *testing.T) {
				defer func() {
					if r := recover(); r == nil || !strings.HasPrefix(fmt.Sprint(r), "xpu: "+name) {
						t.Errorf("panicked with %v", r)
					}
					for i, v := range c {
						if v != 7 {
							t.Errorf("c[%d] was written", i)
						}
					}
				}()
				f()
			})
		}
	}
}

// TestNoAllocation holds the promise that a training step in its steady state allocates nothing
// here.
func TestNoAllocation(t *testing.T) {
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		t.Run(string(precision), func(t *testing.T) { testNoAllocation(t, precision) })
	}
}

func testNoAllocation(t *testing.T, precision xpu.Precision) {
	d := New(2, precision)
	defer d.Close()
	const m, n, k = 400, 64, 64
	a, b, c := uniform(1, m*k), uniform(2, n*k), make([]float32, m*n)
	bs, counts := uniform(3, 3*n*k), []int32{300, 0, 100}
	f := func(int) {}
	if n := alloctest.Least(func() {
		d.MatMul(xpu.Of(c, m, n), xpu.Of(a, m, k), xpu.Of(b, n, k).T(), xpu.MatMulOptions{})
		d.GroupedMatMul(xpu.Of(c, m, n), xpu.Of(a, m, k), xpu.Of(bs, len(counts), n, k).T(),
			xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{Accumulate: true})
		d.GroupedWeightGrad(xpu.Of(bs, len(counts), k, n), xpu.Of(a, m, k), xpu.Of(c, m, n),
			xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{Accumulate: true})
		d.Parallel(100, f)
	}); n > 0 {
		t.Errorf("%v allocations a run", n)
	}
}

func BenchmarkMatMul(b *testing.B) {
	type shape struct {
		name           string
		transA, transB bool
		m, n, k        int
	}
	for _, s := range []shape{
		{"square_NN", false, false, 1024, 1024, 512},
		{"square_NT", false, true, 1024, 1024, 512},
		{"square_TN", true, false, 1024, 1024, 512},
		{"attention_NT", false, true, 2048, 256, 256},
		{"attention_NN", false, false, 2048, 256, 256},
		{"attention_TN", true, false, 256, 256, 2048},
		{"logits_NT", false, true, 2048, 4096, 256},
		{"logits_NN", false, false, 2048, 256, 4096},
		{"logits_TN", true, false, 4096, 256, 2048},
		{"router_NT", false, true, 2048, 16, 256},
		{"row1_NT", false, true, 1, 4096, 256},
		{"row4_NT", false, true, 4, 4096, 256},
		{"row8_NT", false, true, 8, 4096, 256},
		{"row1_NN", false, false, 1, 4096, 256},
	} {
		x, lda := matrix(1, s.m, s.k, 0, s.transA)
		y, ldb := matrix(2, s.k, s.n, 0, s.transB)
		c := make([]float32, s.m*s.n)
		benchmark(b, s.name, 2*float64(s.m)*float64(s.n)*float64(s.k), func(d *Device) {
			d.MatMul(xpu.Of(c, s.m, s.n), devicetest.Stored(flat(x), s.m, s.k, lda, s.transA),
				devicetest.Stored(flat(y), s.k, s.n, ldb, s.transB), xpu.MatMulOptions{})
		})
	}
}

// BenchmarkTile measures the innermost loop alone, on panels in the first cache.
func BenchmarkTile(b *testing.B) {
	for _, k := range allSets() {
		a, y, c := uniform(1, k.blockK*maxMR), uniform(2, k.blockK*maxNR), make([]float32, maxMR*maxNR)
		for _, rows := range []int{1, k.mr / 2, k.mr} {
			b.Run(fmt.Sprintf("%s/%s/rows=%d", k.precision, k.name, rows), func(b *testing.B) {
				start := cpuSeconds()
				for b.Loop() {
					k.multiply(rows, k.elements(k.blockK), a, y, k.nr, c, k.nr, false)
				}
				b.ReportMetric(2*float64(k.blockK*rows*k.nr*b.N)/(cpuSeconds()-start)/1e9, "GFLOP/cpu-s")
			})
		}
	}
}

// BenchmarkPack measures the packs, panel after panel of a matrix of 8192 lines of 256 elements,
// which the second cache cannot hold.
func BenchmarkPack(b *testing.B) {
	x, dst, edge := uniform(1, 8192*256), make([]float32, 256*12*maxMR), make([]float32, 256*maxNR)
	for _, k := range allSets() {
		for name, f := range map[string]func(i int){
			"A":           func(i int) { k.packA(dst, x, 256, false, i%40*200, 12*k.mr, 0, 256, edge) },
			"Atransposed": func(i int) { k.packA(dst, x, 256, true, i%2*30, 12*k.mr, i/2%32*256, 256, edge) },
			"B":           func(i int) { k.packB(dst, x, 256, false, i%2*96, 96, i/2%32*256, 256, edge) },
			"Btransposed": func(i int) { k.packB(dst, x, 256, true, i%80*96, 96, 0, 256, edge) },
		} {
			b.Run(string(k.precision)+"/"+k.name+"/"+name, func(b *testing.B) {
				width := 96
				if name[0] == 'A' {
					width = 12 * k.mr
				}
				start := cpuSeconds()
				for i := 0; b.Loop(); i++ {
					f(i)
				}
				b.ReportMetric(float64(width*256*b.N)/(cpuSeconds()-start)/1e9, "Gelements/cpu-s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkGrouped has the experts of mula-tiny: 2048 tokens, 4 of 16 experts each, 256 → 128 →
// 256.
func BenchmarkGrouped(b *testing.B) {
	const experts, rows, hidden, inner = 16, 8192, 256, 128
	counts := make([]int32, experts) // ragged, as a router leaves them
	left := int32(rows)
	for e := range counts {
		counts[e] = int32(rows/experts + (e*37%16-7)*30)
		left -= counts[e]
	}
	counts[0] += left
	x, y := uniform(1, rows*hidden), uniform(2, rows*inner)
	w := uniform(3, experts*hidden*inner)
	const flops = 2 * rows * hidden * inner
	benchmark(b, "up_NT", flops, func(d *Device) {
		d.GroupedMatMul(xpu.Of(y, rows, inner),
			xpu.Of(x, rows, hidden), xpu.Of(w, len(counts), inner, hidden).T(), xpu.OfInts(counts, len(counts)),
			xpu.MatMulOptions{})
	})
	benchmark(b, "up_NN", flops, func(d *Device) {
		d.GroupedMatMul(xpu.Of(x, rows, hidden), xpu.Of(y, rows, inner),
			xpu.Of(w, len(counts), inner, hidden), xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{})
	})
	benchmark(b, "down_NT", flops, func(d *Device) {
		d.GroupedMatMul(xpu.Of(x, rows, hidden), xpu.Of(y, rows, inner),
			xpu.Of(w, len(counts), hidden, inner).T(), xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{})
	})
	benchmark(b, "up_gradient", flops, func(d *Device) {
		d.GroupedWeightGrad(xpu.Of(w, len(counts), inner, hidden), xpu.Of(y, rows, inner),
			xpu.Of(x, rows, hidden), xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{})
	})
	benchmark(b, "down_gradient", flops, func(d *Device) {
		d.GroupedWeightGrad(xpu.Of(w, len(counts), hidden, inner), xpu.Of(x, rows, hidden),
			xpu.Of(y, rows, inner), xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{})
	})
}

// benchmark measures f on every kernel set with 1 and 2 threads: GFLOP/s by the clock, and GFLOP
// per second of processor time, times the number of threads. The latter is the rate of an otherwise
// idle machine.
func benchmark(b *testing.B, name string, flops float64, f func(d *Device)) {
	for _, k := range allSets() {
		for threads := 1; threads <= 2; threads++ {
			b.Run(fmt.Sprintf("%s/%s/%s/threads=%d", name, k.precision, k.name, threads), func(b *testing.B) {
				d := newDevice(k, threads)
				defer d.Close()
				f(d)
				start := cpuSeconds()
				for b.Loop() {
					f(d)
				}
				used := (cpuSeconds() - start) / float64(threads)
				b.ReportMetric(flops*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
				b.ReportMetric(flops*float64(b.N)/used/1e9, "GFLOP/cpu-s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
