package cpu

import "mula/xpu"

// Embed looks up rows of a table; see [xpu.Layers].
func (h *Host) Embed(dst, table, ids xpu.Tensor) {
	xpu.CheckEmbed(dst, table, ids)
	if table.DType() != xpu.BFloat16 {
		h.gather(dst, table, ids)
		return
	}
	h.split(dst.Dim(0), operands{dst: dst.Floats(), halves: table.Halves(), ids: ids.Ints(), width: dst.Dim(1)},
		func(t *task, _, lo, hi int) {
			for i := lo; i < hi; i++ {
				Widen(t.dst[i*t.width:][:t.width], t.halves[int(t.ids[i])*t.width:][:t.width])
			}
		})
}

// GatherRows copies rows of x in the order of tokenOf; see [xpu.Layers].
func (h *Host) GatherRows(dst, x, tokenOf xpu.Tensor) {
	xpu.CheckRows("GatherRows", dst, x, tokenOf)
	h.gather(dst, x, tokenOf)
}

// gather sets row i of dst to row numbers[i] of x.
func (h *Host) gather(dst, x, numbers xpu.Tensor) {
	h.split(dst.Dim(0), operands{dst: dst.Floats(), x: x.Floats(), ids: numbers.Ints(), width: dst.Dim(1)},
		func(t *task, _, lo, hi int) {
			for i := lo; i < hi; i++ {
				copy(t.dst[i*t.width:][:t.width], t.x[int(t.ids[i])*t.width:])
			}
		})
}

// EmbedGrad is the gradient of [Host.Embed]. Workers divide the columns, because two tokens can
// have the same id.
func (h *Host) EmbedGrad(dtable, dx, ids xpu.Tensor, skip int32) {
	xpu.CheckRows("EmbedGrad", dx, dtable, ids)
	const stripe = 64
	width := dx.Dim(1)
	h.split((width+stripe-1)/stripe, operands{dst: dtable.Floats(), x: dx.Floats(), ids: ids.Ints(), width: width,
		skip: skip},
		func(t *task, _, lo, hi int) {
			width := t.width
			lo, hi = lo*stripe, min(width, hi*stripe)
			for i, id := range t.ids {
				if id != t.skip {
					at := int(id) * width
					Axpy(t.dst[at+lo:at+hi], 1, t.x[i*width+lo:i*width+hi])
				}
			}
		})
}
