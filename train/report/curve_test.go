package report

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

func drawCurve(t *rapid.T, most int) []point {
	ys := rapid.SliceOfN(rapid.OneOf(rapid.Float64Range(-1e3, 1e3), rapid.Just(math.NaN())), 1, most).Draw(t, "y")
	curve := make([]point, len(ys))
	for i, y := range ys {
		curve[i] = point{float64(i), y}
	}
	return curve
}

func bounds(curve []point) (lo, hi float64) {
	lo, hi = math.Inf(1), math.Inf(-1)
	for _, p := range curve {
		if !math.IsNaN(p.y) {
			lo, hi = min(lo, p.y), max(hi, p.y)
		}
	}
	return lo, hi
}

// Thinning keeps the extremes, invents no value, and keeps the order of steps.
func TestEnvelope(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		curve := drawCurve(t, 300)
		n := rapid.IntRange(1, 40).Draw(t, "n")
		thin := envelope(curve, n)
		if len(thin) > max(2*n, 1) {
			t.Fatalf("%d points of %d", len(thin), len(curve))
		}
		lo, hi := bounds(curve)
		if l, h := bounds(thin); l != lo || h != hi {
			t.Fatalf("from %g to %g, the curve from %g to %g", l, h, lo, hi)
		}
		for i, p := range thin {
			if i > 0 && p.x <= thin[i-1].x {
				t.Fatalf("step %g after %g", p.x, thin[i-1].x)
			}
			if y := curve[int(p.x)].y; y != p.y && !(math.IsNaN(p.y)) {
				t.Fatalf("%g at step %g, the curve has %g", p.y, p.x, y)
			}
		}
	})
}

func TestMeans(t *testing.T) {
	nan := math.NaN()
	curve := []point{{0, 1}, {1, 3}, {2, nan}, {3, nan}, {4, 5}, {5, nan}, {6, 9}}
	want := []point{{0.5, 2}, {2.5, nan}, {4.5, 5}, {6, 9}}
	if diff := cmp.Diff(want, means(curve, 4), cmp.AllowUnexported(point{}), cmpopts.EquateNaNs()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The average equals its definition: every step weighs keep to the power of its distance, times its
// own weight.
func TestSmooth(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		curve := drawCurve(t, 60)
		weights := rapid.SliceOfN(rapid.Float64Range(0, 9), len(curve), len(curve)).Draw(t, "weights")
		span := rapid.Float64Range(1, 30).Draw(t, "span")
		keep := 1 - 4/(span+3)
		got := smooth(curve, weights, span)
		for i := range curve {
			var sum, total float64
			for j, p := range curve {
				if w := weights[j] * math.Pow(keep, math.Abs(float64(i-j))); !math.IsNaN(p.y) && w > 0 {
					sum += w * p.y
					total += w
				}
			}
			if total < 1e-250 {
				continue // whether anything is left of so little is up to rounding
			}
			if want := sum / total; !(math.Abs(got[i].y-want) <= 1e-6) || got[i].x != curve[i].x {
				t.Fatalf("step %d: %g, want %g", i, got[i].y, want)
			}
		}
	})
}

func TestSmoothSpan(t *testing.T) {
	for n, want := range map[int]float64{0: 1, 1: 1, 60: 1, 400: 8, 1_000_000: 1000} {
		if got := smoothSpan(n); got != want {
			t.Errorf("%d steps: %g, want %g", n, got, want)
		}
	}
}
