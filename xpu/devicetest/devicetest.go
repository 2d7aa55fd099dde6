// Package devicetest tests implementations of [xpu.Device] against plain Go in float64.
package devicetest

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// families are the groups of checks.
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

// Run checks all operations of a device. The error of a number may be tolerance times the scale of
// its sum, the sum of the absolute values of its terms: 1e-5 for fp32, 1e-2 for bf16 and results
// computed from it.
func Run(t *testing.T, d xpu.Device, tolerance float64) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) { f.check(t, d, tolerance) })
	}
}

// A tester is a test, or one attempt of a property test.
type tester interface {
	rapid.TB
	Cleanup(func())
	Context() context.Context
}

// upload allocates device memory with these numbers on both sides, until the test ends. It checks
// that the memory before and after is unchanged then: a device must write only to its operands.
func upload(t tester, d xpu.Device, x []float32) []float32 {
	t.Helper()
	return fenced(t, x, d.Floats, d.Free, d.ToDevice, func(x []float32) error {
		return d.ToHost(context.Background(),
			x)
	}, math.Float32bits, math.Float32frombits(fence))
}

// uploadInts is upload for whole numbers.
func uploadInts(t tester, d xpu.Device, x []int32) []int32 {
	t.Helper()
	return fenced(t, x, d.Ints, d.FreeInts, d.IntsToDevice,
		func(x []int32) error { return d.IntsToHost(context.Background(), x) },
		func(x int32) uint32 { return uint32(x) }, fence)
}

// A fence surrounds memory. As float32 it is NaN, so that a device that reads it is detected too.
const fence, fenceBefore, fenceBehind = 0x7fc0fe9c, 19, 32

func fenced[E float32 | int32](t tester, x []E, memory func(int) ([]E, error), free, toDevice func([]E),
	toHost func([]E) error, bits func(E) uint32, mark E) []E {
	t.Helper()
	all, err := memory(fenceBefore + len(x) + fenceBehind)
	if err != nil {
		t.Fatal(err)
	}
	end := fenceBefore + len(x)
	t.Cleanup(func() {
		defer free(all)
		if err := errors.Join(toHost(all[:fenceBefore]), toHost(all[end:])); err != nil {
			t.Errorf("the memory around %d elements: %v", len(x), err)
			return
		}
		for i, v := range all {
			if (i < fenceBefore || i >= end) && bits(v) != fence {
				t.Errorf("a command has written %v to element %d of %d, which it was not given", v, i-fenceBefore,
					len(x))
				return
			}
		}
	})
	for i := range all {
		all[i] = mark
	}
	copy(all[fenceBefore:], x)
	toDevice(all)
	return all[fenceBefore:end:end]
}

// download waits for the device, and copies these slices to the host.
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
