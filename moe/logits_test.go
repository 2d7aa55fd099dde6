package moe

import (
	"math"
	"slices"
	"testing"

	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// rowsDevice is a device that needs more rows in a product.
type rowsDevice struct {
	xpu.Device
	rows int
}

func (d rowsDevice) ProductRows() int { return d.rows }

func TestLogitsTokens(t *testing.T) {
	const gb = 1 << 30
	for _, test := range []struct {
		vocabulary, rows int
		capacity         int64
		want             int
	}{
		{50304, 0, 0, 256},        // a processor
		{50304, 256, 0, 256},      // likewise
		{4096, 0, 0, 1024},        // 2²² logits
		{1000, 2048, gb, 4194},    // likewise, on a GPU
		{50304, 2048, 0, 2048},    // memory shared with the host
		{50304, 2048, 64e9, 2048}, // a tile
		{50304, 2048, 13.2e9, 2048},
		{50304, 2048, 13.1e9, 1024},
		{152064, 2048, 24 * gb, 1024},
		{152064, 2048, gb, 256}, // not less
	} {
		if got := LogitsTokens(test.vocabulary, test.rows, test.capacity); got != test.want {
			t.Errorf("%+v: %d tokens", test, got)
		}
	}
}

// A device that needs more rows computes larger blocks of logits, within its memory. Losses and
// gradients of hidden states keep their bits. The head's gradient is the sum of the blocks'.
func TestBlocksOfLogits(t *testing.T) {
	const tokens = 300
	cfg := gradientCases(t)["nano"]
	cfg.VocabSize, cfg.MaxPositions, cfg.Layers = 20_000, tokens, 1
	batch := randomBatch(cfg, 1, tokens, 5)
	type result struct {
		rows       int // tokens of a block
		loss       float64
		head, rest []float32
	}
	pass := func(rows int, capacity int64) (r result) {
		dev := discrete.New(rowsDevice{cpu.New(2, xpu.FP32), rows})
		defer dev.Close()
		dev.SetCapacity(capacity)
		m := newModelOn(t, dev, cfg)
		m.Init(3)
		stats, err := m.Backward(t.Context(), batch, BackwardOptions{Targets: tokens})
		if err != nil {
			t.Fatal(err)
		}
		r.rows, r.loss = m.ws.logitsRows, stats.Loss
		for _, p := range m.Parameters() {
			x := slices.Clone(numbers(t, m, p.Grad))
			if p.Name == headName {
				r.head = x
			} else {
				r.rest = append(r.rest, x...)
			}
		}
		block := LogitsTokens(cfg.VocabSize, rows, capacity)
		want := cfg.Memory(Pass{Rows: 1, SequenceLength: tokens, LogitsTokens: block}).Total()
		host := 8 * int64(m.ws.arena.nDoubles+m.flights[0].arena.nDoubles)
		if got := dev.InUse() + host; got != want {
			t.Errorf("blocks of %d tokens need %d bytes, the memory model has %d", block, got, want)
		}
		return r
	}
	const large, small = 1 << 40, 1 << 30 // bytes
	processor, gpu, little := pass(256, large), pass(2048, large), pass(2048, small)
	if processor.rows != 256 || gpu.rows != tokens || little.rows != 256 {
		t.Errorf("blocks of %d, %d and %d tokens", processor.rows, gpu.rows, little.rows)
	}
	if gpu.loss != processor.loss || !slices.Equal(gpu.rest, processor.rest) {
		t.Errorf("losses %v and %v, or gradients differ", gpu.loss, processor.loss)
	}
	if !slices.Equal(little.head, processor.head) {
		t.Error("with little memory, the head's gradient is not the processor's")
	}
	scale, worst := 0.0, 0.0
	for i, x := range processor.head {
		scale = max(scale, math.Abs(float64(x)))
		worst = max(worst, math.Abs(float64(x-gpu.head[i])))
	}
	if worst > 1e-5*scale {
		t.Errorf("the head's gradient differs by %g of %g", worst, scale)
	}
}
