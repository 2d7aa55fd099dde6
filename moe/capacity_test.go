package moe

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"mula/internal/longtest"
)

// limited returns a family's model with a capacity of experts, and a batch of its training.
func limited(t testing.TB, name string) (Config, Batch) {
	c, b := noisy(t, name)
	c.RouterJitter, c.ExpertCapacity = 0, 0.8
	b.Drop = true
	return c, b
}

// Losses, gradients and dropped fractions are the reference's: with biases of experts, shared
// experts, weights that are divided by their sum, and a layer without experts. A batch without Drop
// drops nothing.
func TestCapacityAgainstReference(t *testing.T) {
	for _, name := range []string{"gpt_oss", "deepseek_v3", "qwen3_moe", "dense layer"} {
		t.Run(name, func(t *testing.T) {
			if name != "gpt_oss" && name != "deepseek_v3" {
				longtest.SkipIfShort(t)
			}
			t.Parallel()
			c, batch := limited(t, name)
			m := newModel(t, c, 1)
			randomize(m, 3)
			stats, err := m.Backward(t.Context(), batch, BackwardOptions{})
			if err != nil {
				t.Fatal(err)
			}
			stats = copyStats(stats)
			want := checkAgainstReference(t, m, batch, stats)
			for i, l := range c.ExpertLayers(0, c.Layers) {
				if got := stats.Dropped[i]; math.Abs(got-want.dropped[l]) > 1e-12 || got < 0.02 || got > 0.9 {
					t.Errorf("layer %d drops %v of the choices, want %v", l, got, want.dropped[l])
				}
			}
			batch.Drop = false
			whole, err := m.Forward(t.Context(), batch)
			if err != nil {
				t.Fatal(err)
			}
			unlimited := c
			unlimited.ExpertCapacity = 0
			n := newModel(t, unlimited, 1)
			randomize(n, 3)
			plain, err := n.Forward(t.Context(), batch)
			if err != nil {
				t.Fatal(err)
			}
			if math.Abs(whole.Loss-plain.Loss) > 1e-6*plain.Loss || whole.Loss == stats.Loss {
				t.Errorf("loss %v without drops, %v without a capacity, %v with drops", whole.Loss, plain.Loss,
					stats.Loss)
			}
			for i, lost := range whole.Dropped {
				if lost != 0 {
					t.Errorf("layer %d drops %v", i, lost)
				}
			}
		})
	}
}

// The dropped choices do not depend on recomputation, devices, the dispatch, micro-batches and
// ranks, also if ranks share sequences.
func TestCapacityBits(t *testing.T) {
	c, batch := limited(t, "deepseek_v3")
	checkSameBits(t, c, batch)
	opts := BackwardOptions{Targets: int64(batch.targets()), Tokens: int64(batch.Rows * batch.SequenceLength)}
	whole := newModel(t, c, 2)
	randomize(whole, 1)
	all, err := whole.Backward(t.Context(), batch, opts)
	if err != nil {
		t.Fatal(err)
	}
	all = copyStats(all)
	rows := share(batch, []int{1, 1})
	for i := range rows {
		rows[i].Drop = true
	}
	for _, dispatch := range dispatches {
		g := newRanks(t, c, 2, 1, Parallel{Dispatch: dispatch}, nil)
		for _, m := range g.models {
			randomize(m, 1)
		}
		checkDropped(t, fmt.Sprint(dispatch), all, g.backward(t, rows, opts))
		got := g.gradients(t)
		for _, p := range whole.Parameters() {
			if e := relative(got[p.Name], p.Grad.Floats()); !(e <= 1e-5) {
				t.Errorf("%s: gradient of %s differs by %g", dispatch, p.Name, e)
			}
		}
	}
	for i, stats := range compareSharing(t, c, whole, rows, opts) {
		checkDropped(t, fmt.Sprint("ranks that share rows, case ", i), all, stats)
	}
}

// checkDropped compares the mean of the fractions that ranks of equal batches drop.
func checkDropped(t *testing.T, what string, want Stats, ranks []Stats) {
	t.Helper()
	for layer, w := range want.Dropped {
		mean := 0.0
		for _, s := range ranks {
			mean += s.Dropped[layer] / float64(len(ranks))
		}
		if math.Abs(mean-w) > 1e-12 {
			t.Errorf("%s: layer %d drops %v, want %v", what, layer, mean, w)
		}
	}
}

// A capacity for all tokens drops none, and the smallest capacity is one token of each expert.
func TestCapacityBounds(t *testing.T) {
	c, batch := limited(t, "qwen3_moe")
	loss := func(factor float64) (float64, []float64) {
		c.ExpertCapacity = factor
		m := newModel(t, c, 1)
		randomize(m, 3)
		stats, err := m.Backward(t.Context(), batch, BackwardOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return stats.Loss, stats.Dropped
	}
	plain, none := loss(0)
	if none != nil {
		t.Errorf("%v is dropped without a capacity", none)
	}
	all := float64(c.Experts) / float64(c.ExpertsPerToken)
	got, dropped := loss(all)
	if math.Abs(got-plain) > 1e-6*plain || slices.Max(dropped) > 0 {
		t.Errorf("capacity for all tokens: loss %v and drops of %v; want %v and 0", got, dropped, plain)
	}
	_, dropped = loss(1e-9)
	perRow := float64(batch.SequenceLength * c.ExpertsPerToken)
	for layer, lost := range dropped {
		if kept := (1 - lost) * perRow; kept > float64(c.Experts)+1e-9 || kept < float64(c.ExpertsPerToken)-1e-9 {
			t.Errorf("layer %d computes %v choices of a row with a capacity of 1", layer, kept)
		}
	}
}

// A capacity of a dense model, or not a number, is refused.
func TestCapacityRefuses(t *testing.T) {
	for _, factor := range []float64{-0.1, math.Inf(1), math.NaN()} {
		c, _ := limited(t, "gqa")
		if c.ExpertCapacity = factor; c.Validate() == nil {
			t.Errorf("a capacity of %v is valid", factor)
		}
	}
	c := gradientCases(t)["dense"]
	c.ExpertCapacity = 1
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "expert_capacity_factor") {
		t.Errorf("dense: %v", err)
	}
}
