package cpu

import "mula/xpu"

// measureSize is the number of elements whose old weights are kept at a time to measure changes. It
// divides [xpu.BlockSize].
const measureSize = 1 << 12

// moments are [xpu.Moments] in host memory. Commands that only read have the numbers in Grad.
type moments struct {
	Weight, Grad, M, V []float32
	halves             []uint16 // bits of a gradient of BFloat16, instead of Grad
	halvesM, halvesV   []uint16 // bits of moments of BFloat16, instead of M and V
}

// A block is a range of elements of a stretch.
type block struct{ stretch, begin, end int }

// addStretch adds a range with the gradient grad, and cuts it into blocks.
func (t *task) addStretch(m moments, grad xpu.Tensor) {
	if grad.DType() == xpu.BFloat16 {
		m.halves = grad.Halves()
	} else {
		m.Grad = grad.Floats()
	}
	stretch, n := len(t.ranges), grad.Elements()
	t.ranges = append(t.ranges, m)
	for begin := 0; begin < n; begin += xpu.BlockSize {
		t.blocks = append(t.blocks, block{stretch, begin, min(begin+xpu.BlockSize, n)})
	}
}

// grad returns the gradient of a block. If it is of BFloat16, it is converted into *buffer.
func (t *task) grad(b block, buffer *[]float32) []float32 {
	s := &t.ranges[b.stretch]
	if s.halves == nil {
		return s.Grad[b.begin:b.end]
	}
	x := room(buffer, b.end-b.begin)
	Widen(x, s.halves[b.begin:b.end])
	return x
}

// SumSquares sums the squares of blocks; see [xpu.Layers].
func (h *Host) SumSquares(stretches []xpu.Tensor, sums []float64) {
	n := xpu.CheckBlocks("SumSquares", stretches, len(sums))
	t := h.begin(operands{results: sums})
	defer t.end()
	t.blocks = t.blocks[:0]
	for _, x := range stretches {
		t.addStretch(moments{}, x)
	}
	t.cut(n, n, func(t *task, i, _, _ int) {
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		t.results[i] = SumSquares(t.grad(t.blocks[i], buffer))
	})
}

// Checksums computes the checksums of blocks; see [xpu.Layers].
func (h *Host) Checksums(stretches []xpu.Tensor, sums []uint64) {
	n := xpu.CheckBlocks("Checksums", stretches, len(sums))
	t := h.begin(operands{checksums: sums})
	defer t.end()
	t.blocks = t.blocks[:0]
	for _, x := range stretches {
		t.addStretch(moments{}, x)
	}
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		if s := &t.ranges[b.stretch]; s.halves != nil {
			t.checksums[i] = xpu.Checksum(s.halves[b.begin:b.end])
		} else {
			t.checksums[i] = xpu.Checksum(s.Grad[b.begin:b.end])
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
		m := moments{Weight: s.Weight.Floats()}
		m.M, m.halvesM = numbers(s.M)
		m.V, m.halvesV = numbers(s.V)
		t.addStretch(m, s.Grad)
	}
	t.cut(n, n, func(t *task, i, _, _ int) {
		b := t.blocks[i]
		s := &t.ranges[b.stretch]
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		grad := t.grad(b, buffer)
		if len(t.results) == 0 {
			updateRange(&t.update, s, b.begin, grad)
			return
		}
		var old [measureSize]float32
		var before, change float64
		for begin := b.begin; len(grad) > 0; begin += measureSize {
			n := min(measureSize, len(grad))
			weight := s.Weight[begin:][:n]
			kept := old[:copy(old[:], weight)]
			before += SumSquares(kept)
			updateRange(&t.update, s, begin, grad[:n])
			sumScaled(kept, weight, -1, kept)
			change += SumSquares(kept)
			grad = grad[n:]
		}
		t.results[i], t.change[i] = before, change
	})
}

// updateRange updates the elements from begin on with their gradients.
func updateRange(u *xpu.Update, s *moments, begin int, grad []float32) {
	end := begin + len(grad)
	if s.halvesM == nil && s.halvesV == nil {
		v := s.V
		if len(v) > 0 {
			v = v[begin:end]
		}
		update(u, s.Weight[begin:end], grad, s.M[begin:end], v)
	} else {
		var buffers [2][measureSize]float32
		for at := begin; at < end; at += measureSize {
			n := min(measureSize, end-at)
			m := widenMoments(buffers[0][:n], s.M, s.halvesM, at)
			v := widenMoments(buffers[1][:n], s.V, s.halvesV, at)
			update(u, s.Weight[at:at+n], grad[at-begin:][:n], m, v)
			if s.halvesM != nil {
				BF16(s.halvesM[at:at+n], m)
			}
			if s.halvesV != nil {
				BF16(s.halvesV[at:at+n], v)
			}
		}
	}
	if u.Keep != 1 {
		Scale(s.Weight[begin:end], u.Keep)
	}
}

// widenMoments returns as many moments as the buffer has elements, from the given one on, or nil if
// there are none. Moments of BFloat16 are converted into the buffer.
func widenMoments(buffer, floats []float32, halves []uint16, from int) []float32 {
	switch {
	case halves != nil:
		Widen(buffer, halves[from:][:len(buffer)])
		return buffer
	case len(floats) > 0:
		return floats[from:][:len(buffer)]
	}
	return nil
}
