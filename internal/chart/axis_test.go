package chart

import (
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestAxis(t *testing.T) {
	for _, test := range []struct {
		lo, hi float64
		n      int
		log    bool
		want   string
	}{
		{0, 100, 5, false, "0 20 40 60 80 100"},
		{0, 399, 5, false, "0 100 200 300"},
		{2.55, 9.36, 5, false, "4 6 8"},
		{0, 1, 5, false, "0 0.2 0.4 0.6 0.8 1.0"},
		{0.74, 1, 6, false, "0.75 0.80 0.85 0.90 0.95 1.00"},
		{0, 4e-4, 5, false, "0 1e-4 2e-4 3e-4 4e-4"},
		{0, 3000, 4, false, "0 1000 2000 3000"},
		{0, 50000, 5, false, "0 10k 20k 30k 40k 50k"},
		{0, 2.5e6, 5, false, "0 0.5M 1.0M 1.5M 2.0M 2.5M"},
		{-1, 1, 4, false, "-1.0 -0.5 0 0.5 1.0"},
		{5, 5, 4, false, "4.5 5.0 5.5"},
		{0, 0, 4, false, "-1.0 -0.5 0 0.5 1.0"},
		{0.4, 180, 5, true, "1 10 100"},
		{1, 50, 5, true, "1 2 5 10 20 50"},
		{1e-12, 1, 5, true, "1e-12 1e-10 1e-8 1e-6 1e-4 0.01 1"},
	} {
		a := NewAxis(test.lo, test.hi, 0, 100, test.n, test.log)
		if got := strings.Join(a.Labels, " "); got != test.want {
			t.Errorf("%g to %g: %s, want %s", test.lo, test.hi, got, test.want)
		}
	}
	for _, test := range []struct {
		lo, hi float64
		want   string
	}{{0, 0, "0 1"}, {0, 1, "0 1"}, {0, 3, "0 1 2 3"}, {7, 9, "7 8 9"}, {0, 400, "0 100 200 300 400"}} {
		if got := strings.Join(NewStepAxis(test.lo, test.hi, 0, 100, 5).Labels, " "); got != test.want {
			t.Errorf("steps %g to %g: %s, want %s", test.lo, test.hi, got, test.want)
		}
	}
}

// Ticks lie on the axis, rise, are as many as a reader can take in, and have labels that differ.
func TestAnyAxis(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lo := rapid.Float64Range(-1e12, 1e12).Draw(t, "lo") * math.Pow(10,
			float64(rapid.IntRange(-20, 3).Draw(t, "power")))
		span := math.Abs(lo) * math.Pow(10, rapid.Float64Range(-6, 6).Draw(t, "span"))
		n := rapid.IntRange(2, 9).Draw(t, "n")
		a := NewAxis(lo, lo+span, 500, 20, n, false)
		if len(a.Ticks) < 2 || len(a.Ticks) > 2*n+1 || len(a.Labels) != len(a.Ticks) {
			t.Fatalf("%d ticks", len(a.Ticks))
		}
		for i, v := range a.Ticks {
			if at := a.At(v); at < 19.999 || at > 500.001 || i > 0 && !(v > a.Ticks[i-1]) {
				t.Fatalf("tick %g of %g to %g is at %g, after %v", v, a.Lo, a.Hi, at, a.Ticks[:i])
			}
		}
		labels := slices.Clone(a.Labels)
		if slices.Sort(labels); len(slices.Compact(labels)) != len(a.Labels) {
			t.Fatalf("equal labels: %v for %v", a.Labels, a.Ticks)
		}
	})
}

func TestTicks(t *testing.T) {
	for _, test := range []struct {
		lo, hi float64
		n      int
		want   []float64
	}{
		{0, 100, 5, []float64{0, 20, 40, 60, 80, 100}}, {-1, 1, 4, []float64{-1, -0.5, 0, 0.5, 1}}, {2.55, 9.36, 5,
			[]float64{4, 6, 8}},
		{3.9, 6.1, 1, []float64{4, 6}}, // multiples of 5 would be one
	} {
		got := Ticks(test.lo, test.hi, test.n)
		for i := range got {
			got[i] = math.Round(got[i]*1e9) / 1e9
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%g to %g: %g, want %g", test.lo, test.hi, got, test.want)
		}
		for _, v := range got {
			if v == 0 && math.Signbit(v) {
				t.Errorf("%g to %g: a zero with a sign", test.lo, test.hi)
			}
		}
	}
}
