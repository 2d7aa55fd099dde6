package moe

import "mula/xpu"

// Attention sinks (https://arxiv.org/abs/2508.10925, section 2.2): each head of queries has one
// more score, a weight, which takes part in the softmax and has no value. So the weights of the
// values of a query may sum to less than 1. See [xpu.Layers.AddSinks].

// sinksName is the name of a layer's sinks in its attention.
const sinksName = "self_attn.sinks"

// ownSinks returns the sinks, or their gradients, of the heads whose attention this rank computes.
// Ranks that exchange heads have all of them.
func (m *Model) ownSinks(all xpu.Tensor) xpu.Tensor {
	n := m.ws.shape.headRanks()
	if n == 1 {
		return all
	}
	heads, rank := m.own.Heads/n, m.parallel.Heads.Rank()%n
	return all.Rows(rank*heads, (rank+1)*heads)
}

// sinksGrad adds to the gradients of a layer's sinks, given the gradient of the result of its
// attention on this rank.
func (m *Model) sinksGrad(l *layer, st *saved, dctx xpu.Tensor) {
	if l.sinks.g.Present() {
		m.dev.SinksGrad(m.attention(l, st, m.ws.ownKeys()), m.ownSinks(l.sinks.w), dctx, m.ownSinks(l.sinks.g))
	}
}

// noRow is the argument skip of EmbedGrad if no row of a table is skipped.
const noRow = -1

// row0 returns, for each token of this rank, the row of a table of one row.
func (m *Model) row0() xpu.Tensor { return m.ws.row0.Rows(0, m.ws.shape.tokens()) }
