package gpu

import "mula/xpu"

// GatherRows copies rows of x in the order of tokenOf; see [xpu.Layers].
func (d *Device) GatherRows(dst, x []float32, tokenOf []int32, width int) {
	xpu.CheckRows("GatherRows", dst, tokenOf, width)
	d.gatherRows(dst, x, tokenOf, width)
}

// gatherRows sets row r of dst to row numbers[r] of x.
func (d *Device) gatherRows(dst, x []float32, numbers []int32, width int) {
	c := d.begin()
	defer c.end()
	c.launch("gather_rows", c.rows(len(numbers)), c.writes(dst), c.reads(x), c.readsInts(numbers), integer(width))
}

// SumRows adds the rows of each token; see [xpu.Layers].
func (d *Device) SumRows(dst, x, y []float32, rowOf []int32, perToken, width int) {
	tokens := xpu.CheckSumRows(dst, x, rowOf, perToken, width)
	c := d.begin()
	defer c.end()
	c.launch("sum_rows", c.rows(tokens), c.writes(dst), c.reads(x), c.reads(y), c.readsInts(rowOf), integer(perToken),
		integer(width))
}

// SwiGLU computes silu(gate)·up·weight of rows; see [xpu.Layers].
func (d *Device) SwiGLU(act, gateUp, weight []float32, width int) {
	rows := xpu.CheckSwiGLU(act, gateUp, weight, width)
	c := d.begin()
	defer c.end()
	c.launch("swiglu", c.rows(rows), c.writes(act), c.reads(gateUp), c.reads(weight), integer(width))
}

// SwiGLUGrad computes the gradients of [Device.SwiGLU]; see [xpu.Layers].
func (d *Device) SwiGLUGrad(gateUp, act, dact, weight, dweight []float32, width int) {
	rows := xpu.CheckSwiGLUGrad(gateUp, act, dact, weight, dweight, width)
	c := d.begin()
	defer c.end()
	c.launch("swiglu_grad", c.rows(rows), c.writes(gateUp), c.writes(act), c.reads(dact), c.reads(weight),
		c.writes(dweight), integer(width))
}
