package moe

import (
	"context"
	"fmt"

	"mula/xpu"
	"mula/xpu/comm"
)

// Context parallelism: n ranks share each sequence. Rank j of the group [Parallel.Sequence] has the
// inputs [j·S/n, (j+1)·S/n) of every row, and computes everything except the attention for these
// tokens. For the attention, an all-to-all gives each rank all tokens of an n-th of the heads; a
// second one returns the results (https://arxiv.org/abs/2309.14509). The attention of a head
// therefore has the bits of one rank.

// sequenceRanks returns the number of this rank in its group, and the size of the group.
func (p Parallel) sequenceRanks() (rank, ranks int) { return p.Sequence.Rank(), p.Sequence.Size() }

// CheckSequenceRanks returns an error if the model's attention heads cannot be divided among n
// ranks that share sequences.
func (c Config) CheckSequenceRanks(n int) error {
	if c.KVHeads%n != 0 {
		return fmt.Errorf("%d ranks cannot divide num_key_value_heads %d equally", n, c.KVHeads)
	}
	return nil
}

// NonFinite describes the values that are not finite on a rank that shares sequences. Such values
// spread to the other ranks in the exchanges of heads and tokens.
type NonFinite struct {
	Made     bool // this rank has computed them from finite values, and sent them
	Received bool // this rank has received them, before it computed any
}

// NonFinite returns the findings of the exchanges since the caller has cleared them.
func (m *Model) NonFinite() *NonFinite { return &m.exchanger.found }

// Sequence returns the group of [Parallel]; it has one rank if this rank has complete rows.
func (m *Model) Sequence() *comm.Comm { return m.parallel.Sequence }

// Tensor returns the group of the ranks that share matrices, [comm.TP], and the group of the ranks
// that have the same slices of them, [comm.Slices].
func (m *Model) Tensor() (sharing, alike *comm.Comm) {
	return m.parallel.Mesh.Group(comm.TP), m.parallel.Mesh.Group(comm.Slices)
}

// ownInputs returns the part of a batch that this rank computes: its inputs of every row, with
// their targets. Begin still has the documents of the complete rows.
func (p Parallel) ownInputs(b Batch) Batch {
	rank, ranks := p.sequenceRanks()
	if ranks == 1 {
		return b
	}
	s := b.SequenceLength / ranks
	own := Batch{Rows: b.Rows, SequenceLength: s, Begin: b.Begin}
	for row := range b.Rows {
		own.Tokens = append(own.Tokens, b.Tokens[row*(b.SequenceLength+1)+rank*s:][:s+1]...)
		if len(b.Counted) > 0 {
			own.Counted = append(own.Counted, b.Counted[row*b.SequenceLength+rank*s:][:s]...)
		}
	}
	return own
}

// wholeHeads are the operands of the attention on a rank that shares sequences: an n-th of the
// heads, for all tokens. A' = A/n, G' = G/n, S' is the length of a complete row.
type wholeHeads struct {
	q      xpu.Tensor // [rows, A', S', D]
	k, v   xpu.Tensor // [rows, G', S', D]
	dctx   xpu.Tensor // [rows·S', A'D]
	dqkv   xpu.Tensor // [rows·S', A'D+2G'D]; only the columns of queries are used
	dk, dv xpu.Tensor // like k
}

// cut allocates the buffers of a pass from a.
func (w *wholeHeads) cut(c Config, p passShape, a *arena) {
	*w = wholeHeads{}
	n := p.headRanks()
	if n == 1 {
		return
	}
	d, length := c.HeadDim(), p.s*p.ranks
	queries, keys := c.Heads/n, c.KVHeads/n
	heads := func(n int) xpu.Tensor { return a.f32(p.rows, n, length, d) }
	w.q, w.k, w.v = heads(queries), heads(keys), heads(keys)
	if p.train {
		w.dctx, w.dqkv = a.f32(p.rows*length, queries*d), a.f32(p.rows*length, (queries+2*keys)*d)
		w.dk, w.dv = heads(keys), heads(keys)
	}
}

// An exchanger moves the operands of the attention between the ranks that share sequences.
type exchanger struct {
	found      NonFinite
	send, recv []float32
	bounds     []int
	from, to   [3][]float32 // of each operand, if the device does not share memory with the host
}

// An operand of the attention, in both of its forms.
type operand struct {
	own   xpu.Tensor // all heads of this rank's tokens
	whole xpu.Tensor // this rank's heads of all tokens

	// By token: [tokens, columns], and a token's heads are the first width columns of own.
	// Otherwise by head: [rows, heads, tokens, D].
	byToken bool
	width   int
}

// blocks calls visit for each contiguous piece that this rank exchanges with rank other of n: its
// first element in own and in whole, and its length. Both ranks visit the pieces in the same order
// if one uses the elements of own, and the other one the elements of whole.
func (o operand) blocks(rows, s, other, n int, visit func(own, whole, length int)) {
	if o.byToken {
		length, ownWidth, wholeWidth := o.width/n, o.own.Dim(1), o.whole.Dim(1)
		for row := range rows {
			for t := range s {
				visit((row*s+t)*ownWidth+other*length, (row*s*n+other*s+t)*wholeWidth, length)
			}
		}
		return
	}
	heads, d := o.own.Dim(1)/n, o.own.Dim(3)
	for row := range rows {
		for head := range heads {
			visit(((row*n+other)*heads+head)*s*d, ((row*heads+head)*n+other)*s*d, s*d)
		}
	}
}

// ends returns the source and the destination of an exchange, given the values of both forms.
func ends[T any](toWhole bool, own, whole T) (from, to T) {
	if toWhole {
		return own, whole
	}
	return whole, own
}

// exchangeHeads fills whole from own (toWhole) or own from whole, for each operand, with the data
// of all ranks that share the sequences. It waits for the device.
func (m *Model) exchangeHeads(ctx context.Context, toWhole bool, operands ...operand) error {
	group, e, rows, s := m.parallel.Heads, &m.exchanger, m.ws.shape.rows, m.ws.shape.s*m.ws.shape.tensor
	n := group.Size()
	var from, to [3][]float32
	total := 0
	for i, o := range operands {
		source, destination := ends(toWhole, o.own, o.whole)
		var err error
		if from[i], err = xpu.Numbers(ctx, m.dev, source, &e.from[i]); err != nil {
			return fmt.Errorf("a pass over %d rows of %d tokens: %w", rows, s, err)
		}
		to[i] = xpu.HostBuffer(destination, &e.to[i])
		if o.byToken {
			total += rows * s * o.width
		} else {
			total += o.own.Elements()
		}
	}
	send, recv, bounds := room(&e.send, total), room(&e.recv, total), room(&e.bounds, n+1)
	at := 0
	for other := range n {
		bounds[other] = at
		for i, o := range operands {
			o.blocks(rows, s, other, n, func(own, whole, length int) {
				first, _ := ends(toWhole, own, whole)
				copy(send[at:at+length], from[i][first:])
				at += length
			})
		}
	}
	bounds[n] = at
	e.found.Made = e.found.Made || !e.found.Received && !Finite(send)
	if err := comm.AllToAll(ctx, group, send, bounds, recv, bounds); err != nil {
		return fmt.Errorf("exchanging attention heads with the ranks of the same sequences: %w", err)
	}
	e.found.Received = e.found.Received || !e.found.Made && !Finite(recv)
	at = 0
	for other := range n {
		for i, o := range operands {
			o.blocks(rows, s, other, n, func(own, whole, length int) {
				_, first := ends(toWhole, own, whole)
				copy(to[i][first:][:length], recv[at:])
				at += length
			})
		}
	}
	for i, o := range operands {
		_, destination := ends(toWhole, o.own, o.whole)
		xpu.SetNumbers(m.dev, destination, to[i])
	}
	return nil
}

// headsOfSequence gives this rank its heads of all tokens, from the projections of its tokens.
func (m *Model) headsOfSequence(ctx context.Context, to kvTarget) error {
	w := &m.ws
	return m.exchangeHeads(ctx, true, operand{own: w.q, whole: w.heads.q}, operand{own: to.k, whole: w.heads.k},
		operand{own: to.v, whole: w.heads.v})
}

// ofQueries is an operand that has all queries' elements of a token in one row.
func (m *Model) ofQueries(own, whole xpu.Tensor) operand {
	return operand{own: own, whole: whole, byToken: true, width: m.own.QueryWidth()}
}

// attendWholeGrad computes the gradients of queries, keys and values of this rank's tokens, like
// AttendGrad, from the gradient dctx of the attention's result. fresh is as in [Model.attendGrad].
func (m *Model) attendWholeGrad(ctx context.Context, l *layer, st *saved, dctx xpu.Tensor, fresh bool) error {
	w := &m.ws
	if !fresh {
		if err := m.headsOfSequence(ctx, w.ownKeys()); err != nil {
			return err
		}
	}
	if err := m.exchangeHeads(ctx, true, m.ofQueries(dctx, w.heads.dctx)); err != nil {
		return err
	}
	m.dev.AttendGrad(m.attention(l, st, w.ownKeys()), w.heads.dctx, w.heads.dqkv, w.heads.dk, w.heads.dv)
	m.sinksGrad(l, st, w.heads.dctx)
	return m.exchangeHeads(ctx, false, m.ofQueries(w.dqkv, w.heads.dqkv), operand{own: w.dk, whole: w.heads.dk},
		operand{own: w.dv, whole: w.heads.dv})
}
