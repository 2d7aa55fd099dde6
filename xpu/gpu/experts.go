package gpu

import "mula/xpu"

// GatherRows copies rows of x in the order of tokenOf; see [xpu.Layers].
func (d *Device) GatherRows(dst, x, tokenOf xpu.Tensor) {
	xpu.CheckGatherRows(dst, x, tokenOf)
	d.gatherRows(dst, x, tokenOf)
}

// gatherRows sets row r of dst to row numbers[r] of x. A dst that is an operand may have the rows
// of another operand.
func (d *Device) gatherRows(dst, x, numbers xpu.Tensor) {
	c := d.begin()
	defer c.end()
	from := operand{c.absent(), 1, x.Dim(1)}
	if dst.IsOperand() {
		from = c.operand(x, 1, x.Dim(1), false)
	} else {
		from.memory = c.reads(x)
	}
	to, halves := c.stores(dst)
	c.launch("gather_rows", c.rows(dst.Dim(0)), typed(to), typed(from.memory), c.reads(numbers), integer(dst.Dim(1)),
		integer(from.index), halves)
}

// SumRows adds the rows of each token; see [xpu.Layers].
func (d *Device) SumRows(dst, x, y, rowOf xpu.Tensor) {
	xpu.CheckSumRows(dst, x, y, rowOf)
	c := d.begin()
	defer c.end()
	c.launch("sum_rows", c.rows(dst.Dim(0)), c.writes(dst), c.reads(x), c.reads(y), c.reads(rowOf),
		integer(rowOf.Dim(1)), integer(dst.Dim(1)))
}

// SwiGLU computes silu(gate)·up·weight of rows; see [xpu.Layers].
func (d *Device) SwiGLU(act, gateUp, weight xpu.Tensor) {
	xpu.CheckSwiGLU(act, gateUp, weight)
	c := d.begin()
	defer c.end()
	to, halves := c.stores(act)
	c.launch("swiglu", c.rows(act.Dim(0)), to, typed(c.reads(gateUp)), c.reads(weight),
		integer(act.Dim(1)), halves)
}

// SwiGLUGrad computes the gradients of [Device.SwiGLU]; see [xpu.Layers].
func (d *Device) SwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor) {
	xpu.CheckSwiGLUGrad(gateUp, act, dact, weight, dweight)
	width := act.Dim(1)
	c := d.begin()
	defer c.end()
	var grad, again argument
	halves, halved, gates := flag(false), flag(false), local(1)
	half := gateUp.DType() == xpu.BFloat16
	if gateUp.IsOperand() && act.IsOperand() && d.keepsOperands() && (half || 8*int64(width) <= d.device.LocalMemory) {
		if !half {
			gates = local(width)
		}
		grad, halved = c.stores(gateUp)
		again, halves = c.stores(act)
	} else {
		grad, again = c.writes(gateUp), c.writes(act)
	}
	c.launch("swiglu_grad", c.rows(act.Dim(0)), typed(grad), again, c.reads(dact), c.reads(weight), c.writes(dweight),
		integer(width), halves, halved, gates)
}
