package gpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/devicetest"
)

// emulated are the shapes that take the path of matrix instructions with its sub-groups emulated,
// in both layouts of A.
var emulated = map[string]shape{
	"blocks":    {group: gpuShape.group, options: "-cl-opt-disable", emulate: "-DEMULATED"},
	"2D blocks": {group: gpuShape.group, options: "-cl-opt-disable", emulate: "-DEMULATED -DWIDE"},
}

// Products on the emulated path.
func TestMatrix(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	for name, s := range emulated {
		t.Run(name, func(t *testing.T) {
			d := newTest(t, xpu.BF16, s)
			t.Run("MatMul", func(t *testing.T) { testMatrixMatMul(t, d) })
			t.Run("groups", func(t *testing.T) { testMatrixGroups(t, d) })
			t.Run("rounding", func(t *testing.T) { testMatrixRounding(t, d) })
		})
	}
}

// rounded are the numbers as a product takes them.
func rounded(x []float32) []float64 {
	out := make([]float64, len(x))
	for i, v := range x {
		out[i] = nearest(v)
	}
	return out
}

// nearest is the bfloat16 next to x, found among the two around it; ties go to the even one. It
// knows nothing of infinity and denormal numbers.
func nearest(x float32) float64 {
	low := math.Float32frombits(math.Float32bits(x) &^ 0xffff) // towards zero
	high := math.Float32frombits(math.Float32bits(low) + 0x10000)
	below, above := math.Abs(float64(x)-float64(low)), math.Abs(float64(high)-float64(x))
	if below < above || below == above && math.Float32bits(low)>>16%2 == 0 {
		return float64(low)
	}
	return float64(high)
}

// twin is memory of a device with these numbers on both sides.
func twin(t testing.TB, d *Device, x []float32) []float32 {
	t.Helper()
	y, err := d.Floats(len(x))
	if err != nil {
		t.Fatal(err)
	}
	copy(y, x)
	d.ToDevice(y)
	return y
}

func twinInts(t testing.TB, d *Device, x []int32) []int32 {
	t.Helper()
	y, err := d.Ints(len(x))
	if err != nil {
		t.Fatal(err)
	}
	copy(y, x)
	d.IntsToDevice(y)
	return y
}

func normal(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// A sum is one element of a product as it must be: the terms are products of rounded numbers, the
// sum is in float64.
type sum struct{ value, size float64 }

func (s *sum) add(x, y float64) {
	v := x * y
	s.value += v
	s.size += math.Abs(v)
}

// near fails if the device's number is further off than rounding of a float32 sum allows; before is
// what was there, if it was added to.
func (s sum) near(t rapid.TB, what string, got, before float32) {
	t.Helper()
	if want := s.value + float64(before); !(math.Abs(float64(got)-want) <= 3e-6*(s.size+math.Abs(float64(before)))) {
		t.Fatalf("%s is %v, want %v", what, got, want)
	}
}

// MatMul on the emulated path is the product of the rounded operands, nearly exactly, in all forms,
// at sizes near the sizes of blocks, tiles and work-groups.
func testMatrixMatMul(t *testing.T, d *Device) {
	size := rapid.OneOf(rapid.IntRange(0, 40), rapid.IntRange(1, 70),
		rapid.SampledFrom([]int{63, 64, 65, 127, 128, 129, 255, 256, 257}))
	rapid.Check(t, func(rt *rapid.T) {
		m, n, k := size.Draw(rt, "m"), size.Draw(rt, "n"), size.Draw(rt, "k")
		transA, transB, accumulate := rapid.Bool().Draw(rt, "transA"), rapid.Bool().Draw(rt,
			"transB"), rapid.Bool().Draw(rt, "accumulate")
		gap := rapid.IntRange(0, 3).Draw(rt, "gap")
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		lda, ldb, ldc := k+gap, n+gap, n+gap
		rowsA, rowsB := m, k
		if transA {
			lda, rowsA = m+gap, k
		}
		if transB {
			ldb, rowsB = k+gap, n
		}
		a, b, before := normal(r, rowsA*lda), normal(r, rowsB*ldb), normal(r, m*ldc)
		// Memory begins anywhere in an allocation.
		left, right, c := twin(t, d, append(normal(r, gap), a...)), twin(t, d, append(normal(r, gap), b...)), twin(t, d,
			append(normal(r, gap), before...))
		defer d.Free(left)
		defer d.Free(right)
		defer d.Free(c)
		d.MatMul(xpu.Of(c[gap:], len(c[gap:])).Strided(m, n, ldc),
			devicetest.Stored(left[gap:], m, k, lda, transA), devicetest.Stored(right[gap:], k, n, ldb, transB),
			xpu.MatMulOptions{Accumulate: accumulate})
		if err := d.ToHost(t.Context(), c); err != nil {
			rt.Fatal(err)
		}
		roundA, roundB := rounded(a), rounded(b)
		for i := range m {
			for j := range ldc {
				got, old := c[gap+i*ldc+j], before[i*ldc+j]
				if j >= n {
					if got != old {
						rt.Fatalf("element %d,%d beyond the row was written", i, j)
					}
					continue
				}
				var s sum
				for l := range k {
					at, bt := i*lda+l, l*ldb+j
					if transA {
						at = l*lda + i
					}
					if transB {
						bt = j*ldb + l
					}
					s.add(roundA[at], roundB[bt])
				}
				if !accumulate {
					old = 0
				}
				s.near(rt, fmt.Sprintf("element %d,%d of %d×%d×%d", i, j, m, n, k), got, old)
			}
		}
	})
}

// groupCounts are groups of rows as routers make them: empty ones, single rows, around the sizes of
// tiles.
var groupCounts = rapid.SliceOfN(rapid.OneOf(rapid.Just(0), rapid.Just(1), rapid.IntRange(2, 40),
	rapid.SampledFrom([]int{31, 32, 33, 127, 128, 129, 200})), 1, 9)

func testMatrixGroups(t *testing.T, d *Device) {
	rapid.Check(t, func(rt *rapid.T) {
		drawn := groupCounts.Draw(rt, "counts")
		n, k := rapid.IntRange(1, 100).Draw(rt, "n"), rapid.IntRange(1, 50).Draw(rt, "k")
		transB, accumulate := rapid.Bool().Draw(rt, "transB"), rapid.Bool().Draw(rt, "accumulate")
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		counts, rows := make([]int32, len(drawn)), 0
		for g, c := range drawn {
			counts[g] = int32(c)
			rows += c
		}
		x, w, dy := normal(r, rows*k), normal(r, len(counts)*n*k), normal(r, rows*n)
		y, dw := normal(r, rows*n), normal(r, len(counts)*n*k)
		onDevice := twinInts(t, d, counts)
		defer d.FreeInts(onDevice)
		var memory [5][]float32
		for i, host := range [][]float32{x, w, dy, y, dw} {
			memory[i] = twin(t, d, host)
			defer d.Free(memory[i])
		}
		d.GroupedMatMul(xpu.Of(memory[3], rows, n), xpu.Of(memory[0], rows, k),
			devicetest.Stack(memory[1], len(onDevice), k, n, transB), xpu.OfInts(onDevice, len(onDevice)),
			xpu.MatMulOptions{Accumulate: accumulate})
		d.GroupedWeightGrad(xpu.Of(memory[4], len(onDevice), n, k), xpu.Of(memory[2], rows, n),
			xpu.Of(memory[0], rows, k), xpu.OfInts(onDevice, len(onDevice)),
			xpu.MatMulOptions{Accumulate: accumulate})
		if err := d.ToHost(t.Context(), memory[3], memory[4]); err != nil {
			rt.Fatal(err)
		}
		roundX, roundW, roundDY := rounded(x), rounded(w), rounded(dy)
		first := 0
		for g, c := range drawn {
			for i := first; i < first+c; i++ {
				for j := range n {
					var s sum
					for l := range k {
						at := l*n + j
						if transB {
							at = j*k + l
						}
						s.add(roundX[i*k+l], roundW[g*n*k+at])
					}
					old := y[i*n+j]
					if !accumulate {
						old = 0
					}
					s.near(rt, fmt.Sprintf("row %d of group %d of %v, column %d", i-first, g, drawn, j),
						memory[3][i*n+j], old)
				}
			}
			for j := range n {
				for l := range k {
					var s sum
					for i := first; i < first+c; i++ {
						s.add(roundDY[i*n+j], roundX[i*k+l])
					}
					old := dw[g*n*k+j*k+l]
					if !accumulate {
						old = 0
					}
					s.near(rt, fmt.Sprintf("gradient %d,%d of group %d of %v", j, l, g, drawn), memory[4][g*n*k+j*k+l],
						old)
				}
			}
			first += c
		}
	})
}

// Every kind of number is rounded as [xpu.BF16] says: the product with 1 shows it, to the bit.
func testMatrixRounding(t *testing.T, d *Device) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	bits := math.Float32frombits
	x := []float32{0, 1, -1, bits(0x3f808000), bits(0x3f818000), bits(0x3f808001), bits(0xbf807fff), bits(0x7f7fffff),
		bits(0xff7fffff), bits(0x7f7f7fff), inf, -inf, nan,
		bits(0x7f800001), bits(0x00800000), bits(0x007fffff), bits(0x807fffff), bits(1)}
	want := []float32{0, 1, -1, 1, bits(0x3f820000), bits(0x3f810000), bits(0xbf800000), inf, -inf, bits(0x7f7f0000),
		inf, -inf, nan, nan, bits(0x00800000), 0, 0, 0}
	left, right := twin(t, d, x), twin(t, d, []float32{1})
	c, back := twin(t, d, make([]float32, len(x))), twin(t, d, make([]float32, len(x)))
	d.MatMul(xpu.Of(c, len(x), 1), xpu.Of(left, len(x), 1), xpu.Of(right, 1, 1),
		xpu.MatMulOptions{}) // packed as A
	d.MatMul(xpu.Of(back, 1, len(x)), xpu.Of(right, 1, 1), xpu.Of(left, 1, len(x)),
		xpu.MatMulOptions{}) // as B
	if err := d.ToHost(t.Context(), c, back); err != nil {
		t.Fatal(err)
	}
	for i, w := range want {
		for _, got := range []float32{c[i], back[i]} {
			if got != w && !(math.IsNaN(float64(got)) && math.IsNaN(float64(w))) {
				t.Errorf("%x becomes %x, want %x", math.Float32bits(x[i]), math.Float32bits(got), math.Float32bits(w))
			}
		}
	}
}

// Weights are packed once while they do not change, and again after each way of changing them.
func TestMatrixWeightsArePackedOnce(t *testing.T) {
	d, err := newDevice(t.Context(), someDevice(t), Options{Precision: xpu.BF16, Threads: 1, Profile: true},
		emulated["blocks"])
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	const n = 8
	ones := make([]float32, n*n)
	for i := range ones {
		ones[i] = 1
	}
	x, w, twos, y := twin(t, d, ones), twin(t, d, ones), twin(t, d, ones), twin(t, d, ones)
	d.Add(twos, x, x)
	packed := 0
	check := func(what string, want float32, packings int) {
		t.Helper()
		d.MatMul(xpu.Of(y, n, n), xpu.Of(x, n, n), xpu.Of(w, n, n).T(), xpu.MatMulOptions{})
		if err := d.ToHost(t.Context(), y); err != nil {
			t.Fatal(err)
		}
		packed += packings
		if y[0] != want || y[n*n-1] != want {
			t.Errorf("%s: the product is %v, want %v", what, y[0], want)
		}
		for _, k := range d.Profile() {
			if k.Kernel == "pvc_pack_matrices" && k.Launches != packed {
				t.Errorf("%s: packed %d times, want %d", what, k.Launches, packed)
			}
		}
	}
	check("at first", n, 1)
	check("again", n, 0)
	for i := range w {
		w[i] = 3
	}
	check("before ToDevice", n, 0)
	d.ToDevice(w[n*n-1:]) // one of them alone
	if d.MatMul(xpu.Of(y, n, n), xpu.Of(x, n, n), xpu.Of(w, n, n).T(), xpu.MatMulOptions{}); d.ToHost(t.Context(),
		y) != nil || y[0] != n ||
		y[n-1] != n+2 {
		t.Errorf("after ToDevice of one weight: %v and %v", y[0], y[n-1])
	}
	packed++
	d.ToDevice(w)
	check("after ToDevice", 3*n, 1)
	d.Copy(w, twos)
	check("after Copy", 2*n, 1)
	d.Zero(w)
	check("after Zero", 0, 1)
	d.Add(w, x, x)
	check("after a kernel", 2*n, 1)
	check("at last", 2*n, 0)
	if n := len(d.packed.of); n != 1 {
		t.Errorf("%d packed operands are kept", n)
	}
	d.Free(w)
	if n := len(d.packed.of); n != 0 {
		t.Errorf("%d packed operands are kept of what was freed", n)
	}
}
