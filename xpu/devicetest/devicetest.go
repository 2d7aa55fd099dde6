// Package devicetest checks implementations of [xpu.Device] against plain Go in float64.
package devicetest

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// families are the parts of what a device does, each with its checks.
var families = []struct {
	name  string
	check func(t *testing.T, d xpu.Device, tolerance float64)
}{
	{"memory", memoryFamily},
	{"products", productsFamily},
	{"attention", attentionFamily},
	{"heads", headsFamily},
	{"norm", normFamily},
	{"embed", embedFamily},
	{"router", routerFamily},
	{"experts", expertsFamily},
	{"loss", lossFamily},
	{"optimizer", optimizerFamily},
	{"mistakes", mistakesFamily},
}

// Run checks all that a device does. A number may be off by tolerance times the scale of its sum, the sum of the absolute values of its terms: 1e-5 for
// fp32, 1e-2 for bf16 and what comes of it.
func Run(t *testing.T, d xpu.Device, tolerance float64) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) { f.check(t, d, tolerance) })
	}
}

// A tester is a test, or a try of a property.
type tester interface {
	rapid.TB
	Cleanup(func())
	Context() context.Context
}

// upload makes memory of the device with these numbers on both sides, until the test ends.
func upload(t tester, d xpu.Device, x []float32) []float32 {
	t.Helper()
	y, err := d.Floats(len(x))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Free(y) })
	copy(y, x)
	d.ToDevice(y)
	return y
}

// uploadInts is upload for whole numbers.
func uploadInts(t tester, d xpu.Device, x []int32) []int32 {
	t.Helper()
	y, err := d.Ints(len(x))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.FreeInts(y) })
	copy(y, x)
	d.IntsToDevice(y)
	return y
}

// download waits for the device, and brings these to the host.
func download(t tester, d xpu.Device, x ...[]float32) {
	t.Helper()
	if err := d.ToHost(t.Context(), x...); err != nil {
		t.Fatal(err)
	}
}

// downloadInts is download for whole numbers.
func downloadInts(t tester, d xpu.Device, x ...[]int32) {
	t.Helper()
	if err := d.IntsToHost(t.Context(), x...); err != nil {
		t.Fatal(err)
	}
}

// random returns n numbers in ±1.
func random(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = 2*r.Float32() - 1
	}
	return x
}

// compare fails the test where a number is further off than tolerance times its scale. Without scales it is the largest of what is wanted.
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
		t.Fatalf("%s: %d of %d numbers are wrong: the first at %d is %v, want %v; off by up to %.2g, allowed %.2g", what, wrong, len(want), first, got[first], want[first], worst, tolerance)
	}
}
