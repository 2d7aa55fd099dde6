package cpu

import "mula/xpu"

// clampGates sets the gates and ups of a row so that [SwiGLU] of them is the ClampedSwiGLU of the
// gates and ups in x: gate' = α·min(gate, limit), up' = (1 + clamp(up))/α. dst may be x.
func clampGates(dst, x []float32, c xpu.Clamp) {
	width := len(x) / 2
	for i, g := range x[:width] {
		dst[i] = c.Alpha * min(g, c.Limit)
	}
	for i, u := range x[width:] {
		dst[width+i] = (1 + max(-c.Limit, min(u, c.Limit))) / c.Alpha
	}
}

// ClampedSwiGLU computes SwiGLU with clamps; see [xpu.Layers].
func (h *Host) ClampedSwiGLU(act, gateUp, weight xpu.Tensor, c xpu.Clamp) {
	xpu.CheckClampedSwiGLU(act, gateUp, weight)
	x, halves := numbers(gateUp)
	h.split(act.Dim(0), operands{dst: act.Floats(), x: x, halves: halves, w: weight.Floats(), width: act.Dim(1),
		clamp: c}, func(t *task, _, lo, hi int) {
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		for r := lo; r < hi; r++ {
			act, both := t.dst[r*t.width:][:t.width], row(t.x, t.halves, r, 2*t.width, buffer)
			clamped := room(buffer, 2*t.width)
			clampGates(clamped, both, t.clamp)
			SwiGLU(act, clamped[:t.width], clamped[t.width:])
			if len(t.w) > 0 {
				Scale(act, t.w[r])
			}
		}
	})
}

// ClampedSwiGLUGrad computes the gradients of [Host.ClampedSwiGLU]; see [xpu.Layers].
func (h *Host) ClampedSwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor, c xpu.Clamp) {
	xpu.CheckClampedSwiGLUGrad(gateUp, act, dact, weight, dweight)
	x, halves := numbers(gateUp)
	h.split(act.Dim(0), operands{x: x, halves: halves, dst: act.Floats(), y: dact.Floats(), w: weight.Floats(),
		z: dweight.Floats(), width: act.Dim(1), clamp: c}, func(t *task, _, lo, hi int) {
		buffer, other := t.host.buffers.Get(), t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		defer t.host.buffers.Put(other)
		width := t.width
		for r := lo; r < hi; r++ {
			act, dact := t.dst[r*width:][:width], t.y[r*width:][:width]
			both := row(t.x, t.halves, r, 2*width, buffer)
			clamped := room(other, 2*width)
			clampGates(clamped, both, t.clamp)
			gate, up := clamped[:width], clamped[width:]
			SwiGLU(act, gate, up)
			if len(t.w) > 0 {
				t.z[r] = Dot(act, dact)
				Scale(act, t.w[r])
				Scale(dact, t.w[r])
			}
			SwiGLUGrad(gate, up, gate, up, dact)
			for i, g := range both[:width] {
				if both[i] = t.clamp.Alpha * gate[i]; g > t.clamp.Limit {
					both[i] = 0
				}
			}
			for i, u := range both[width:] {
				if both[width+i] = up[i] / t.clamp.Alpha; u > t.clamp.Limit || u < -t.clamp.Limit {
					both[width+i] = 0
				}
			}
			if t.halves != nil {
				BF16(t.halves[r*2*width:][:2*width], both)
			}
		}
	})
}
