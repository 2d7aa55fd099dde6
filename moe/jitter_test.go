package moe

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
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
	var want []float32
	for i, dev := range []xpu.Device{cpu.New(1, xpu.FP32), cpu.New(3, xpu.FP32), discrete.New(cpu.New(2, xpu.FP32))} {
		t.Cleanup(dev.Close)
		m := newModelOn(t, dev, c)
		randomize(m, 1)
		for _, level := range levels {
			m.SetRecompute(level)
			m.ZeroGradients()
			if _, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(c)}); err != nil {
				t.Fatal(err)
			}
			var all []float32
			for _, b := range m.Buckets() {
				all = append(all, numbers(t, m, b.Grad)...)
			}
			if want == nil {
				want = all
			}
			if !slices.Equal(all, want) {
				t.Errorf("device %d, %s: other bits", i, level)
			}
		}
	}

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
	for _, cp := range []int{1, 2} {
		shape := comm.NewShape(map[comm.Axes]int{comm.EP: 2, comm.TP: 2 / cp, comm.ExpertDP: cp})
		g := newTensorRanks(t, func() xpu.Device { return cpu.New(1, xpu.FP32) }, c, shape, cp)
		n := cp * 2 / cp
		rows := share(batch, slices.Repeat([]int{1}, 2))
		var batches []Batch
		for r := range shape.Ranks() {
			b := rows[r/n]
			b.Jitter = BatchJitter{On: true, Seed: 11, First: 1000 + int64(r/n*batch.SequenceLength)}
			batches = append(batches, b)
		}
		for _, m := range g.models {
			for _, p := range m.params {
				m.dev.Write(p.Weight, sliceOf(p, byName(whole, p.Name).Weight.Floats()))
			}
		}
		g.backward(t, batches, opts)
		compareSlices(t, g, whole, 1e-5)
	}
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
