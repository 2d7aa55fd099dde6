package gpu

import "mula/xpu"

// Normalize computes an RMSNorm or a LayerNorm; see [mula/xpu.Layers].
func (d *Device) Normalize(h, x xpu.Tensor, n xpu.Norm, known bool) {
	xpu.CheckNormalize(h, x, n)
	rows := x.Dim(0)
	if rows == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	to, halves := c.stores(h)
	c.launch("norm", c.rows(rows), to, c.reads(x), typed(c.reads(n.Weight)), c.writes(n.Mean), c.writes(n.RStd),
		integer(x.Dim(1)), number(n.Epsilon), flag(known), halves)
}

// NormGrad computes the gradient of a norm. It does not change dh.
func (d *Device) NormGrad(dx, dh, x xpu.Tensor, n xpu.Norm, dweight xpu.Tensor) {
	xpu.CheckNormGrad(dx, dh, x, n, dweight)
	rows, width := x.Dim(0), x.Dim(1)
	if rows == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	each, parts := c.partialRows(rows)
	partial := c.take(max(1, parts*n.Weight.Elements()))
	c.launch("norm_grad", c.rows(parts), c.writes(dx), c.reads(dh), c.reads(x), typed(c.reads(n.Weight)),
		c.reads(n.Mean), c.reads(n.RStd), partial, integer(width), integer(rows), integer(each))
	if n.Weight.Present() {
		c.addPartial(dweight, partial, parts, width)
	}
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
func (c *command) addPartial(dst xpu.Tensor, partial argument, rows, stride int) {
	const columns = 16
	c.launch("add_partial", c.rows(over(dst.Elements(), columns)), typed(c.writes(dst)), partial, integer(rows),
		integer(stride),
		integer(dst.Elements()))
}
