package moe

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"mula/internal/longtest"
)

// noisy returns a family's model with noise, and a batch of its training.
func noisy(t testing.TB, name string) (Config, Batch) {
	c := gradientCases(t)[name]
	c.RouterJitter = 0.3
	b := randomBatch(c, 2, 12, 4)
	for i := range b.Tokens {
		if int(b.Tokens[i]) == c.PadTokenID {
			b.Tokens[i]++
		}
	}
	b.Jitter = BatchJitter{On: true, Seed: 11, First: 1000}
	return c, b
}

// Losses and gradients are the reference's with the same noise on the input of the router and of
// the experts: before or without a norm, with shared experts, and with a layer without experts.
func TestJitterAgainstReference(t *testing.T) {
	for _, name := range []string{"qwen3_moe", "flex_olmo", "deepseek_v3", "dense layer"} {
		t.Run(name, func(t *testing.T) {
			if name != "flex_olmo" && name != "deepseek_v3" {
				longtest.SkipIfShort(t)
			}
			t.Parallel()
			c, batch := noisy(t, name)
			m := newModel(t, c, 1)
			randomize(m, 3)
			stats, err := m.Backward(t.Context(), batch, BackwardOptions{})
			if err != nil {
				t.Fatal(err)
			}
			checkAgainstReference(t, m, batch, stats)
		})
	}
}

// The noise does not depend on recomputation, devices, micro-batches and ranks, and is none without
// a seed.
func TestJitterBits(t *testing.T) {
	c, batch := noisy(t, "deepseek_v3")
	checkSameBits(t, c, batch)
	whole := newModel(t, c, 2)
	randomize(whole, 1)
	quiet := batch
	quiet.Jitter = BatchJitter{}
	loss := func(b Batch) float64 {
		stats, err := whole.Forward(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		return stats.Loss
	}
	none := c
	none.RouterJitter = 0
	same := newModel(t, none, 2)
	randomize(same, 1)
	plain, err := same.Forward(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	other := batch
	other.Jitter = BatchJitter{On: true, Seed: 12, First: 1000}
	if a, b := loss(quiet), loss(batch); a != plain.Loss || a == b || b == loss(other) || b != loss(batch) {
		t.Errorf("losses %v without noise, %v with noise", a, b)
	}

	// of ranks and micro-batches
	opts := BackwardOptions{Targets: int64(batch.targets()), Tokens: int64(batch.Rows * batch.SequenceLength)}
	whole.ZeroGradients()
	if _, err := whole.Backward(t.Context(), batch, opts); err != nil {
		t.Fatal(err)
	}
	rows := share(batch, []int{1, 1})
	for i := range rows {
		rows[i].Jitter = BatchJitter{On: true, Seed: 11, First: 1000 + int64(i*batch.SequenceLength)}
	}
	compareSharing(t, c, whole, rows, opts)
}

// Noise of a dense model, beyond its bounds, and with numbers that are too large is refused.
func TestJitterRefuses(t *testing.T) {
	for _, noise := range []float64{-0.1, 1, math.NaN()} {
		c, _ := noisy(t, "gqa")
		if c.RouterJitter = noise; c.Validate() == nil {
			t.Errorf("noise of %v is valid", noise)
		}
	}
	c := gradientCases(t)["dense"]
	if c.RouterJitter = 0.1; c.Validate() == nil || !strings.Contains(fmt.Sprint(c.Validate()), "router_jitter_noise") {
		t.Errorf("dense: %v", c.Validate())
	}
	c, batch := noisy(t, "gqa")
	batch.Jitter.First = math.MaxInt32
	if _, err := newModel(t, c, 1).Backward(t.Context(), batch, BackwardOptions{}); err == nil {
		t.Error("numbers of 2^31 were accepted")
	}
}
