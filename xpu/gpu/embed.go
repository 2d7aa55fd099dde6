package gpu

import "mula/xpu"

// Embed looks up rows of a table; see [xpu.Layers].
func (d *Device) Embed(dst, table, ids xpu.Tensor) {
	xpu.CheckEmbed(dst, table, ids)
	d.gatherRows(dst, table, ids)
}

// orderBlock is the number of tokens that order_tokens sorts together: BLOCK in embed.cl.
const orderBlock = 64

// EmbedGrad is the gradient of [Device.Embed]; see [xpu.Layers]. It sorts the tokens by their ids
// first: in blocks by comparing all tokens of a block, then by merging.
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
	c.launch("order_tokens", items(tokens), order, number, integer(tokens))
	for run := orderBlock; run < tokens; run *= 2 {
		c.launch("merge_tokens", items(tokens), ends, order, number, integer(tokens), integer(run))
		order, ends = ends, order
	}
	c.launch("end_tokens", items(tokens), ends, order, number, integer(tokens), integer(int(skip)))
	c.launch("embed_grad", groups(d.shape.group, tokens, over(width, columns), 1), typed(c.writes(dtable)),
		c.reads(dx), number, order, ends, integer(width), integer(columns))
}
