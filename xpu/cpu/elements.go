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
		sumScaled(t.dst[lo:hi], t.x[lo:hi], 1,
			t.y[lo:hi])
	})
}

// Combine combines matrices; see [xpu.Layers].
func (h *Host) Combine(dst, x, y xpu.Tensor, a, b, c float32) {
	xpu.CheckCombined(dst, x, y, c)
	o := operands{dst: dst.Floats(), x: x.Floats(), factors: [3]float32{a, b, c}, width: dst.Dim(1)}
	if y.Present() {
		o.y = y.Floats()
	}
	h.elements(o, func(t *task, _, lo, hi int) {
		dst := t.dst[lo:hi]
		copy(dst, t.x[lo:hi])
		Scale(dst, t.factors[0])
		if len(t.y) > 0 {
			Axpy(dst, t.factors[1], t.y[lo:hi])
		}
		if c := t.factors[2]; c != 0 {
			next := t.width + 1
			for i := (lo + next - 1) / next * next; i < hi; i += next {
				t.dst[i] += c
			}
		}
	})
}

// elements runs a command that is one loop over the elements of its result.
func (h *Host) elements(o operands, body func(t *task, part, lo, hi int)) {
	n := max(len(o.dst), len(o.dstHalves))
	t := h.begin(o)
	t.cut(n, min(parts, (n+leastElements-1)/leastElements), body)
	t.end()
}
