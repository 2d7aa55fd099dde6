// Package devicetest tests implementations of [xpu.Device] against plain Go in float64.
package devicetest

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// Families is a set of groups of checks.
type Families uint

// The groups of checks.
const (
	Exact           Families = 1 << iota // operations on float32 that do not depend on the precision of the device
	Rounding                             // operations on float32 that round operands to the precision of the device
	Halves                               // operations on weights and gradients of bf16
	HalfProducts                         // products with them, of sizes around the sizes of tiles
	HalfActivations                      // operations on activations and moments of bf16, for processors

	Common = Exact | Rounding | Halves | HalfProducts
)

var families = []struct {
	name  string
	check func(t *testing.T, d xpu.Device, tolerance float64)
	of    Families
}{
	{"memory", memoryFamily, Exact},
	{"bf16", halvesFamily, Halves},
	{"bf16 products", halfProductsFamily, HalfProducts},
	{"bf16 activations", halfActivationsFamily, HalfActivations},
	{"products", productsFamily, Rounding},
	{"attention", attentionFamily, Rounding},
	{"heads", headsFamily, Exact},
	{"latent", latentFamily, Exact},
	{"norm", normFamily, Exact},
	{"embed", embedFamily, Exact}, {"jitter", jitterFamily, Exact},
	{"router", routerFamily, Exact},
	{"experts", expertsFamily, Exact},
	{"biases, clamps and sinks", biasFamily, Exact},
	{"loss", lossFamily, Exact},
	{"optimizer", optimizerFamily, Exact},
	{"mistakes", mistakesFamily, Rounding},
}

// Run checks operations of a device. The error of a number may be tolerance times the scale of its
// sum, the sum of the absolute values of its terms: 1e-5 for fp32, 1e-2 for bf16 and results
// computed from it. Checks of bf16 in memory compare with float32, and have no tolerance.
func Run(t *testing.T, d xpu.Device, tolerance float64, of Families) {
	for _, f := range families {
		if f.of&of != 0 {
			t.Run(f.name, func(t *testing.T) { f.check(t, d, tolerance) })
		}
	}
}

// A tester is a test, or one attempt of a property test.
type tester interface {
	rapid.TB
	Cleanup(func())
	Context() context.Context
}

// upload allocates a tensor with these numbers until the test ends, in one dimension if no shape is
// given. It checks that the memory before and after is unchanged then: a device must write only to
// its operands.
func upload(t tester, d xpu.Device, x []float32, shape ...int) xpu.Tensor {
	t.Helper()
	return fenced(t, d, xpu.Float32, x, shape, math.Float32frombits(fence), d.Write, read)
}

// uploadInts is upload for whole numbers.
func uploadInts(t tester, d xpu.Device, x []int32, shape ...int) xpu.Tensor {
	t.Helper()
	return fenced(t, d, xpu.Int32, x, shape, fence, d.WriteInts, readInts)
}

// uploadHalves is upload for the bits of numbers of bfloat16.
func uploadHalves(t tester, d xpu.Device, x []uint16, shape ...int) xpu.Tensor {
	t.Helper()
	return fenced(t, d, xpu.BFloat16, x, shape, fence>>16, d.WriteHalves, readHalves)
}

// A fence surrounds memory. As float32 it is NaN, so that a device that reads it is detected too.
const fence, fenceBefore, fenceBehind = 0x7fc0fe9c, 19, 32

func fenced[E float32 | uint16 | int32](t tester, d xpu.Device, dtype xpu.DType, x []E, shape []int, mark E,
	write func(xpu.Tensor, []E), read func(tester, xpu.Device, xpu.Tensor) []E) xpu.Tensor {
	t.Helper()
	all, err := d.New(dtype, fenceBefore+len(x)+fenceBehind)
	if err != nil {
		t.Fatal(err)
	}
	end := fenceBefore + len(x)
	host := slices.Repeat([]E{mark}, all.Elements())
	before, behind := slices.Clone(host[:fenceBefore]), slices.Clone(host[end:])
	t.Cleanup(func() {
		defer d.Release(all)
		if !equalBits(read(t, d, all.Rows(0, fenceBefore)), before) ||
			!equalBits(read(t, d, all.Rows(end, all.Elements())), behind) {
			t.Errorf("a command has written to memory around %d elements, which it was not given", len(x))
		}
	})
	copy(host[fenceBefore:], x)
	write(all, host)
	if len(shape) == 0 {
		shape = []int{len(x)}
	}
	return all.Rows(fenceBefore, end).Reshape(shape...)
}

// equalBits compares numbers by their bits, as a fence is NaN.
func equalBits[E float32 | uint16 | int32](x, y []E) bool {
	return slices.EqualFunc(x, y, func(a, b E) bool { return a == b || a != a && b != b })
}

// read waits for the device and returns the numbers of a tensor.
func read(t tester, d xpu.Device, x xpu.Tensor) []float32 {
	t.Helper()
	host := make([]float32, x.Elements())
	if err := d.Read(context.Background(), host, x); err != nil {
		t.Fatal(err)
	}
	return host
}

// readInts is read for whole numbers.
func readInts(t tester, d xpu.Device, x xpu.Tensor) []int32 {
	t.Helper()
	host := make([]int32, x.Elements())
	if err := d.ReadInts(context.Background(), host, x); err != nil {
		t.Fatal(err)
	}
	return host
}

// readHalves is read for the bits of numbers of bfloat16.
func readHalves(t tester, d xpu.Device, x xpu.Tensor) []uint16 {
	t.Helper()
	host := make([]uint16, x.Elements())
	if err := d.ReadHalves(context.Background(), host, x); err != nil {
		t.Fatal(err)
	}
	return host
}

// random returns n numbers in ±1.
func random(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = 2*r.Float32() - 1
	}
	return x
}

// compare fails the test if an error exceeds tolerance times the number's scale. Without scales the
// scale is the largest wanted number.
func compare(t tester, what string, got []float32, want, scale []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d numbers, want %d", what, len(got), len(want))
	}
	largest := 0.0
	for _, w := range want {
		largest = max(largest, math.Abs(w))
	}
	wrong, first, worst := 0, 0, 0.0
	for i, w := range want {
		s := largest
		if scale != nil {
			s = scale[i]
		}
		off := math.Abs(float64(got[i]) - w)
		if off <= tolerance*s {
			continue
		}
		if wrong++; wrong == 1 {
			first = i
		}
		worst = max(worst, off/s) // NaN stays
	}
	if wrong > 0 {
		t.Fatalf("%s: %d of %d numbers are wrong: the first at %d is %v, want %v; off by up to %.2g, allowed %.2g",
			what, wrong, len(want), first, got[first], want[first], worst, tolerance)
	}
}
