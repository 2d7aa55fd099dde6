package devicetest

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// sumTolerance is the tolerance of products whose operands are already rounded: the sums are
// float32 in every precision.
const sumTolerance = 1e-5

func productsFamily(t *testing.T, d xpu.Device, tolerance float64) {
	t.Run("whole", func(t *testing.T) { wholeProducts(t, d) })
	t.Run("groups", func(t *testing.T) { groupedProducts(t, d) })
	t.Run("any", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { anyProduct(t, d) })
	})
	t.Run("special numbers", func(t *testing.T) { specialNumbers(t, d) })
	t.Run("same bits", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { sameBits(t, d) })
	})
	t.Run("without bias", func(t *testing.T) { noBias(t, d, tolerance) })
}

// An operand is a stored matrix; a product uses op of it.
type operand struct {
	x     []float32
	ld    int
	trans bool
}

// newOperand creates op of rows × columns, with a gap between stored rows.
func newOperand(r *rand.Rand, rows, columns, gap int, trans bool) operand {
	if trans {
		rows, columns = columns, rows
	}
	ld := columns + gap
	return operand{random(r, max(0, (rows-1)*ld+columns)), ld, trans}
}

// at returns element (i, j) of op, rounded as the precision requires.
func (o operand) at(precision xpu.Precision, i, j int) float64 {
	if o.trans {
		i, j = j, i
	}
	x := o.x[i*o.ld+j]
	if precision == xpu.BF16 {
		x = roundBF16(x)
	}
	return float64(x)
}

// roundBF16 implements the definition of [xpu.BF16] with 8-bit numbers.
func roundBF16(x float32) float32 {
	switch {
	case x != x || math.IsInf(float64(x), 0):
		return x
	case math.Abs(float64(x)) < 0x1p-126:
		return float32(math.Copysign(0, float64(x)))
	}
	y, _ := new(big.Float).SetPrec(8).SetFloat64(float64(x)).Float32() // to nearest even
	return y
}

// A want is the expected result of a product: c, and the sums of the absolute values of its terms.
type want struct{ c, scale []float64 }

func newWant(c []float32) want {
	w := want{make([]float64, len(c)), make([]float64, len(c))}
	for i, v := range c {
		w.c[i], w.scale[i] = float64(v), math.Abs(float64(v))
	}
	return w
}

// multiply sets m × n elements of c, from the given element on, to op(a)·op(b), or adds it. The
// given terms are added first.
func (w want) multiply(precision xpu.Precision, m, n, k int, a, b operand, at, ldc int, accumulate bool) {
	right := make([]float64, k*n)
	for t := range k {
		for j := range n {
			right[t*n+j] = b.at(precision, t, j)
		}
	}
	for i := range m {
		c, scale := w.c[at+i*ldc:][:n], w.scale[at+i*ldc:][:n]
		if !accumulate {
			clear(c)
			clear(scale)
		}
		for t := range k {
			v := a.at(precision, i, t)
			for j, x := range right[t*n:][:n] {
				c[j] += v * x
				scale[j] += math.Abs(v * x)
			}
		}
	}
}

// matMul checks one product. Gaps between the rows of C must not be written.
func matMul(t tester, d xpu.Device, r *rand.Rand, transA, transB bool, m, n, k, gapA, gapB, gapC int, accumulate bool) {
	t.Helper()
	a, b, c := newOperand(r, m, k, gapA, transA), newOperand(r, k, n, gapB, transB), newOperand(r, m, n, gapC, false)
	w := newWant(c.x)
	w.multiply(d.Precision(), m, n, k, a, b, 0, c.ld, accumulate)
	got := upload(t, d, c.x)
	d.MatMul(got.Strided(m, n, c.ld), Stored(upload(t, d, a.x), m, k, a.ld, transA),
		Stored(upload(t, d, b.x), k, n, b.ld, transB), xpu.MatMulOptions{Accumulate: accumulate})
	compare(t, fmt.Sprintf("%d×%d with %d terms, transposed %v %v, leading dimensions %d %d %d, accumulate %v", m, n, k,
		transA, transB, a.ld, b.ld, c.ld, accumulate),
		read(t, d, got), w.c, w.scale, sumTolerance)
}

func wholeProducts(t *testing.T, d xpu.Device) {
	r := rand.New(rand.NewPCG(1, 1))
	for i, size := range [][3]int{{1, 1, 1}, {1, 64, 300}, {2, 33, 5}, {3, 31, 256}, {5, 16, 257}, {8, 100, 64},
		{14, 32, 4}, {15, 47, 3}, {33, 70, 513}, {64, 64, 64},
		{100, 129, 30}, {169, 64, 260}, {65, 65, 17}, {0, 5, 5}, {5, 0, 5}, {5, 5, 0}, {200, 0, 5}, {0, 0, 0}} {
		for flags := range 8 {
			gap := 0
			if i%2 == 1 {
				gap = 3
			}
			matMul(t, d, r, flags&1 != 0, flags&2 != 0, size[0], size[1], size[2], gap, 2*gap, 3*gap, flags&4 != 0)
		}
	}
}

// grouped checks GroupedMatMul and GroupedWeightGrad for the given group sizes.
func grouped(t tester, d xpu.Device, r *rand.Rand, counts []int32, n, k int) {
	t.Helper()
	rows := 0
	for _, c := range counts {
		rows += int(c)
	}
	deviceCounts, groups := uploadInts(t, d, counts), len(counts)
	what := fmt.Sprintf("groups of %v rows, %d terms, %d columns", counts, k, n)
	a, c := newOperand(r, rows, k, 0, false), newOperand(r, rows, n, 0, false)
	deviceA := upload(t, d, a.x, rows, k)
	for flags := range 4 {
		transB, accumulate := flags&1 != 0, flags&2 != 0
		b := newOperand(r, groups*k, n, 0, false) // a stack of k × n, or n × k
		w, first := newWant(c.x), 0
		for g, count := range counts {
			matrix := operand{b.x[g*k*n:][:k*n], n, false}
			if transB {
				matrix = operand{matrix.x, k, true}
			}
			w.multiply(d.Precision(), int(count), n, k, operand{a.x[first*k:], k, false}, matrix, first*n, n,
				accumulate)
			first += int(count)
		}
		got := upload(t, d, c.x, rows, n)
		d.GroupedMatMul(got, deviceA, Stack(upload(t, d, b.x), groups, k, n, transB), deviceCounts,
			xpu.MatMulOptions{Accumulate: accumulate})
		compare(t, fmt.Sprintf("%s, transposed %v, accumulate %v", what, transB, accumulate), read(t, d, got), w.c,
			w.scale,
			sumTolerance)
	}
	deviceC := upload(t, d, c.x, rows, n)
	for _, accumulate := range []bool{false, true} {
		db := random(r, groups*k*n)
		w, first := newWant(db), 0
		for g, count := range counts {
			if count > 0 || !accumulate {
				w.multiply(d.Precision(), k, n, int(count), operand{a.x[first*k:], k, true},
					operand{c.x[first*n:], n, false}, g*k*n, n, accumulate)
			}
			first += int(count)
		}
		got := upload(t, d, db, groups, k, n)
		d.GroupedWeightGrad(got, deviceA, deviceC, deviceCounts, xpu.MatMulOptions{Accumulate: accumulate})
		compare(t, fmt.Sprintf("%s, gradient of the matrices, accumulate %v", what, accumulate), read(t, d, got), w.c,
			w.scale,
			sumTolerance)
	}
}

func groupedProducts(t *testing.T, d xpu.Device) {
	r := rand.New(rand.NewPCG(2, 1))
	for _, test := range []struct {
		counts []int32
		n, k   int
	}{
		{[]int32{100, 0, 33, 257, 128, 1, 64, 90}, 48, 40},
		{[]int32{0, 0, 0}, 5, 7},
		{[]int32{0, 1, 0}, 1, 1},
		{[]int32{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 33, 17},
		{[]int32{64}, 64, 64},
		{[]int32{65, 63}, 65, 15},
		{[]int32{7, 8, 9, 0, 0, 16}, 100, 30},
		{slices.Repeat([]int32{3, 0}, 40), 8, 16}, // more groups than work-items in a work-group
		{[]int32{3, 0, 17}, 5, 2500},              // too many terms, or rows, for one piece of some kernels
		{[]int32{2, 2100}, 3, 20},
		{[]int32{5, 6}, 0, 7},
		{[]int32{5, 6}, 7, 0},
		{nil, 5, 7},
	} {
		grouped(t, d, r, test.counts, test.n, test.k)
	}
}

func anyProduct(t *rapid.T, d xpu.Device) {
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 3))
	size := rapid.OneOf(rapid.IntRange(1, 10), rapid.IntRange(30, 35), rapid.IntRange(60, 70), rapid.IntRange(120, 140))
	gap := rapid.IntRange(0, 4)
	matMul(t, d, r, rapid.Bool().Draw(t, "transA"), rapid.Bool().Draw(t, "transB"), size.Draw(t, "m"),
		size.Draw(t, "n"), size.Draw(t, "k"),
		gap.Draw(t, "gapA"), gap.Draw(t, "gapB"), gap.Draw(t, "gapC"), rapid.Bool().Draw(t, "accumulate"))
	counts := rapid.SliceOfN(rapid.OneOf(rapid.Just(int32(0)), rapid.Int32Range(1, 3), rapid.Int32Range(7, 9),
		rapid.Int32Range(60, 70)), 1, 6).Draw(t, "counts")
	grouped(t, d, r, counts, rapid.IntRange(1, 70).Draw(t, "columns"), rapid.IntRange(1, 40).Draw(t, "terms"))
}

// NaN, infinite and denormal numbers and limits of bfloat16 are multiplied by one.
func specialNumbers(t *testing.T, d xpu.Device) {
	inf := float32(math.Inf(1))
	x := []float32{0, 1, 0x1.01p0, 0x1.03p0, 0x1.010002p0, 0x1.fep127, 0x1.fefffep127, math.MaxFloat32, inf, 0x1p-126,
		0x1.01p-126, 0x1p-149, float32(math.NaN())}
	for _, v := range slices.Clone(x) {
		x = append(x, -v)
	}
	for _, side := range []string{"a", "b"} {
		product := upload(t, d, make([]float32, len(x)))
		one, column := upload(t, d, []float32{1}, 1, 1), upload(t, d, x)
		if side == "a" {
			d.MatMul(product.Reshape(len(x), 1), column.Reshape(len(x), 1), one, xpu.MatMulOptions{})
		} else {
			d.MatMul(product.Reshape(1, len(x)), one, column.Reshape(1, len(x)), xpu.MatMulOptions{})
		}
		got := read(t, d, product)
		for i, v := range x {
			w := v
			if d.Precision() == xpu.BF16 {
				w = roundBF16(v)
			}
			if g := got[i]; g != w && (g == g || w == w) && math.Abs(float64(w)) >= 0x1p-126 {
				// a device may treat denormal numbers as zero
				t.Errorf("%s: %x times 1 is %x, want %x", side, v, g, w)
			}
		}
	}
}

// A row has the same bits alone, among others, and in a group.
func sameBits(t *rapid.T, d xpu.Device) {
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 4))
	m, n, k := rapid.IntRange(2, 140).Draw(t, "m"), rapid.IntRange(1, 70).Draw(t, "n"), rapid.IntRange(1, 300).Draw(t,
		"k")
	a, b := upload(t, d, random(r, m*k), m, k), upload(t, d, random(r, n*k), n, k)
	result := func(rows int) xpu.Tensor { return upload(t, d, make([]float32, rows*n), rows, n) }
	inAll, inOne, inGroups := result(m), result(1), result(m)
	d.MatMul(inAll, a, b.T(), xpu.MatMulOptions{})
	row := rapid.IntRange(0, m-1).Draw(t, "row")
	d.MatMul(inOne, a.Rows(row, row+1), b.T(), xpu.MatMulOptions{})
	// Groups with the same matrix.
	cut := rapid.IntRange(0, m).Draw(t, "cut")
	twice := upload(t, d, make([]float32, 2*n*k), 2, n, k)
	d.Copy(twice.Index(0), b)
	d.Copy(twice.Index(1), b)
	d.GroupedMatMul(inGroups, a, twice.T(), uploadInts(t, d, []int32{int32(cut), int32(m - cut)}), xpu.MatMulOptions{})
	all, alone, groups := read(t, d, inAll), read(t, d, inOne), read(t, d, inGroups)
	if !slices.Equal(all[row*n:(row+1)*n], alone) {
		t.Fatalf("row %d of %d×%d with %d terms has other bits alone", row, m, n, k)
	}
	if !slices.Equal(all, groups) {
		t.Fatalf("%d×%d with %d terms has other bits in groups of %d and %d rows", m, n, k, cut, m-cut)
	}
}

// Rounding has no bias: the mean error of many elements, relative to their scale, is near zero.
func noBias(t *testing.T, d xpu.Device, tolerance float64) {
	const m, n, k = 96, 80, 120
	r := rand.New(rand.NewPCG(5, 1))
	a, b := newOperand(r, m, k, 0, false), newOperand(r, k, n, 0, false)
	for i := range a.x { // of one sign: a bias would add up
		a.x[i] = float32(math.Abs(float64(a.x[i])))
	}
	for i := range b.x {
		b.x[i] = float32(math.Abs(float64(b.x[i])))
	}
	w := newWant(make([]float32, m*n))
	w.multiply(xpu.FP32, m, n, k, a, b, 0, n, false)
	product := upload(t, d, make([]float32, m*n), m, n)
	d.MatMul(product, upload(t, d, a.x, m, k), upload(t, d, b.x, k, n), xpu.MatMulOptions{})
	got := read(t, d, product)
	compare(t, "numbers of one sign", got, w.c, w.scale, tolerance)
	mean := 0.0
	for i, v := range got {
		mean += (float64(v) - w.c[i]) / w.scale[i] / (m * n)
	}
	if math.Abs(mean) > tolerance/50 {
		t.Errorf("the mean error is %.2g of the scale", mean)
	}
}

// Stored returns a matrix of rows × columns, whose rows start stride elements apart in x, or if it
// is stored as its transpose, its columns.
func Stored(x xpu.Tensor, rows, columns, stride int, transposed bool) xpu.Tensor {
	if transposed {
		return x.Strided(columns, rows, stride).T()
	}
	return x.Strided(rows, columns, stride)
}

// Stack returns matrices of rows × columns that follow each other in x, or their transposes.
func Stack(x xpu.Tensor, matrices, rows, columns int, transposed bool) xpu.Tensor {
	if transposed {
		return x.Reshape(matrices, columns, rows).T()
	}
	return x.Reshape(matrices, rows, columns)
}
