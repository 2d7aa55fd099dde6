package gpu

import "mula/xpu"

// Embed looks up rows of a table; see [xpu.Layers].
func (d *Device) Embed(dst, table, ids xpu.Tensor) {
	xpu.CheckEmbed(dst, table, ids)
	d.gatherRows(dst, table, ids)
}

// EmbedGrad is the gradient of [Device.Embed]; see [xpu.Layers]. It sorts the tokens by their ids
// by comparing each token with all others: for 32,768 tokens a billion comparisons, a few tenths of
// a millisecond on a GPU.
func (d *Device) EmbedGrad(dtable, dx, ids xpu.Tensor, skip int32) {
	xpu.CheckEmbedGrad(dtable, dx, ids)
	tokens, width := dx.Dim(0), dx.Dim(1)
	if tokens == 0 {
		return
	}
	columns := d.shape.group // per part; with many parts, many groups work on a frequent token
	if d.shape.processor {
		columns = 256
	}
	c := d.begin()
	defer c.end()
	order, ends, number := c.take(tokens), c.take(tokens), c.reads(ids)
	c.launch("order_tokens", c.rows(tokens), order, ends, number, integer(tokens), integer(int(skip)))
	c.launch("embed_grad", groups(d.shape.group, tokens, over(width, columns), 1), c.writes(dtable), c.reads(dx),
		number, order, ends,
		integer(width), integer(columns))
}
