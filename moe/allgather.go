package moe

import (
	"context"
	"fmt"

	"mula/xpu/comm"
)

// A gatherCourier sends all tokens to all ranks: [AllGather].
type gatherCourier struct {
	comm   *comm.Comm
	counts []int32 // [n] tokens of each rank
	ones   []int   // [n+1] 0, 1, …, n
	tokens []int   // [n+1] offsets into all tokens of the pass: rank r's tokens start at tokens[r]
	bounds []int   // [n+1] element offsets of the current exchange
}

func newGatherCourier(group *comm.Comm) *gatherCourier {
	n := group.Size()
	g := &gatherCourier{comm: group, counts: make([]int32, n), ones: make([]int, n+1), tokens: make([]int, n+1),
		bounds: make([]int, n+1)}
	for i := range g.ones {
		g.ones[i] = i
	}
	return g
}

func (g *gatherCourier) begin(ctx context.Context, tokens int) error {
	g.counts[g.comm.Rank()] = int32(tokens)
	if err := comm.AllGather(ctx, g.comm, g.counts, g.ones); err != nil {
		return fmt.Errorf("exchanging token counts: %w", err)
	}
	for r, n := range g.counts {
		if n < 0 {
			return fmt.Errorf("rank %d announces %d tokens; all ranks must run the same program", r, n)
		}
		g.tokens[r+1] = g.tokens[r] + int(n)
	}
	return nil
}

func (g *gatherCourier) address(ctx context.Context, c choices, way *ways, sent *[]int32) error {
	copy(way.received, g.tokens)
	k, first := c.perToken, way.received[g.comm.Rank()]
	all := room(sent, way.tokens()*2*k)
	for t := range c.tokens() {
		c.encode(all[(first+t)*2*k:][:2*k], t)
	}
	return comm.AllGather(ctx, g.comm, all, scale(g.bounds, way.received, 2*k))
}

func (g *gatherCourier) deliver(ctx context.Context, m *Model, way *ways, received, x []float32) error {
	h := m.cfg.HiddenSize
	m.split(len(x)/h, operands{dst: received[way.received[g.comm.Rank()]*h:], x: x}, func(m *Model, o *operands, _, lo,
		hi int) {
		h := m.cfg.HiddenSize
		copy(o.dst[lo*h:hi*h], o.x[lo*h:hi*h])
	})
	return comm.AllGather(ctx, g.comm, received, scale(g.bounds, way.received, h))
}

func (g *gatherCourier) giveBack(ctx context.Context, way *ways, rows []float32, width int) error {
	return comm.ReduceScatter(ctx, g.comm, rows, scale(g.bounds, way.received, width))
}

func (g *gatherCourier) add(m *Model, way *ways, rows []float32, width int, dst, more []float32) {
	own := rows[way.received[g.comm.Rank()]*width:]
	m.split(len(dst)/m.cfg.HiddenSize, operands{dst: dst, x: more, y: own, width: width}, func(m *Model, o *operands, _,
		lo, hi int) {
		h := m.cfg.HiddenSize
		for t := lo; t < hi; t++ {
			row := o.y[t*o.width:][:o.width]
			copy(o.dst[t*h:][:h], row)
			copy(o.x[t*(o.width-h):][:o.width-h], row[h:])
		}
	})
}
