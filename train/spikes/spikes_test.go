package spikes

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"mula/blend"
)

// The rule, against the formula written out: a spike is beyond mean + sigma·deviation of a full
// window, whose values a spike never joins.
func TestSpikeCheck(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := Config{Action: Skip, Sigma: rapid.Float64Range(1, 8).Draw(t, "sigma"),
			Window: rapid.IntRange(2, 9).Draw(t, "window")}
		s := NewState(c)
		var made [][2]float64
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			v := [2]float64{rapid.Float64Range(0, 10).Draw(t, "loss"), rapid.Float64Range(0, 3).Draw(t, "norm")}
			want := ""
			for k, name := range []string{"loss", "grad_norm"} {
				var sum, squares float64
				n := 0.0
				for _, m := range made[max(0, len(made)-c.Window):] {
					sum, squares, n = sum+m[k], squares+m[k]*m[k], n+1
				}
				variance := (squares - sum*sum/n) / (n - 1)
				limit := sum/n + c.Sigma*math.Sqrt(max(variance, 0))
				if math.Abs(v[k]-limit) < 1e-6 {
					t.Skip("too near to tell")
				}
				if int(n) == c.Window && v[k] > limit && want == "" {
					want = name
				}
			}
			got := s.Check(c, v[0], v[1])
			if (got == nil) != (want == "") || got != nil && (got.What != want ||
				got.Value != v[map[string]int{"loss": 0, "grad_norm": 1}[want]]) {
				t.Fatalf("after %v, %v is %v, want %q", made, v, got, want)
			}
			if got == nil {
				s.Update(c.Window, v[0], v[1])
				made = append(made, v)
			}
		}
		if len(s.Losses) != min(len(made), c.Window) {
			t.Fatalf("%d losses of %d in a window of %d", len(s.Losses), len(made), c.Window)
		}
	})
	if s := NewState(Config{Action: None}); s != nil || s.Check(Config{}, 1e9, 1e9) != nil ||
		s.Excludes(3) {
		t.Error("action none has a state, or finds a spike")
	}
}

// The skipped data is a set of positions, in the form of a plan's skips.
func TestLeaveOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s State
		out := map[int64]bool{}
		for range rapid.IntRange(1, 12).Draw(t, "ranges") {
			from := rapid.Int64Range(0, 60).Draw(t, "from")
			to := from + rapid.Int64Range(1, 10).Draw(t, "length")
			s.Exclude(blend.Range{From: from, To: to})
			for p := from; p < to; p++ {
				out[p] = true
			}
		}
		for p := range int64(80) {
			if s.Excludes(p) != out[p] {
				t.Fatalf("position %d: %v in %v", p, s.Excludes(p), s.Skips)
			}
		}
		for i := 1; i < len(s.Skips); i++ {
			if s.Skips[i].From <= s.Skips[i-1].To {
				t.Fatalf("not apart: %v", s.Skips)
			}
		}
	})
}
