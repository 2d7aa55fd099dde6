package cpu

import "mula/xpu"

// measureSize is the number of elements whose old weights are kept at a time to measure changes. It
// divides [xpu.BlockSize].
const measureSize = 1 << 12

// A block is a range of elements of a stretch.
type block struct{ stretch, begin, end int }

// addBlocks cuts a stretch of n elements into blocks.
func (t *task) addBlocks(stretch, n int) {
	for begin := 0; begin < n; begin += xpu.BlockSize {
		t.blocks = append(t.blocks, block{stretch, begin, min(begin+xpu.BlockSize, n)})
	}
}

// SumSquares sums the squares of blocks; see [xpu.Layers].
func (h *Host) SumSquares(stretches [][]float32, sums []float64) {
	n := xpu.CheckSumSquares(stretches, sums)
	t := h.begin(operands{stretches: stretches, results: sums})
	defer t.end()
	t.blocks = t.blocks[:0]
	for i, x := range stretches {
		t.addBlocks(i, len(x))
	}
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		t.results[i] = SumSquares(t.stretches[b.stretch][b.begin:b.end])
	})
}

// Checksums computes the checksums of blocks; see [xpu.Layers].
func (h *Host) Checksums(stretches [][]float32, sums []uint64) {
	n := xpu.CheckChecksums(stretches, sums)
	t := h.begin(operands{stretches: stretches, checksums: sums})
	defer t.end()
	t.blocks = t.blocks[:0]
	for i, x := range stretches {
		t.addBlocks(i, len(x))
	}
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		t.checksums[i] = xpu.Checksum(t.stretches[b.stretch][b.begin:b.end])
	})
}

// AdamW updates weights and moments; see [xpu.Layers].
func (h *Host) AdamW(rule xpu.AdamW, stretches []xpu.Moments, before, change []float64) {
	n := xpu.CheckAdamW(stretches, before, change)
	t := h.begin(operands{moments: stretches, results: before, change: change, rule: adamwConstants(rule),
		keep: float32(1 - rule.DecayAfter)})
	defer t.end()
	t.blocks = t.blocks[:0]
	for i, s := range stretches {
		t.addBlocks(i, len(s.Weight))
	}
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		s := &t.moments[b.stretch]
		if len(t.results) == 0 {
			t.adamw(s, b.begin, b.end)
			return
		}
		var old [measureSize]float32
		var before, change float64
		for begin := b.begin; begin < b.end; begin += measureSize {
			end := min(begin+measureSize, b.end)
			weight := s.Weight[begin:end]
			kept := old[:copy(old[:], weight)]
			before += SumSquares(kept)
			t.adamw(s, begin, end)
			AddScaled(kept, weight, -1, kept)
			change += SumSquares(kept)
		}
		t.results[i], t.change[i] = before, change
	})
}

// adamw updates the elements from begin to end.
func (t *task) adamw(s *xpu.Moments, begin, end int) {
	update(adamwUpdate, s.Weight[begin:end], s.Grad[begin:end], s.M[begin:end], s.V[begin:end], &t.rule)
	if t.keep != 1 {
		Scale(s.Weight[begin:end], t.keep)
	}
}
