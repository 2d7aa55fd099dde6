package gpu

import "mula/xpu"

// SplitHeads splits projections into heads; see [mula/xpu.Layers].
func (d *Device) SplitHeads(p xpu.Projections) {
	xpu.CheckSplitHeads(p)
	h := p.Heads()
	if h.Tokens() == 0 {
		return
	}
	qNorms, kNorms := p.Norms()
	c := d.begin()
	defer c.end()
	c.launch("split_heads", c.rows(h.Tokens()), c.writes(p.Q), c.writes(p.K), c.writes(p.V), typed(c.reads(p.QKV)),
		typed(c.reads(p.QWeight)), typed(c.reads(p.KWeight)),
		c.writes(p.RQ), c.writes(p.RK), c.reads(p.Cos), c.reads(p.Sin), integer(h.Length), integer(h.Heads),
		integer(h.KVHeads), integer(h.Size), integer(p.Turned()), flag(p.Interleaved),
		integer(p.First), integer(h.Capacity), integer(qNorms), integer(kNorms), number(p.Epsilon), flag(p.Known),
		number(p.Clip), number(p.QueryScale()))
}

// JoinHeads computes the gradients of projections from the gradients of heads.
func (d *Device) JoinHeads(p xpu.Projections, dqkv, dk, dv, dqWeight, dkWeight xpu.Tensor) {
	xpu.CheckJoinHeads(p, dqkv, dk, dv, dqWeight, dkWeight)
	h := p.Heads()
	tokens := h.Tokens()
	if tokens == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	each, parts := c.partialRows(tokens)
	queries, keys := p.QWeight.Elements(), p.KWeight.Elements()
	qNorms, kNorms := p.Norms()
	partial := c.take(max(1, parts*(queries+keys)))
	c.launch("join_heads", c.rows(parts), c.writes(dqkv), c.reads(dk), c.reads(dv), typed(c.reads(p.QKV)),
		typed(c.reads(p.QWeight)), typed(c.reads(p.KWeight)), c.reads(p.RQ), c.reads(p.RK), c.reads(p.Means),
		c.reads(p.Cos), c.reads(p.Sin), partial, integer(tokens), integer(each), integer(h.Length), integer(h.Heads),
		integer(h.KVHeads), integer(h.Size), integer(p.Turned()), flag(p.Interleaved), integer(qNorms),
		integer(kNorms), number(p.Clip), number(p.QueryScale()))
	if queries > 0 {
		c.addPartial(dqWeight, partial, parts, queries+keys)
	}
	if keys > 0 {
		c.addPartial(dkWeight, partial.plus(queries), parts, queries+keys)
	}
}

// SumHeads adds the columns of norms; see [mula/xpu.Layers].
func (d *Device) SumHeads(sums xpu.Tensor, p xpu.Projections, dqkv, dk xpu.Tensor) {
	xpu.CheckSumHeads(sums, p, dqkv, dk)
	h := p.Heads()
	tokens := h.Tokens()
	if tokens == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	c.launch("sum_heads", c.rows(tokens), c.writes(sums), typed(c.reads(p.QKV)), typed(c.reads(p.QWeight)),
		typed(c.reads(p.KWeight)), c.reads(p.RQ), c.reads(p.RK), c.reads(p.Cos), c.reads(p.Sin), c.reads(dqkv),
		c.reads(dk), integer(tokens), integer(h.Length), integer(h.Heads), integer(h.KVHeads), integer(h.Size),
		integer(p.Turned()), flag(p.Interleaved), number(p.Clip), number(p.QueryScale()))
}
