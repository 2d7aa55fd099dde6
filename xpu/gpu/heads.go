package gpu

import (
	"math"

	"mula/xpu"
)

// SplitHeads splits projections into heads; see [mula/xpu.Layers].
func (d *Device) SplitHeads(p xpu.Projections) {
	xpu.CheckSplitHeads(p)
	if p.Rows*p.Length == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	c.launch("split_heads", c.rows(p.Rows*p.Length), c.writes(p.Q), c.writes(p.K), c.writes(p.V), c.reads(p.QKV),
		c.reads(p.QWeight), c.reads(p.KWeight),
		c.writes(p.RQ), c.writes(p.RK), c.reads(p.Cos), c.reads(p.Sin), integer(p.Length), integer(p.Heads.Heads),
		integer(p.KVHeads), integer(p.Size),
		integer(p.First), integer(p.Capacity), number(p.Epsilon), flag(p.Known), number(p.Clip), queryScale(p.Size))
}

// queryScale returns the factor of queries.
func queryScale(size int) argument { return number(1 / math.Sqrt(float64(size))) }

// JoinHeads computes the gradients of projections from the gradients of heads.
func (d *Device) JoinHeads(p xpu.Projections, dqkv, dk, dv, dqWeight, dkWeight []float32) {
	xpu.CheckJoinHeads(p, dqkv, dk, dv, dqWeight, dkWeight)
	tokens := p.Rows * p.Length
	if tokens == 0 {
		return
	}
	c := d.begin()
	defer c.end()
	each, parts := c.partialRows(tokens)
	queries, keys := len(p.QWeight), len(p.KWeight)
	partial := c.take(max(1, parts*(queries+keys)))
	c.launch("join_heads", c.rows(parts), c.writes(dqkv), c.reads(dk), c.reads(dv), c.reads(p.QKV), c.reads(p.QWeight),
		c.reads(p.KWeight),
		c.reads(p.RQ), c.reads(p.RK), c.reads(p.Cos), c.reads(p.Sin), partial, integer(tokens), integer(each),
		integer(p.Length), integer(p.Heads.Heads),
		integer(p.KVHeads), integer(p.Size), number(p.Clip), queryScale(p.Size))
	c.addPartial(dqWeight[:queries], partial, parts, queries+keys)
	c.addPartial(dkWeight[:keys], partial.plus(queries), parts, queries+keys)
}
