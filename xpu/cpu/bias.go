package cpu

import "mula/xpu"

// GroupedBias adds biases to groups of rows; see [xpu.Layers].
func (h *Host) GroupedBias(x, bias, weight, counts xpu.Tensor) {
	xpu.CheckGroupedBias(x, bias, weight, counts)
	t := h.begin(operands{w: weight.Floats(), ids: counts.Ints(), width: x.Dim(1)})
	defer t.end()
	t.dst, t.dstHalves = numbers(x)
	t.x = t.weights(0, bias)
	t.split(x.Dim(0), func(t *task, _, lo, hi int) {
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		width := t.width
		for r, g := lo, t.groupOf(lo); r < hi; r++ {
			for r >= g.end {
				g.next(t.ids)
			}
			to := row(t.dst, t.dstHalves, r, width, buffer)
			Axpy(to, t.rowWeight(r), t.x[g.index*width:][:width])
			if t.dstHalves != nil {
				BF16(t.dstHalves[r*width:][:width], to)
			}
		}
	})
}

// GroupedBiasGrad computes the gradients of [Host.GroupedBias]; see [xpu.Layers].
func (h *Host) GroupedBiasGrad(dbias, dy, bias, weight, dweight, counts xpu.Tensor) {
	xpu.CheckGroupedBiasGrad(dbias, dy, bias, weight, dweight, counts)
	width := dy.Dim(1)
	x, halves := numbers(dy)
	t := h.begin(operands{x: x, halves: halves, w: weight.Floats(), ids: counts.Ints(), width: width})
	defer t.end()
	t.dst, t.dstHalves = numbers(dbias)
	// a worker adds a group's rows in a stripe of columns
	t.split(counts.Dim(0)*((width+stripe-1)/stripe), func(t *task, _, lo, hi int) {
		width := t.width
		stripes := (width + stripe - 1) / stripe
		var memory, converted [stripe]float32
		for i := lo; i < hi; i++ {
			index, column := i/stripes, i%stripes*stripe
			at, n := index*width+column, min(stripe, width-column)
			sum := memory[:n]
			if t.dstHalves == nil {
				sum = t.dst[at:][:n]
			} else {
				clear(sum)
			}
			first := 0
			for _, count := range t.ids[:index] {
				first += int(count)
			}
			for r := first; r < first+int(t.ids[index]); r++ {
				dy := converted[:n]
				if t.halves != nil {
					Widen(dy, t.halves[r*width+column:][:n])
				} else {
					dy = t.x[r*width+column:][:n]
				}
				Axpy(sum, t.rowWeight(r), dy)
			}
			if t.dstHalves != nil {
				addHalves(t.dstHalves[at:][:n], sum)
			}
		}
	})
	if !weight.Present() {
		return
	}
	t.y, t.z = t.weights(0, bias), dweight.Floats()
	t.split(dy.Dim(0), func(t *task, _, lo, hi int) {
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		width := t.width
		for r, g := lo, t.groupOf(lo); r < hi; r++ {
			for r >= g.end {
				g.next(t.ids)
			}
			t.z[r] += Dot(row(t.x, t.halves, r, width, buffer), t.y[g.index*width:][:width])
		}
	})
}

// rowWeight returns the weight of a row, 1 without weights.
func (t *task) rowWeight(r int) float32 {
	if len(t.w) == 0 {
		return 1
	}
	return t.w[r]
}

// A rowGroup is a group of consecutive rows; end is the row after its last.
type rowGroup struct{ index, end int }

// next moves to the next group. counts are the rows of all groups.
func (g *rowGroup) next(counts []int32) {
	g.index++
	g.end += int(counts[g.index])
}

// groupOf returns the group of a row, if the task's ids are the rows of groups.
func (t *task) groupOf(r int) rowGroup {
	g := rowGroup{0, int(t.ids[0])}
	for r >= g.end {
		g.next(t.ids)
	}
	return g
}
