package cpu

import "mula/xpu"

// Embed looks up rows of a table; see [xpu.Layers].
func (h *Host) Embed(dst, table []float32, ids []int32, width int) {
	xpu.CheckRows("Embed", dst, ids, width)
	h.gather(dst, table, ids, width)
}

// GatherRows copies rows of x in the order of tokenOf; see [xpu.Layers].
func (h *Host) GatherRows(dst, x []float32, tokenOf []int32, width int) {
	xpu.CheckRows("GatherRows", dst, tokenOf, width)
	h.gather(dst, x, tokenOf, width)
}

// gather sets row i of dst to row numbers[i] of x.
func (h *Host) gather(dst, x []float32, numbers []int32, width int) {
	h.split(len(numbers), operands{dst: dst, x: x, ids: numbers, width: width}, func(t *task, _, lo, hi int) {
		for i := lo; i < hi; i++ {
			copy(t.dst[i*t.width:][:t.width], t.x[int(t.ids[i])*t.width:])
		}
	})
}

// EmbedGrad is the gradient of [Host.Embed]. Workers divide the columns, because two tokens can
// have the same id.
func (h *Host) EmbedGrad(dtable, dx []float32, ids []int32, width int, skip int32) {
	xpu.CheckRows("EmbedGrad", dx, ids, width)
	const stripe = 64
	h.split((width+stripe-1)/stripe, operands{dst: dtable, x: dx, ids: ids, width: width, skip: skip},
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
