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
	"mula/xpu/opencl"
)

// emulated are the shapes that take the path of matrix instructions with its sub-groups emulated,
// for Ponte Vecchio in both layouts of A. They are tested on a CPU: a work-item emulates a whole
// sub-group, which is too slow on a GPU.
var emulated = map[string]shape{
	"blocks":    emulation(pvcFile, "-DEMULATED"),
	"2D blocks": emulation(pvcFile, "-DEMULATED -DWIDE"),
	"direct":    direct(emulation(pvcFile, "-DEMULATED"), tallRows),
	"tall":      direct(emulation(pvcFile, "-DEMULATED"), 1),
	"warps":     emulation(nvidiaFile, "-DEMULATED"),
}

// direct returns a shape whose products read matrices of bfloat16 as they are in memory. From
// `tall` rows on, they have the larger work-groups.
func direct(s shape, tall int) shape {
	s.direct, s.tall = true, tall
	return s
}

// Products on the emulated path.
func TestMatrix(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	for name, s := range emulated {
		t.Run(name, func(t *testing.T) {
			d := newTest(t, xpu.BF16, s, opencl.CPU)
			t.Run("MatMul", func(t *testing.T) { testMatrixMatMul(t, d) })
			t.Run("groups", func(t *testing.T) { testMatrixGroups(t, d) })
			t.Run("rounding", func(t *testing.T) { testMatrixRounding(t, d) })
			devicetest.Run(t, d, 0, devicetest.HalfProducts)
			if s.emulated == pvcFile {
				t.Run("attention", func(t *testing.T) { testMatrixAttention(t, d) })
			}
			if s.emulated == nvidiaFile {
				t.Run("chains", func(t *testing.T) { testTensorChains(t, d) })
				t.Run("attention", func(t *testing.T) { testTensorAttention(t, d) })
			}
		})
	}
}

// Attention on the emulated path is near the reference in float64: heads of both packed sizes,
// heads of queries that share keys, documents, and lengths near the sizes of tiles and work-groups.
func testMatrixAttention(t *testing.T, d *Device) {
	for _, test := range []struct {
		h        xpu.Heads
		document int
	}{
		{xpu.Heads{Rows: 1, Length: 1, Heads: 1, KVHeads: 1, Size: 2}, 0},
		{xpu.Heads{Rows: 2, Length: 33, Heads: 4, KVHeads: 2, Size: 10}, 0},
		{xpu.Heads{Rows: 1, Length: 64, Heads: 2, KVHeads: 2, Size: 64}, 0},
		{xpu.Heads{Rows: 1, Length: 131, Heads: 3, KVHeads: 1, Size: 34}, 40},
		{xpu.Heads{Rows: 1, Length: 150, Heads: 2, KVHeads: 2, Size: 16}, 1},
		{xpu.Heads{Rows: 1, Length: 70, Heads: 2, KVHeads: 1, Size: 128}, 0},
		{xpu.Heads{Rows: 1, Length: 129, Heads: 1, KVHeads: 1, Size: 66}, 70},
	} {
		t.Run(fmt.Sprintf("%+v, documents of %d", test.h, test.document), func(t *testing.T) {
			devicetest.Attention(t, d, 1e-2, test.h, test.document)
			depth := matrixDepths[0]
			if test.h.Size > depth {
				depth = matrixDepths[1]
			}
			if d.variants[variant{attendMatrixFile, d.attendMatrixOptions(depth), "pvc_grad_keys"}] == nil {
				t.Error("the kernels with matrix instructions were not launched")
			}
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

// upload is memory of a device with these numbers.
func upload(t testing.TB, d *Device, x []float32, shape ...int) xpu.Tensor {
	t.Helper()
	if len(shape) == 0 {
		shape = []int{len(x)}
	}
	y, err := d.New(xpu.Float32, shape...)
	if err != nil {
		t.Fatal(err)
	}
	d.Write(y, x)
	return y
}

func uploadInts(t testing.TB, d *Device, x []int32) xpu.Tensor {
	t.Helper()
	y, err := d.New(xpu.Int32, len(x))
	if err != nil {
		t.Fatal(err)
	}
	d.WriteInts(y, x)
	return y
}

// numbersOf returns the numbers of a tensor.
func numbersOf(t testing.TB, d *Device, x xpu.Tensor) []float32 {
	t.Helper()
	y := make([]float32, x.Elements())
	if err := d.Read(t.Context(), y, x); err != nil {
		t.Fatal(err)
	}
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
		left, right, result := upload(t, d, append(normal(r, gap), a...)),
			upload(t, d, append(normal(r, gap), b...)), upload(t, d, append(normal(r, gap), before...))
		defer d.Release(left)
		defer d.Release(right)
		defer d.Release(result)
		behind := func(x xpu.Tensor) xpu.Tensor { return x.Rows(gap, x.Elements()) }
		d.MatMul(behind(result).Strided(m, n, ldc), devicetest.Stored(behind(left), m, k, lda, transA),
			devicetest.Stored(behind(right), k, n, ldb, transB), xpu.MatMulOptions{Accumulate: accumulate})
		c := numbersOf(t, d, result)
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
		onDevice := uploadInts(t, d, counts)
		defer d.Release(onDevice)
		var memory [5]xpu.Tensor
		for i, host := range [][]float32{x, w, dy, y, dw} {
			memory[i] = upload(t, d, host)
			defer d.Release(memory[i])
		}
		d.GroupedMatMul(memory[3].Reshape(rows, n), memory[0].Reshape(rows, k),
			devicetest.Stack(memory[1], len(counts), k, n, transB), onDevice, xpu.MatMulOptions{Accumulate: accumulate})
		d.GroupedWeightGrad(memory[4].Reshape(len(counts), n, k), memory[2].Reshape(rows, n),
			memory[0].Reshape(rows, k), onDevice, xpu.MatMulOptions{Accumulate: accumulate})
		gotY, gotDW := numbersOf(t, d, memory[3]), numbersOf(t, d, memory[4])
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
						gotY[i*n+j], old)
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
					s.near(rt, fmt.Sprintf("gradient %d,%d of group %d of %v", j, l, g, drawn), gotDW[g*n*k+j*k+l],
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
	left, right := upload(t, d, x), upload(t, d, []float32{1}, 1, 1)
	column, row := upload(t, d, make([]float32, len(x)), len(x), 1), upload(t, d, make([]float32, len(x)), 1, len(x))
	d.MatMul(column, left.Reshape(len(x), 1), right, xpu.MatMulOptions{}) // packed as A
	d.MatMul(row, right, left.Reshape(1, len(x)), xpu.MatMulOptions{})    // as B
	c, back := numbersOf(t, d, column), numbersOf(t, d, row)
	for i, w := range want {
		for _, got := range []float32{c[i], back[i]} {
			if got != w && !(math.IsNaN(float64(got)) && math.IsNaN(float64(w))) {
				t.Errorf("%x becomes %x, want %x", math.Float32bits(x[i]), math.Float32bits(got), math.Float32bits(w))
			}
		}
	}
}

// Weights of either type are packed once while they do not change, and again after each way of
// changing them.
func TestMatrixWeightsArePackedOnce(t *testing.T) {
	for _, dtype := range []xpu.DType{xpu.Float32, xpu.BFloat16} {
		t.Run(dtype.String(), func(t *testing.T) { testPackedOnce(t, dtype) })
	}
}

func testPackedOnce(t *testing.T, dtype xpu.DType) {
	d, err := newDevice(t.Context(), someDevice(t, opencl.CPU), Options{Precision: xpu.BF16, Threads: 1, Profile: true},
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
	square := func() xpu.Tensor { return upload(t, d, ones, n, n) }
	x, twos, product := square(), square(), square()
	d.Add(twos, x, x)
	w, err := d.New(dtype, n, n)
	if err != nil {
		t.Fatal(err)
	}
	d.Write(w, ones)
	packed := 0
	check := func(what string, want float32, packings int) {
		t.Helper()
		d.MatMul(product, x, w.T(), xpu.MatMulOptions{})
		y := numbersOf(t, d, product)
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
	d.Write(w.Flat().Rows(n*n-1, n*n), []float32{3}) // one of them alone
	d.MatMul(product, x, w.T(), xpu.MatMulOptions{})
	if y := numbersOf(t, d, product); y[0] != n || y[n-1] != n+2 {
		t.Errorf("after Write of one weight: %v and %v", y[0], y[n-1])
	}
	packed++
	threes := make([]float32, n*n)
	for i := range threes {
		threes[i] = 3
	}
	d.Write(w, threes)
	check("after Write", 3*n, 1)
	d.Copy(w, twos)
	check("after Copy", 2*n, 1)
	d.Zero(w)
	check("after Zero", 0, 1)
	if dtype == xpu.Float32 {
		d.Add(w, x, x)
	} else {
		d.Copy(w, twos) // by a kernel, which rounds
	}
	check("after a kernel", 2*n, 1)
	check("at last", 2*n, 0)
	if n := len(d.packed.of); n != 1 {
		t.Errorf("%d packed operands are kept", n)
	}
	d.Release(w)
	if n := len(d.packed.of); n != 0 {
		t.Errorf("%d packed operands are kept of what was freed", n)
	}
}
