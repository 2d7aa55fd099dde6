package evaluate

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// Quantiles of the usual table.
func TestStudentT(t *testing.T) {
	for degrees, want := range map[int64]float64{1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 5: 2.57058, 7: 2.36462,
		10: 2.22814, 20: 2.08596, 30: 2.04227, 100: 1.98397,
		1000: 1.96234, 1 << 50: 1.95996} {
		if got := studentT(degrees); math.Abs(got-want) > 2e-3*want {
			t.Errorf("%d degrees of freedom: %v, want %v", degrees, got, want)
		}
	}
}

// Of draws without replacement from a finite population, 95 % have its mean within the margin.
func TestMarginCovers(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{4, 12, 30} {
		const windows, trials = 40, 4000
		covered := 0
		for range trials {
			population := make([]float64, windows)
			var mean float64
			for i := range population {
				population[i] = 3 + random.NormFloat64()
				mean += population[i] / windows
			}
			var s spreadOfLosses
			for _, i := range random.Perm(windows)[:n] {
				s.add(population[i])
			}
			if margin, ok := s.margin(windows); ok && math.Abs(s.mean-mean) <= margin {
				covered++
			}
		}
		if share := float64(covered) / trials; share < 0.94 || share > 0.96 {
			t.Errorf("%d of %d windows: %v of the intervals hold the mean", n, windows, share)
		}
	}
}

// Chosen windows are in the split and in ascending order.
func TestSpread(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(1, 1<<60).Draw(t, "n")
		count := rapid.Int64Range(1, min(n, 1<<31)).Draw(t, "count")
		j := rapid.Int64Range(0, count-1).Draw(t, "j")
		at := spread(j, n, count)
		if at < 0 || at >= n {
			t.Fatalf("window %d", at)
		}
		if j > 0 && spread(j-1, n, count) >= at {
			t.Fatalf("windows %d and %d", spread(j-1, n, count), at)
		}
	})
}

// Where targets differ in number the intervals hold the mean over all of them as often as they say.
func TestMarginsOfCounts(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	const windows, n, trials = 200, 60, 3000
	covered := 0
	for range trials {
		var losses, counts [windows]float64
		loss, count := 0.0, 0.0
		for i := range windows {
			counts[i] = float64(5 + random.IntN(20))
			losses[i] = counts[i] * (3 + random.NormFloat64()/2 + counts[i]/20) // longer documents are harder
			loss += losses[i]
			count += counts[i]
		}
		drawn := random.Perm(windows)[:n]
		some, of := 0.0, 0.0
		for _, i := range drawn {
			some += losses[i]
			of += counts[i]
		}
		var s spreadOfLosses
		for _, i := range drawn {
			s.addWeighted(losses[i], counts[i], some/of, of/n)
		}
		if margin, ok := s.margin(windows); ok && math.Abs(some/of-loss/count) <= margin {
			covered++
		}
	}
	if share := float64(covered) / trials; share < 0.93 || share > 0.965 {
		t.Errorf("%v of the intervals hold the mean", share)
	}
}
