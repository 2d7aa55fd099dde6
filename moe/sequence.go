package moe

import (
	"context"
	"fmt"

	"mula/xpu"
	"mula/xpu/comm"
)

// Context parallelism: n ranks share each sequence. Rank j of the group [Parallel.Heads] has the
// inputs [j·S/n, (j+1)·S/n) of every row, and computes everything except the attention for these
// tokens.
//
// For the attention, h consecutive ranks exchange heads, where h is [Config.HeadRanks]. An
// all-to-all gives each of them an h-th of the heads for the queries of all h ranks
// (https://arxiv.org/abs/2309.14509). These queries are part r of the c = n/h parts of a row. If c
// > 1, they also need the keys and values of parts 0 to r, which the same all-to-all sends. So one
// rank has a query and all its keys, and the attention has the bits of one rank.
//
// In the backward pass, a second all-to-all returns the gradients. The gradient of a key is the sum
// over the parts that have read the key. The rank that has the token adds them in the order of the
// parts, so the sum does not depend on the transport. If c = 1, it has the bits of one rank.

// sequenceRanks returns the number of this rank in its group, and the size of the group.
func (p Parallel) sequenceRanks() (rank, ranks int) { return p.Sequence.Rank(), p.Sequence.Size() }

// HeadRanks returns how many of the cp ranks that share each sequence divide the attention heads
// among themselves: the largest divisor of cp that also divides the key and value heads of each of
// tp slices. The cp ranks divide the queries of a sequence into cp/HeadRanks parts.
func (c Config) HeadRanks(cp, tp int) int {
	h, rest := cp, c.KVHeads/tp
	for rest > 0 {
		h, rest = rest, h%rest
	}
	return h
}

// sequenceParts returns the number of parts of the queries of a sequence: cp/HeadRanks.
func (c Config) sequenceParts(cp, tp int) int { return cp / c.HeadRanks(cp, tp) }

// firstQuery returns the position of the first query of this rank's part of a row.
func (m *Model) firstQuery() int {
	p := m.ws.shape
	return m.parallel.Heads.Rank() / p.headRanks() * p.queries()
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

// wholeHeads are the operands of the attention on a rank that shares sequences: an h-th of the
// heads, for the queries of a part of a row. A' = A/h, G' = G/h, S' = S/c is the length of the
// part, and S is the length of a complete row. If h is 1, queries are not exchanged, and q, dctx
// and dqkv are absent.
type wholeHeads struct {
	q      xpu.Tensor // [rows, A', S', D]
	k, v   xpu.Tensor // [rows, G', S, D]
	dctx   xpu.Tensor // [rows·S', A'D]
	dqkv   xpu.Tensor // [rows·S', A'D+2G'D]; only the columns of queries are used
	dk, dv xpu.Tensor // like k
}

// cut allocates the buffers of a pass from a.
func (w *wholeHeads) cut(c Config, p passShape, a *arena) {
	*w = wholeHeads{}
	if p.contextRanks() == 1 {
		return
	}
	h, d := p.headRanks(), c.HeadDim()
	queries, keys := c.Heads/h, c.KVHeads/h
	likeKeys := func() xpu.Tensor { return a.f32(p.rows, keys, p.s*p.ranks, d) }
	if h > 1 {
		w.q = a.f32(p.rows, queries, p.queries(), d)
	}
	w.k, w.v = likeKeys(), likeKeys()
	if !p.train {
		return
	}
	if h > 1 {
		tokens := p.rows * p.queries()
		w.dctx, w.dqkv = a.f32(tokens, queries*d), a.f32(tokens, (queries+2*keys)*d)
	}
	w.dk, w.dv = likeKeys(), likeKeys()
}

// An exchanger moves the operands of the attention between the ranks that share sequences.
type exchanger struct {
	found          NonFinite
	send, recv     []float32
	sent, received []int        // bounds of each rank's elements in send and recv
	from, to       [3][]float32 // of each operand, if the device does not share memory with the host
}

// An operand of the attention, in both of its forms.
type operand struct {
	own   xpu.Tensor // all heads of this rank's tokens
	whole xpu.Tensor // this rank's heads, for the tokens of its attention

	// By token: [tokens, columns], and a token's heads are the first width columns of own.
	// Otherwise by head: [rows, heads, tokens, D].
	byToken bool
	width   int

	// whole has all positions of a row, of keys or values. The attention reads, and has gradients
	// of, the positions of its part and of the parts before it. Otherwise, whole has the positions
	// of its part.
	ofKeys bool
}

// A division has the number n of ranks that share sequences. Each h consecutive ranks divide heads.
type division struct{ n, h int }

// moves reports whether an operand has elements of the tokens of rank `owner` that rank `reader`
// needs for its attention.
func (d division) moves(o operand, owner, reader int) bool {
	if o.ofKeys {
		return owner/d.h <= reader/d.h
	}
	return owner/d.h == reader/d.h
}

// elements returns the number of these elements. A rank has s tokens of each row.
func (d division) elements(o operand, rows, s, owner, reader int) int {
	switch {
	case !d.moves(o, owner, reader):
		return 0
	case o.byToken:
		return rows * s * o.width / d.h
	}
	return o.own.Elements() / d.h
}

// blocks calls visit for each contiguous piece of these elements: its first element in own of the
// owner and in whole of the reader, and its length.
func (d division) blocks(o operand, rows, s, owner, reader int, visit func(own, whole, length int)) {
	if !d.moves(o, owner, reader) {
		return
	}
	number, at, ranks := reader%d.h, owner%d.h, d.h // of the heads; of the owner's tokens in whole
	if o.ofKeys {
		at, ranks = owner, d.n
	}
	if o.byToken {
		length, ownWidth, wholeWidth := o.width/d.h, o.own.Dim(1), o.whole.Dim(1)
		for row := range rows {
			for t := range s {
				visit((row*s+t)*ownWidth+number*length, ((row*ranks+at)*s+t)*wholeWidth, length)
			}
		}
		return
	}
	heads, size := o.own.Dim(1)/d.h, o.own.Dim(3)
	for row := range rows {
		for head := range heads {
			visit(((row*d.h+number)*heads+head)*s*size, ((row*heads+head)*ranks+at)*s*size, s*size)
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
// of all ranks that share the sequences. Several ranks may have elements of whole for the same
// element of own, which is then their sum in the order of the ranks. It waits for the device.
func (m *Model) exchangeHeads(ctx context.Context, toWhole bool, operands ...operand) error {
	e, rows, s := &m.exchanger, m.ws.shape.rows, m.ws.shape.s*m.ws.shape.tensor
	d := division{m.ws.shape.contextRanks(), m.ws.shape.headRanks()}
	rank := m.parallel.Heads.Rank()
	// roles returns the owner and the reader of the elements that one rank sends to another.
	roles := func(from, to int) (owner, reader int) { return ends(toWhole, from, to) }
	var from, to [3][]float32
	for i, o := range operands {
		source, destination := ends(toWhole, o.own, o.whole)
		var err error
		if from[i], err = xpu.Numbers(ctx, m.dev, source, &e.from[i]); err != nil {
			return fmt.Errorf("a pass over %d rows of %d tokens: %w", rows, s, err)
		}
		to[i] = xpu.HostBuffer(destination, &e.to[i])
	}
	sent, received := room(&e.sent, d.n+1), room(&e.received, d.n+1)
	sent[0], received[0] = 0, 0
	for other := range d.n {
		there, back := 0, 0
		for _, o := range operands {
			owner, reader := roles(rank, other)
			there += d.elements(o, rows, s, owner, reader)
			owner, reader = roles(other, rank)
			back += d.elements(o, rows, s, owner, reader)
		}
		sent[other+1], received[other+1] = sent[other]+there, received[other]+back
	}
	send, recv := room(&e.send, sent[d.n]), room(&e.recv, received[d.n])
	at := 0
	for other := range d.n {
		owner, reader := roles(rank, other)
		for i, o := range operands {
			d.blocks(o, rows, s, owner, reader, func(own, whole, length int) {
				first, _ := ends(toWhole, own, whole)
				copy(send[at:at+length], from[i][first:])
				at += length
			})
		}
	}
	e.found.Made = e.found.Made || !e.found.Received && !Finite(send)
	if err := comm.AllToAll(ctx, m.parallel.Heads, send, sent, recv, received); err != nil {
		return fmt.Errorf("exchanging attention heads with the ranks of the same sequences: %w", err)
	}
	e.found.Received = e.found.Received || !e.found.Made && !Finite(recv)
	at = 0
	for other := range d.n {
		owner, reader := roles(other, rank)
		add := !toWhole && owner/d.h != reader/d.h // to the gradients from this rank's part
		for i, o := range operands {
			d.blocks(o, rows, s, owner, reader, func(own, whole, length int) {
				_, first := ends(toWhole, own, whole)
				piece := to[i][first:][:length]
				if add {
					for j, v := range recv[at:][:length] {
						piece[j] += v
					}
				} else {
					copy(piece, recv[at:])
				}
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

// headsOfSequence gives this rank its heads of the tokens of its attention, from the projections of
// its own tokens.
func (m *Model) headsOfSequence(ctx context.Context, to kvTarget) error {
	w := &m.ws
	operands := []operand{ofKeys(to.k, w.heads.k), ofKeys(to.v, w.heads.v)}
	if w.shape.headRanks() > 1 {
		operands = append([]operand{{own: w.q, whole: w.heads.q}}, operands...)
	}
	return m.exchangeHeads(ctx, true, operands...)
}

// ofQueries is an operand that has all queries' elements of a token in one row.
func (m *Model) ofQueries(own, whole xpu.Tensor) operand {
	return operand{own: own, whole: whole, byToken: true, width: m.own.QueryWidth()}
}

// ofKeys is an operand of keys or values.
func ofKeys(own, whole xpu.Tensor) operand { return operand{own: own, whole: whole, ofKeys: true} }

// attendWholeGrad computes the gradients of queries, keys and values of this rank's tokens, like
// AttendGrad, from the gradient dctx of the attention's result. fresh is as in [Model.attendGrad].
func (m *Model) attendWholeGrad(ctx context.Context, l *layer, st *saved, dctx xpu.Tensor, fresh bool) error {
	w := &m.ws
	if !fresh {
		if err := m.headsOfSequence(ctx, w.ownKeys()); err != nil {
			return err
		}
	}
	dqkv := w.dqkv
	operands := []operand{ofKeys(w.dk, w.heads.dk), ofKeys(w.dv, w.heads.dv)}
	if w.shape.headRanks() > 1 {
		if err := m.exchangeHeads(ctx, true, m.ofQueries(dctx, w.heads.dctx)); err != nil {
			return err
		}
		dctx, dqkv = w.heads.dctx, w.heads.dqkv
		operands = append([]operand{m.ofQueries(w.dqkv, dqkv)}, operands...)
	}
	m.dev.AttendGrad(m.attention(l, st, w.ownKeys()), dctx, dqkv, w.heads.dk, w.heads.dv)
	m.sinksGrad(l, st, dctx)
	return m.exchangeHeads(ctx, false, operands...)
}
