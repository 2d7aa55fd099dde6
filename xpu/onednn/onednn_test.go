package onednn

import (
	"math"
	"math/big"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/alloctest"
	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/devicetest"
)

// device makes a device, or skips the test where there is no library.
func device(t testing.TB, threads int, precision xpu.Precision) *Device {
	d, err := New(threads, precision)
	if err != nil && os.Getenv(LibraryVariable) == "" && strings.Contains(err.Error(), "no oneDNN library was found") {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

// devices makes devices of both precisions with 1 and 3 threads, and such whose library may use no
// tile but the whole one.
func devices(t testing.TB) (all []*Device) {
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		all = append(all, device(t, 1, precision), device(t, 3, precision))
		all = append(all, whole(all[len(all)-1]))
	}
	return all
}

// whole is a device that finds every tile but the whole one in disagreement with it.
func whole(d *Device) *Device {
	l := &library{version: d.library.version, major: d.library.major, engine: d.library.engine,
		symbols: d.library.symbols, sum: d.library.sum,
		execute: d.library.execute, handle: d.library.handle, primitives: map[shape]*primitive{},
		references: map[reference][probes][probes]float32{}}
	for s, p := range d.library.primitives {
		if s == full(s.dataType, s.k) {
			l.primitives[s] = p
		}
	}
	for k := termStep; k <= blockK; k += termStep {
		l.references[reference{d.dataType, k}] = [probes][probes]float32{} // which no product of probes is
	}
	return &Device{library: l, dataType: d.dataType, name: d.name, precision: d.precision, Host: d.Host, space: 1 << 16}
}

func uniform(seed uint64, n int) []float32 {
	r := rand.New(rand.NewPCG(seed, 1))
	x := make([]float32, n)
	for i := range x {
		x[i] = r.Float32() - .5
	}
	return x
}

// asTaken is x as a product takes it.
func asTaken(precision xpu.Precision, x []float32) []float32 {
	y := append([]float32(nil), x...)
	for i, v := range y {
		if precision == xpu.BF16 {
			y[i], _ = new(big.Float).SetPrec(8).SetFloat64(float64(v)).Float32() // 8 bits; ties to even
		}
	}
	return y
}

func matrix(seed uint64, rows, columns, gap int, trans bool) (x []float32, ld int) {
	if trans {
		rows, columns = columns, rows
	}
	ld = columns + gap
	return uniform(seed, max(0, (rows-1)*ld+columns)), ld
}

func at(x []float32, ld int, trans bool, i, j int) float64 { return float64(x[place(trans, i, j, ld)]) }

// flat returns host memory as a tensor.
func flat(x []float32) xpu.Tensor { return xpu.Of(x, len(x)) }

func TestMatMul(t *testing.T) {
	all := devices(t)
	for _, size := range [][3]int{{1, 1, 1}, {1, 64, 300}, {2, 33, 5}, {16, 40, 512}, {256, 256, 32}, {257, 257, 20},
		{10, 530, 20}, {33, 20, 550}, {0, 5, 5},
		{5, 0, 5}, {5, 5, 0}} {
		m, n, k := size[0], size[1], size[2]
		for flags := range 8 {
			transA, transB, accumulate := flags&1 != 0, flags&2 != 0, flags&4 != 0
			a, lda := matrix(1, m, k, 3, transA)
			b, ldb := matrix(2, k, n, 5, transB)
			c, ldc := matrix(3, m, n, 7, false)
			for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
				ra, rb, want := asTaken(precision, a), asTaken(precision, b), make([]float64, len(c))
				for i, v := range c {
					row, column := i/ldc, i%ldc
					if accumulate || column >= n { // between the rows nothing may be written
						want[i] = float64(v)
					}
					if column < n {
						for p := range k {
							want[i] += at(ra, lda, transA, row, p) * at(rb, ldb, transB, p, column)
						}
					}
				}
				for _, d := range all {
					if d.Precision() != precision {
						continue
					}
					got := append([]float32(nil), c...)
					d.MatMul(xpu.Of(got, len(got)).Strided(m, n, ldc),
						devicetest.Stored(flat(a), m, k, lda, transA), devicetest.Stored(flat(b), k, n, ldb, transB),
						xpu.MatMulOptions{Accumulate: accumulate})
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
}

// TestSameBits computes products in many ways: one row alone, all rows, in groups, transposed, in
// pieces of columns, by 1 and 3 threads, and where no tile but the whole one may be used.
func TestSameBits(t *testing.T) {
	all := devices(t)
	for i, size := range []struct {
		counts []int32
		n, k   int
	}{{[]int32{1}, 1, 1}, {[]int32{3, 17}, 33, 64}, {[]int32{0, 16}, 16, 33}, {[]int32{20}, 256, 256},
		{[]int32{2, 1}, 259, 7}, {[]int32{2, 20}, 256, 519}, {[]int32{257, 3}, 40, 40},
		{[]int32{13}, 20, 519}, {[]int32{3, 20}, 256, 519}} {
		counts, n, k := size.counts, size.n, size.k
		special := i%3 == 1
		accumulate := i%2 == 0
		scale := []float32{1, 1, 0x1p-61, 0x1p-125}[i%4] // denormal products; denormal operands
		m := 0
		for _, c := range counts {
			m += int(c)
		}
		a, b, c0 := uniform(1, m*k), uniform(2, n*k), uniform(3, m*n)
		for _, x := range [][]float32{a, b, c0} {
			for i := range x {
				x[i] *= scale
			}
		}
		for j, v := range []float32{float32(math.NaN()), float32(math.Inf(-1)), math.MaxFloat32,
			float32(math.Copysign(0, -1)), 0x1p-149} {
			if special {
				a[j*997%len(a)] = v
			}
		}
		at, bt := transpose(a, m, k), transpose(b, k, n)
		bs, bts := slices.Repeat(b, len(counts)), slices.Repeat(bt, len(counts))
		wants := map[xpu.Precision][]float32{}
		for _, d := range all {
			same := func(how string, f func(c []float32)) {
				c := append([]float32(nil), c0...)
				f(c)
				want := wants[d.Precision()]
				if want == nil {
					wants[d.Precision()], want = c, c
				}
				for i := range c {
					if math.Float32bits(c[i]) != math.Float32bits(want[i]) && (c[i] == c[i] || want[i] == want[i]) {
						t.Fatalf("%s, room %d, %s: element %d is %x, elsewhere %x", d.Name(), d.space, how, i, c[i],
							want[i])
					}
				}
			}
			same("NN", func(c []float32) {
				d.MatMul(xpu.Of(c, m, n), xpu.Of(a, m, k),
					xpu.Of(b, k, n), xpu.MatMulOptions{Accumulate: accumulate})
			})
			if d.space < 1<<20 { // every tile of it is a whole one, which takes its time
				continue
			}
			same("NT", func(c []float32) {
				d.MatMul(xpu.Of(c, m, n), xpu.Of(a, m, k),
					xpu.Of(bt, n, k).T(), xpu.MatMulOptions{Accumulate: accumulate})
			})
			same("TN", func(c []float32) {
				d.MatMul(xpu.Of(c, m, n), xpu.Of(at, k, m).T(),
					xpu.Of(b, k, n), xpu.MatMulOptions{Accumulate: accumulate})
			})
			same("TT", func(c []float32) {
				d.MatMul(xpu.Of(c, m, n), xpu.Of(at, k, m).T(),
					xpu.Of(bt, n, k).T(), xpu.MatMulOptions{Accumulate: accumulate})
			})
			same("grouped", func(c []float32) {
				d.GroupedMatMul(xpu.Of(c, m, n), xpu.Of(a, m, k),
					xpu.Of(bs, len(counts), k, n), xpu.OfInts(counts, len(counts)),
					xpu.MatMulOptions{Accumulate: accumulate})
			})
			same("grouped, transposed", func(c []float32) {
				d.GroupedMatMul(xpu.Of(c, m, n), xpu.Of(a, m, k), xpu.Of(bts, len(counts), n, k).T(),
					xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{Accumulate: accumulate})
			})
			same("weight gradient", func(c []float32) {
				d.GroupedWeightGrad(xpu.Of(c, 1, m, n), xpu.Of(at, k, m),
					xpu.Of(b, k, n), xpu.OfInts([]int32{int32(k)}, 1),
					xpu.MatMulOptions{Accumulate: accumulate})
			})
			same("row by row", func(c []float32) {
				d.Parallel(m, func(i int) {
					d.MatMul(xpu.Of(c[i*n:], 1, n), xpu.Of(a[i*k:], 1, k),
						xpu.Of(bt, n, k).T(), xpu.MatMulOptions{Accumulate: accumulate})
				})
			})
			same("columns in two pieces", func(c []float32) {
				h := n / 2
				d.MatMul(xpu.Of(c, len(c)).Strided(m, h, n), xpu.Of(a, m, k),
					xpu.Of(b, len(b)).Strided(k, h, n), xpu.MatMulOptions{Accumulate: accumulate})
				d.MatMul(xpu.Of(c[h:], len(c[h:])).Strided(m, n-h, n), xpu.Of(a, m, k),
					xpu.Of(b[h:], len(b[h:])).Strided(k, n-h, n), xpu.MatMulOptions{Accumulate: accumulate})
			})
		}
	}
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

// TestGrouped has groups of no rows and gradients that were not there before.
func TestGrouped(t *testing.T) {
	counts, n, k := []int32{20, 0, 31, 180, 1, 14}, 70, 33
	rows := 246
	for _, d := range devices(t) {
		a, dc := uniform(1, rows*k), uniform(2, rows*n)
		ra, rdc := asTaken(d.Precision(), a), asTaken(d.Precision(), dc)
		for _, accumulate := range []bool{false, true} {
			db := uniform(5, len(counts)*k*n)
			before := slices.Clone(db)
			d.GroupedWeightGrad(xpu.Of(db, len(counts), k, n), xpu.Of(a, rows, k), xpu.Of(dc, rows, n),
				xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{Accumulate: accumulate})
			row := 0
			for g, count := range counts {
				for i, got := range db[g*k*n:][:k*n] {
					want := 0.0
					if accumulate {
						want = float64(before[g*k*n+i])
					}
					for r := row; r < row+int(count); r++ {
						want += float64(ra[r*k+i/n]) * float64(rdc[r*n+i%n])
					}
					if !(math.Abs(want-float64(got)) < 1e-5) {
						t.Fatalf("%s: element %d of db %d is %v, want %v", d.Name(), i, g, got, want)
					}
				}
				row += int(count)
			}
		}
	}
}

// TestDevice compares with plain Go in float64, and threads with each other.
func TestDevice(t *testing.T) {
	longtest.SkipIfShort(t)
	for precision, tolerance := range map[xpu.Precision]float64{xpu.FP32: 1e-5, xpu.BF16: 1e-2} {
		t.Run(string(precision), func(t *testing.T) {
			one, three := device(t, 1, precision), device(t, 3, precision)
			devicetest.Run(t, three, tolerance, devicetest.Exact|devicetest.Rounding)
			devicetest.SameBits(t, one, three)
		})
	}
}

// TestAgree: tiles of this library pass the check, and a single element that differs does not.
func TestAgree(t *testing.T) {
	d := device(t, 1, xpu.FP32)
	var used, refused int
	d.MatMul(xpu.Of(make([]float32, 130*270), 130, 270), xpu.Of(uniform(1, 130*600), 130, 600),
		xpu.Of(uniform(2, 270*600), 270, 600).T(), xpu.MatMulOptions{Accumulate: true})
	for _, p := range d.library.primitives {
		if p == nil {
			refused++
		} else {
			used++
		}
	}
	t.Logf("%s: %d shapes are used, %d are not", d.Name(), used, refused)
	if used == 0 {
		t.Error("no shape is used")
	}
	s := shape{dataType: typeF32, m: 16, n: 16, k: 64, ldc: 20, add: true}
	want := d.library.references[reference{typeF32, 64}]
	c := make([]float32, 16*20)
	for i := range 16 {
		for j := range 16 {
			c[i*20+j] = start(i, j) + want[i%probes][j%probes]
		}
	}
	if err := d.library.compare(s, c, 0, 0); err != nil {
		t.Error(err)
	}
	c[9*20+3] = math.Nextafter32(c[9*20+3], 9)
	if err := d.library.compare(s, c, 0, 0); err == nil {
		t.Error("an element with another last bit agrees")
	}
}

// TestNoAllocation holds the promise that a training step in its steady state allocates nothing
// here.
func TestNoAllocation(t *testing.T) {
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		d := device(t, 2, precision)
		const m, n, k = 400, 64, 64
		a, b, c := uniform(1, m*k), uniform(2, n*k), make([]float32, m*n)
		bs, counts := uniform(3, 3*n*k), []int32{301, 0, 99}
		run := func() {
			d.MatMul(xpu.Of(c, m, n), xpu.Of(a, m, k), xpu.Of(b, n, k).T(), xpu.MatMulOptions{})
			d.GroupedMatMul(xpu.Of(c, m, n), xpu.Of(a, m, k), xpu.Of(bs, len(counts), n, k).T(),
				xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{Accumulate: true})
			d.GroupedWeightGrad(xpu.Of(bs, len(counts), k, n), xpu.Of(a, m, k), xpu.Of(c, m, n),
				xpu.OfInts(counts, len(counts)), xpu.MatMulOptions{Accumulate: true})
		}
		for range 20 { // the memory of the device depends on what its workers happen to do at the same time
			run()
		}
		if n := alloctest.Least(run); n > 0 && !raceDetector {
			t.Errorf("%s: %v allocations a run", precision, n)
		}
	}
}

// TestAbsent: without a library, and with a file that is not a library, the error has the remedy.
func TestAbsent(t *testing.T) {
	none := filepath.Join(t.TempDir(), "libdnnl.so.3")
	t.Setenv(LibraryVariable, none)
	_, err := New(1, xpu.FP32)
	if err == nil || !strings.Contains(err.Error(), none) ||
		!strings.Contains(err.Error(), "device cpu needs no library") ||
		!strings.Contains(err.Error(), LibraryVariable) {
		t.Errorf("the error is %v", err)
	}
	c := "libc.so.6"
	if _, err := exec.LookPath("ldd"); err != nil {
		t.Skip("no libc.so.6 here")
	}
	t.Setenv(LibraryVariable, c)
	if _, err = New(1, xpu.FP32); err == nil || !strings.Contains(err.Error(), "dnnl_version") {
		t.Errorf("of a library that is another one the error is %v", err)
	}
}

func TestName(t *testing.T) {
	d := device(t, 2, xpu.BF16)
	if !strings.HasPrefix(d.Name(), "onednn "+d.library.version) || !strings.HasSuffix(d.Name(), ", bf16, 2 threads") {
		t.Errorf("the name is %q", d.Name())
	}
	if a := d.Arithmetic(); !strings.HasPrefix(a, "onednn "+d.library.version) || !strings.HasSuffix(a, " bf16") ||
		strings.Contains(a, "thread") {
		t.Errorf("the arithmetic is %q", a)
	}
	if one := device(t, 1, xpu.FP32); !strings.HasSuffix(one.Name(), ", 1 thread") ||
		one.Arithmetic() == d.Arithmetic() {
		t.Errorf("the name is %q, the arithmetic %q", one.Name(), one.Arithmetic())
	}
}
