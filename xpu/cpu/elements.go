package cpu

import "mula/xpu"

// leastElements is the minimum number of elements per worker in a loop that only moves or adds
// memory.
const leastElements = 1 << 14

// Zero sets x to zero.
func (h *Host) Zero(x xpu.Tensor) {
	xpu.CheckZeroed(x)
	if x.DType() == xpu.BFloat16 {
		h.elements(operands{dstHalves: x.Halves()}, func(t *task, _, lo, hi int) { clear(t.dstHalves[lo:hi]) })
		return
	}
	h.elements(operands{dst: x.Floats()}, func(t *task, _, lo, hi int) { clear(t.dst[lo:hi]) })
}

// Copy sets dst to x.
func (h *Host) Copy(dst, x xpu.Tensor) {
	xpu.CheckCopied(dst, x)
	half := xpu.BFloat16
	switch {
	case dst.DType() == half && x.DType() == half:
		h.elements(operands{dstHalves: dst.Halves(), halves: x.Halves()}, func(t *task, _, lo, hi int) {
			copy(t.dstHalves[lo:hi], t.halves[lo:hi])
		})
	case dst.DType() == half:
		h.elements(operands{dstHalves: dst.Halves(), x: x.Floats()}, func(t *task, _, lo, hi int) {
			BF16(t.dstHalves[lo:hi], t.x[lo:hi])
		})
	case x.DType() == half:
		h.elements(operands{dst: dst.Floats(), halves: x.Halves()}, func(t *task, _, lo, hi int) {
			Widen(t.dst[lo:hi], t.halves[lo:hi])
		})
	default:
		h.elements(operands{dst: dst.Floats(), x: x.Floats()}, func(t *task, _, lo, hi int) {
			copy(t.dst[lo:hi], t.x[lo:hi])
		})
	}
}

// Add sets dst to x + y; dst may be x.
func (h *Host) Add(dst, x, y xpu.Tensor) {
	xpu.CheckAdded(dst, x, y)
	h.elements(operands{dst: dst.Floats(), x: x.Floats(), y: y.Floats()}, func(t *task, _, lo, hi int) {
		AddScaled(t.dst[lo:hi], t.x[lo:hi], 1,
			t.y[lo:hi])
	})
}

// elements runs a command that is one loop over the elements of its result.
func (h *Host) elements(o operands, body func(t *task, part, lo, hi int)) {
	n := max(len(o.dst), len(o.dstHalves))
	t := h.begin(o)
	t.cut(n, min(parts, (n+leastElements-1)/leastElements), body)
	t.end()
}
