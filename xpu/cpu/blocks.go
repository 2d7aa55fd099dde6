package cpu

import "mula/xpu"

// measureSize is the number of elements whose old weights are kept at a time to measure changes. It
// divides [xpu.BlockSize].
const measureSize = 1 << 12

// moments are [xpu.Moments] in host memory. Commands that only read have the numbers in Weight.
type moments struct {
	Weight, Grad, M, V []float32
	// bits of numbers of BFloat16: of Grad in Update, of Weight in commands that only read
	halves []uint16
}

// A block is a range of elements of a stretch.
type block struct{ stretch, begin, end int }

// addStretch adds a range and cuts it into blocks.
func (t *task) addStretch(m moments) {
	stretch, n := len(t.ranges), max(len(m.Weight), len(m.halves))
	t.ranges = append(t.ranges, m)
	for begin := 0; begin < n; begin += xpu.BlockSize {
		t.blocks = append(t.blocks, block{stretch, begin, min(begin+xpu.BlockSize, n)})
	}
}

// SumSquares sums the squares of blocks; see [xpu.Layers].
func (h *Host) SumSquares(stretches []xpu.Tensor, sums []float64) {
	n := xpu.CheckBlocks("SumSquares", stretches, len(sums))
	t := h.begin(operands{results: sums})
	defer t.end()
	t.blocks = t.blocks[:0]
	t.addStretches(stretches)
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		s := &t.ranges[b.stretch]
		if s.halves == nil {
			t.results[i] = SumSquares(s.Weight[b.begin:b.end])
			return
		}
		buffer := t.host.buffers.Get()
		x := room(buffer, b.end-b.begin)
		Widen(x, s.halves[b.begin:b.end])
		t.results[i] = SumSquares(x)
		t.host.buffers.Put(buffer)
	})
}

// Checksums computes the checksums of blocks; see [xpu.Layers].
func (h *Host) Checksums(stretches []xpu.Tensor, sums []uint64) {
	n := xpu.CheckBlocks("Checksums", stretches, len(sums))
	t := h.begin(operands{checksums: sums})
	defer t.end()
	t.blocks = t.blocks[:0]
	t.addStretches(stretches)
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		if s := &t.ranges[b.stretch]; s.halves != nil {
			t.checksums[i] = xpu.Checksum(s.halves[b.begin:b.end])
		} else {
			t.checksums[i] = xpu.Checksum(s.Weight[b.begin:b.end])
		}
	})
}

// Update updates weights and optimizer state; see [xpu.Layers].
func (h *Host) Update(u xpu.Update, stretches []xpu.Moments, before, change []float64) {
	n := xpu.CheckUpdate(u, stretches, before, change)
	t := h.begin(operands{results: before, change: change, update: u})
	defer t.end()
	t.blocks = t.blocks[:0]
	for _, s := range stretches {
		m := moments{Weight: s.Weight.Floats(), M: s.M.Floats(), V: s.V.Floats()}
		if s.Grad.DType() == xpu.BFloat16 {
			m.halves = s.Grad.Halves()
		} else {
			m.Grad = s.Grad.Floats()
		}
		t.addStretch(m)
	}
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		s := &t.ranges[b.stretch]
		if len(t.results) == 0 {
			t.host.updateRange(&t.update, s, b.begin, b.end)
			return
		}
		var old [measureSize]float32
		var before, change float64
		for begin := b.begin; begin < b.end; begin += measureSize {
			end := min(begin+measureSize, b.end)
			weight := s.Weight[begin:end]
			kept := old[:copy(old[:], weight)]
			before += SumSquares(kept)
			t.host.updateRange(&t.update, s, begin, end)
			AddScaled(kept, weight, -1, kept)
			change += SumSquares(kept)
		}
		t.results[i], t.change[i] = before, change
	})
}

// addStretches adds ranges of numbers that are only read.
func (t *task) addStretches(stretches []xpu.Tensor) {
	for _, x := range stretches {
		if x.DType() == xpu.BFloat16 {
			t.addStretch(moments{halves: x.Halves()})
		} else {
			t.addStretch(moments{Weight: x.Floats()})
		}
	}
}

// updateRange updates the elements from begin to end, whose gradients may be of BFloat16.
func (h *Host) updateRange(u *xpu.Update, s *moments, begin, end int) {
	if s.halves == nil {
		updateRange(u, s, begin, end)
		return
	}
	buffer := h.buffers.Get()
	defer h.buffers.Put(buffer)
	for ; begin < end; begin += measureSize {
		n := min(measureSize, end-begin)
		piece := moments{Weight: s.Weight[begin:][:n], Grad: room(buffer, n), M: s.M[begin:][:n]}
		if len(s.V) > 0 {
			piece.V = s.V[begin:][:n]
		}
		Widen(piece.Grad, s.halves[begin:][:n])
		updateRange(u, &piece, 0, n)
	}
}

// updateRange updates the elements from begin to end.
func updateRange(u *xpu.Update, s *moments, begin, end int) {
	v := s.V
	if len(v) > 0 {
		v = v[begin:end]
	}
	update(u, s.Weight[begin:end], s.Grad[begin:end], s.M[begin:end], v)
	if u.Keep != 1 {
		Scale(s.Weight[begin:end], u.Keep)
	}
}
