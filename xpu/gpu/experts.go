package gpu

import "mula/xpu"

// GatherRows copies rows of x in the order of tokenOf; see [xpu.Layers].
func (d *Device) GatherRows(dst, x, tokenOf xpu.Tensor) {
	xpu.CheckGatherRows(dst, x, tokenOf)
	d.gatherRows(dst, x, tokenOf)
}

// gatherRows sets row r of dst to row numbers[r] of x.
func (d *Device) gatherRows(dst, x, numbers xpu.Tensor) {
	c := d.begin()
	defer c.end()
	c.launch("gather_rows", c.rows(dst.Dim(0)), c.writes(dst), typed(c.reads(x)), c.reads(numbers),
		integer(dst.Dim(1)))
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
	c.launch("swiglu", c.rows(act.Dim(0)), c.writes(act), c.reads(gateUp), c.reads(weight), integer(act.Dim(1)))
}

// SwiGLUGrad computes the gradients of [Device.SwiGLU]; see [xpu.Layers].
func (d *Device) SwiGLUGrad(gateUp, act, dact, weight, dweight xpu.Tensor) {
	xpu.CheckSwiGLUGrad(gateUp, act, dact, weight, dweight)
	c := d.begin()
	defer c.end()
	c.launch("swiglu_grad", c.rows(act.Dim(0)), c.writes(gateUp), c.writes(act), c.reads(dact), c.reads(weight),
		c.writes(dweight), integer(act.Dim(1)))
}
