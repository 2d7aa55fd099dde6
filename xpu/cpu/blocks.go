package cpu

import "mula/xpu"

// measureSize is the number of elements whose old weights are kept at a time to measure changes. It
// divides [xpu.BlockSize].
const measureSize = 1 << 12

// A block is a range of elements of a stretch.
type block struct{ stretch, begin, end int }

// addBlocks cuts a range of n elements into blocks.
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

// Update updates weights and optimizer state; see [xpu.Layers].
func (h *Host) Update(u xpu.Update, stretches []xpu.Moments, before, change []float64) {
	n := xpu.CheckUpdate(u, stretches, before, change)
	t := h.begin(operands{moments: stretches, results: before, change: change, update: u})
	defer t.end()
	t.blocks = t.blocks[:0]
	for i, s := range stretches {
		t.addBlocks(i, len(s.Weight))
	}
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		s := &t.moments[b.stretch]
		if len(t.results) == 0 {
			updateRange(&t.update, s, b.begin, b.end)
			return
		}
		var old [measureSize]float32
		var before, change float64
		for begin := b.begin; begin < b.end; begin += measureSize {
			end := min(begin+measureSize, b.end)
			weight := s.Weight[begin:end]
			kept := old[:copy(old[:], weight)]
			before += SumSquares(kept)
			updateRange(&t.update, s, begin, end)
			AddScaled(kept, weight, -1, kept)
			change += SumSquares(kept)
		}
		t.results[i], t.change[i] = before, change
	})
}

// updateRange updates the elements from begin to end.
func updateRange(u *xpu.Update, s *xpu.Moments, begin, end int) {
	v := s.V
	if len(v) > 0 {
		v = v[begin:end]
	}
	update(u, s.Weight[begin:end], s.Grad[begin:end], s.M[begin:end], v)
	if u.Keep != 1 {
		Scale(s.Weight[begin:end], u.Keep)
	}
}
