package cpu

import (
	"cmp"
	"slices"

	"mula/xpu"
)

// Embed looks up rows of a table; see [xpu.Layers].
func (h *Host) Embed(dst, table, ids xpu.Tensor) {
	xpu.CheckEmbed(dst, table, ids)
	switch {
	case dst.DType() == xpu.BFloat16:
		x, halves := numbers(table)
		h.split(dst.Dim(0), operands{dstHalves: dst.Halves(), x: x, halves: halves, ids: ids.Ints(),
			width: dst.Dim(1)}, func(t *task, _, lo, hi int) {
			buffer := t.host.buffers.Get()
			defer t.host.buffers.Put(buffer)
			for i := lo; i < hi; i++ {
				BF16(t.dstHalves[i*t.width:][:t.width], row(t.x, t.halves, int(t.ids[i]), t.width, buffer))
			}
		})
		return
	case table.DType() != xpu.BFloat16:
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
	xpu.CheckGatherRows(dst, x, tokenOf)
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

// stripe is the number of columns that a worker adds at a time in EmbedGrad.
const stripe = 64

// EmbedGrad is the gradient of [Host.Embed]. Workers divide the columns, because two tokens can
// have the same id.
func (h *Host) EmbedGrad(dtable, dx, ids xpu.Tensor, skip int32) {
	xpu.CheckEmbedGrad(dtable, dx, ids)
	width := dx.Dim(1)
	if dtable.DType() == xpu.BFloat16 {
		h.embedGradHalves(dtable.Halves(), dx.Floats(), ids.Ints(), width, skip)
		return
	}
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

// embedGradHalves is EmbedGrad for a dtable of BFloat16.
func (h *Host) embedGradHalves(dtable []uint16, dx []float32, ids []int32, width int, skip int32) {
	t := h.begin(operands{dstHalves: dtable, x: dx, ids: ids, width: width, skip: skip})
	defer t.end()
	order := room(&t.order, len(ids)) // tokens by id
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int { return cmp.Or(cmp.Compare(ids[a], ids[b]), cmp.Compare(a, b)) })
	t.split((width+stripe-1)/stripe, func(t *task, _, lo, hi int) {
		for lo, end := lo*stripe, min(t.width, hi*stripe); lo < end; lo += stripe {
			var memory [stripe]float32
			sum := memory[:min(stripe, end-lo)]
			for i, token := range t.order {
				id := t.ids[token]
				if id == t.skip {
					continue
				}
				Axpy(sum, 1, t.x[int(token)*t.width+lo:][:len(sum)])
				if i+1 == len(t.order) || t.ids[t.order[i+1]] != id {
					addHalves(t.dstHalves[int(id)*t.width+lo:][:len(sum)], sum)
					clear(sum)
				}
			}
		}
	})
}
