package gpu

import "mula/xpu"

// Embed looks up rows of a table; see [xpu.Layers].
func (d *Device) Embed(dst, table []float32, ids []int32, width int) {
	xpu.CheckRows("Embed", dst, ids, width)
	d.gatherRows(dst, table, ids, width)
}

// EmbedGrad is the gradient of [Device.Embed]; see [xpu.Layers]. It sorts the tokens by their ids
// by comparing each token with all others: for 32,768 tokens a billion comparisons, a few tenths of
// a millisecond on a GPU.
func (d *Device) EmbedGrad(dtable, dx []float32, ids []int32, width int, skip int32) {
	xpu.CheckRows("EmbedGrad", dx, ids, width)
	tokens := len(ids)
	if tokens == 0 {
		return
	}
	columns := d.shape.group // per part; with many parts, many groups work on a frequent token
	if d.shape.processor {
		columns = 256
	}
	c := d.begin()
	defer c.end()
	order, ends, number := c.take(tokens), c.take(tokens), c.readsInts(ids)
	c.launch("order_tokens", c.rows(tokens), order, ends, number, integer(tokens), integer(int(skip)))
	c.launch("embed_grad", groups(d.shape.group, tokens, over(width, columns), 1), c.writes(dtable), c.reads(dx),
		number, order, ends,
		integer(width), integer(columns))
}
