package gpu

import "mula/xpu"

// Normalize computes an RMSNorm or a LayerNorm; see [mula/xpu.Layers].
func (d *Device) Normalize(h, x []float32, n xpu.Norm, known bool) {
	rows := xpu.CheckNormalize(h, x, n)
	if rows == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	c.launch("norm", c.rows(rows), c.writes(h), c.reads(x), c.reads(n.Weight), c.writes(n.Mean), c.writes(n.RStd),
		integer(n.Width), number(n.Epsilon),
		flag(known))
}

// NormGrad computes the gradient of a norm. It does not change dh.
func (d *Device) NormGrad(dx, dh, x []float32, n xpu.Norm, dweight []float32) {
	rows := xpu.CheckNormGrad(dx, dh, x, n, dweight)
	if rows == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	each, parts := c.partialRows(rows)
	partial := c.take(max(1, parts*len(n.Weight)))
	c.launch("norm_grad", c.rows(parts), c.writes(dx), c.reads(dh), c.reads(x), c.reads(n.Weight), c.reads(n.Mean),
		c.reads(n.RStd), partial,
		integer(n.Width), integer(rows), integer(each))
	c.addPartial(dweight[:len(n.Weight)], partial, parts, n.Width)
}

// partialRows divides rows into parts of `each` consecutive rows, whose sums are partial sums:
// enough parts to keep the device busy.
func (c *command) partialRows(rows int) (each, parts int) {
	most := 1024
	if c.d.shape.processor {
		most = 64
	}
	each = over(rows, most)
	return each, over(rows, each)
}

// addPartial adds the sum of the given number of rows of partial, stride elements apart, to dst.
func (c *command) addPartial(dst []float32, partial argument, rows, stride int) {
	const columns = 16
	c.launch("add_partial", c.rows(over(len(dst), columns)), c.writes(dst), partial, integer(rows), integer(stride),
		integer(len(dst)))
}
