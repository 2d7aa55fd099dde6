package cpu

import "mula/xpu"

// SumRows adds the rows of each token; see [xpu.Layers].
func (h *Host) SumRows(dst, x, y, rowOf xpu.Tensor) {
	xpu.CheckSumRows(dst, x, y, rowOf)
	h.split(dst.Dim(0), operands{dst: dst.Floats(), x: x.Floats(), y: y.Floats(), ids: rowOf.Ints(),
		perToken: rowOf.Dim(1), width: dst.Dim(1)}, func(t *task, _, lo, hi int) {
		width, k, y := t.width, t.perToken, t.y
		for i := lo; i < hi; i++ {
			row := t.dst[i*width:][:width]
			rows := t.ids[i*k:][:k]
			if len(t.x) > 0 {
				sumScaled(row, t.x[i*width:][:width], 1, y[int(rows[0])*width:][:width])
			} else {
				copy(row, y[int(rows[0])*width:])
			}
			for _, r := range rows[1:] {
				Axpy(row, 1, y[int(r)*width:][:width])
			}
		}
	})
}

// SwiGLU computes silu(gate)·up·weight of rows; see [xpu.Layers].
func (h *Host) SwiGLU(act, gateUp, weight xpu.Tensor) {
	xpu.CheckSwiGLU(act, gateUp, weight)
	x, halves := numbers(gateUp)
	h.split(act.Dim(0), operands{dst: act.Floats(), x: x, halves: halves, w: weight.Floats(), width: act.Dim(1)},
		func(t *task, _, lo, hi int) {
			buffer := t.host.buffers.Get()
			defer t.host.buffers.Put(buffer)
			for r := lo; r < hi; r++ {
				act, both := t.dst[r*t.width:][:t.width], row(t.x, t.halves, r, 2*t.width, buffer)
				SwiGLU(act, both[:t.width], both[t.width:])
				if len(t.w) > 0 {
					Scale(act, t.w[r])
				}
			}
		})
}

// SwiGLUGrad computes the gradients of [Host.SwiGLU]; see [xpu.Layers].
func (h *Host) SwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor) {
	xpu.CheckSwiGLUGrad(gateUp, act, dact, weight, dweight)
	x, halves := numbers(gateUp)
	h.split(act.Dim(0), operands{x: x, halves: halves, dst: act.Floats(), y: dact.Floats(), w: weight.Floats(),
		z: dweight.Floats(), width: act.Dim(1)}, func(t *task, _, lo, hi int) {
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		for r := lo; r < hi; r++ {
			act, dact := t.dst[r*t.width:][:t.width], t.y[r*t.width:][:t.width]
			both := row(t.x, t.halves, r, 2*t.width, buffer)
			gate, up := both[:t.width], both[t.width:]
			SwiGLU(act, gate, up)
			if len(t.w) > 0 {
				t.z[r] = Dot(act, dact)
				Scale(act, t.w[r])
				Scale(dact, t.w[r])
			}
			SwiGLUGrad(gate, up, gate, up, dact)
			if t.halves != nil {
				BF16(t.halves[r*2*t.width:][:2*t.width], both)
			}
		}
	})
}
