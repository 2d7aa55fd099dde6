package gpu

import "mula/xpu"

// GroupedBias adds biases to groups of rows; see [xpu.Layers].
func (d *Device) GroupedBias(x, bias, weight, counts xpu.Tensor) {
	xpu.CheckGroupedBias(x, bias, weight, counts)
	c := d.begin()
	defer c.end()
	c.launch("grouped_bias", c.rows(x.Dim(0)), typed(c.writes(x)), typed(c.reads(bias)), c.reads(weight),
		c.startsOf(counts, x.Dim(0)), integer(counts.Dim(0)), integer(x.Dim(1)))
}

// GroupedBiasGrad computes the gradients of [Device.GroupedBias]; see [xpu.Layers].
func (d *Device) GroupedBiasGrad(dbias, dy, bias, weight, dweight, counts xpu.Tensor) {
	xpu.CheckGroupedBiasGrad(dbias, dy, bias, weight, dweight, counts)
	rows, width := dy.Dim(0), dy.Dim(1)
	if rows == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	starts, columns := c.startsOf(counts, rows), d.shape.group
	if d.shape.processor {
		columns = 256
	}
	c.launch("grouped_bias_grad", groups(d.shape.group, counts.Dim(0), over(width, columns), 1),
		typed(c.writes(dbias)), typed(c.reads(dy)), c.reads(weight), starts, integer(width), integer(columns))
	if weight.Present() {
		c.launch("grouped_bias_weights", c.rows(rows), c.writes(dweight), typed(c.reads(dy)), typed(c.reads(bias)),
			starts, integer(counts.Dim(0)), integer(width))
	}
}
