package gpu

import "mula/xpu"

// AddSinks adds sinks to an attention; see [xpu.Layers].
func (d *Device) AddSinks(a xpu.Attention, sinks xpu.Tensor) {
	xpu.CheckAddSinks(a, sinks)
	h := a.Heads()
	tokens := h.Tokens()
	if tokens == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	factors := c.take(tokens * h.Heads)
	c.launch("sink_factors", items(tokens*h.Heads), c.writes(a.LSE), factors, c.wide(sinks), integer(tokens),
		integer(h.Heads), integer(h.Length))
	c.launch("scale_heads", c.rows(tokens), typed(c.writes(a.Context)), factors, integer(h.Heads), integer(h.Size))
}

// SinksGrad computes the gradient of sinks; see [xpu.Layers]. First it computes the terms of all
// tokens, so that few heads are no limit.
func (d *Device) SinksGrad(a xpu.Attention, sinks, dcontext, dsinks xpu.Tensor) {
	xpu.CheckSinksGrad(a, sinks, dcontext, dsinks)
	h := a.Heads()
	tokens := h.Tokens()
	if tokens == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	terms := c.take(tokens * h.Heads)
	c.launch("sink_terms", groups(d.shape.group, tokens, h.Heads, 1), terms, typed(c.reads(a.Context)),
		c.reads(dcontext), c.reads(a.LSE), c.wide(sinks), integer(h.Heads), integer(h.Length), integer(h.Size))
	c.launch("sinks_grad", c.rows(h.Heads), typed(c.writes(dsinks)), terms, integer(tokens))
}
