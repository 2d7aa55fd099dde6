package moe

import (
	"context"
	"fmt"

	"mula/xpu/comm"
	"mula/xpu/cpu"
)

// A directCourier sends a token to each rank that holds at least one of its experts, once per rank:
// [AllToAll]. S is the number of rows that it sends.
type directCourier struct {
	comm    *comm.Comm
	experts int // per rank

	counts         []int32   // [2, n] number of tokens to and from each rank
	sent, received []int     // [n+1] element offsets of the current exchange
	ones           []int     // [n+1] 0, 1, …, n
	sentRows       []float32 // [S, H] rows sent to the experts; [S, H+K] rows returned by them
	sentChoices    []int32   // [S, 2K]
}

func newDirectCourier(group *comm.Comm, experts int) *directCourier {
	n := group.Size()
	d := &directCourier{comm: group, experts: experts, counts: make([]int32, 2*n), ones: make([]int, n+1),
		sent: make([]int, n+1), received: make([]int, n+1)}
	for i := range d.ones {
		d.ones[i] = i
	}
	return d
}

func (*directCourier) begin(context.Context, int) error { return nil }

func (d *directCourier) address(ctx context.Context, c choices, way *ways, all *[]int32) error {
	n, k, tokens := d.comm.Size(), c.perToken, c.tokens()
	sends, receives := d.counts[:n], d.counts[n:]
	clear(sends)
	place := room(&way.place, tokens*n)
	for t := range tokens {
		row := place[t*n:][:n]
		for r := range row {
			row[r] = -1
		}
		for j, e := range c.chosen[t*k:][:k] {
			if r := int(e) / d.experts; row[r] < 0 && !c.drops(t*k+j) {
				row[r] = sends[r]
				sends[r]++
			}
		}
	}
	if err := comm.AllToAll(ctx, d.comm, sends, d.ones, receives, d.ones); err != nil {
		return err
	}
	for r := range n {
		if receives[r] < 0 {
			return fmt.Errorf("rank %d announces %d tokens; all ranks must run the same program", r, receives[r])
		}
		way.sent[r+1], way.received[r+1] = way.sent[r]+int(sends[r]), way.received[r]+int(receives[r])
	}
	room(&d.sentChoices, way.sent[n]*2*k)
	for t := range tokens {
		for r, at := range place[t*n:][:n] {
			if at >= 0 {
				at += int32(way.sent[r])
				place[t*n+r] = at
				c.encode(d.sentChoices[int(at)*2*k:][:2*k], t)
			}
		}
	}
	return comm.AllToAll(ctx, d.comm, d.sentChoices, scale(d.sent, way.sent, 2*k), room(all, way.received[n]*2*k),
		scale(d.received, way.received, 2*k))
}

func (d *directCourier) deliver(ctx context.Context, m *Model, way *ways, received, x []float32) error {
	n, h := d.comm.Size(), m.cfg.HiddenSize
	rows := room(&d.sentRows, way.sent[n]*h)
	m.split(len(x)/h, operands{dst: rows, x: x, ways: way}, func(m *Model, o *operands, _, lo, hi int) {
		h, n := m.cfg.HiddenSize, len(o.ways.sent)-1
		for t := lo; t < hi; t++ {
			for _, at := range o.ways.place[t*n:][:n] {
				if at >= 0 {
					copy(o.dst[int(at)*h:][:h], o.x[t*h:])
				}
			}
		}
	})
	return comm.AllToAll(ctx, d.comm, rows, scale(d.sent, way.sent, h), received, scale(d.received, way.received, h))
}

func (d *directCourier) giveBack(ctx context.Context, way *ways, rows []float32, width int) error {
	n := d.comm.Size()
	back := room(&d.sentRows, way.sent[n]*width)
	return comm.AllToAll(ctx, d.comm, rows, scale(d.received, way.received, width), back,
		scale(d.sent, way.sent, width))
}

func (d *directCourier) add(m *Model, way *ways, _ []float32, width int, dst, more []float32) {
	m.split(len(dst)/m.cfg.HiddenSize, operands{dst: dst, x: more, y: d.sentRows, ways: way, width: width},
		func(m *Model, o *operands, _, lo, hi int) {
			h, n := m.cfg.HiddenSize, len(o.ways.sent)-1
			for t := lo; t < hi; t++ {
				row, behind := o.dst[t*h:][:h], o.x[t*(o.width-h):][:o.width-h]
				clear(row)
				clear(behind)
				for _, at := range o.ways.place[t*n:][:n] {
					if at >= 0 {
						y := o.y[int(at)*o.width:][:o.width]
						cpu.Axpy(row, 1, y[:h])
						cpu.Axpy(behind, 1, y[h:])
					}
				}
			}
		})
}
