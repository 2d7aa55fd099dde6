package moe

import (
	"context"

	"mula/xpu"
)

// A kvTarget is the destination of a pass's keys and values, from index first on.
type kvTarget struct {
	k, v     xpu.Tensor  // [rows, G, capacity, D]
	first    int         // index of the pass's first token in k and v
	position int         // its position in the sequence
	cache    *layerCache // of generation; nil in other passes
}

// seen returns the number of earlier tokens that the first token attends to, if there is no Begin.
func (to kvTarget) seen() int { return min(to.position, to.k.Dim(2)-1) }

// firstKeys are the first keys that the queries of a pass attend to.
type firstKeys struct {
	// [rows, S'] Batch.Begin of the queries of this rank's attention; absent if attention is not
	// restricted to documents
	documents xpu.Tensor
	windows   xpu.Tensor // [rows, S'] the same in layers with a window; absent without windows
}

// cut allocates the buffers of a pass from a.
func (k *firstKeys) cut(c Config, p passShape, a *arena) {
	*k = firstKeys{}
	if p.documents {
		k.documents = a.i32(p.rows, p.queries())
	}
	if c.SlidingWindow > 0 {
		k.windows = a.i32(p.rows, p.queries())
	}
}

// writeFirstKeys fills the buffers of the current flight, whose tokens start at position 0.
func (m *Model) writeFirstKeys() {
	w := &m.ws
	before, queries, length := m.firstQuery(), w.shape.queries(), w.shape.s*w.shape.ranks
	// document returns the first key of the document of query i.
	document := func(i int) int32 { return w.batch.Begin[i/queries*length+before+i%queries] }
	if w.keys.documents.Present() {
		begins := room(&w.ints, w.keys.documents.Elements())
		for i := range begins {
			begins[i] = document(i)
		}
		m.dev.WriteInts(w.keys.documents, begins)
	}
	if w.keys.windows.Present() {
		begins := room(&w.ints, w.keys.windows.Elements())
		for i := range begins {
			begins[i] = int32(max(0, before+i%queries-m.cfg.SlidingWindow+1))
			if w.shape.documents {
				begins[i] = max(begins[i], document(i))
			}
		}
		m.dev.WriteInts(w.keys.windows, begins)
	}
}

// ownKeys is the destination for a pass that starts at position 0.
func (w *workspace) ownKeys() kvTarget { return kvTarget{k: w.k, v: w.v} }

// projections returns a layer's q, k and v projections with the heads computed from them. known
// means that RQ and RK were computed before and are read, not written.
func (m *Model) projections(l *layer, st *saved, to kvTarget, known bool) xpu.Projections {
	cos, sin := m.positions(l, to)
	return xpu.Projections{QKV: st.qkv, QWeight: l.qNorm.w, KWeight: l.kNorm.w, Epsilon: m.cfg.NormEps, RQ: st.rq,
		RK: st.rk, Known: known, Clip: m.cfg.ClipQKV, Cos: cos, Sin: sin,
		Interleaved: m.cfg.family().interleaved, Scale: m.cfg.AttentionMultiplier, First: to.first, Q: m.ws.q,
		K: to.k, V: to.v}
}

// positions returns the rotations of a layer, from the position of index 0 of a target on: this
// rank's first position, or a later one in a cache.
func (m *Model) positions(l *layer, to kvTarget) (cos, sin xpu.Tensor) {
	rope := m.rotations(l)
	first := to.position - to.first
	if m.ws.shape.contextRanks() > 1 {
		first += m.parallel.Heads.Rank() * m.ws.shape.s * m.ws.shape.tensor
	}
	return rope.cos.Rows(first, rope.cos.Dim(0)), rope.sin.Rows(first, rope.sin.Dim(0))
}

// context returns the result of the attention of a layer's tokens: of all heads, padded in a latent
// attention.
func (m *Model) context(st *saved) xpu.Tensor {
	if m.cfg.latent() {
		return m.ws.latent.wide
	}
	return st.ctx
}

// attention returns the attention operands of a layer.
func (m *Model) attention(l *layer, st *saved, to kvTarget) xpu.Attention {
	begin := m.ws.keys.documents
	if l.window > 0 {
		begin = m.ws.keys.windows
	}
	if to.position > 0 { // all keys of the cache
		begin = xpu.Tensor{}
	}
	a := xpu.Attention{Q: m.ws.q, K: to.k, V: to.v, First: to.seen(), Begin: begin, Context: m.context(st),
		LSE: st.lse}
	if m.ws.shape.contextRanks() > 1 {
		a.K, a.V, a.First = m.ws.heads.k, m.ws.heads.v, m.firstQuery()
	}
	if m.ws.shape.headRanks() > 1 {
		a.Q, a.Context = m.ws.heads.q, st.wholeCtx
	}
	return a
}

// accumulate adds a product to its result.
var accumulate = xpu.MatMulOptions{Accumulate: true}

// attend computes x1 from x0: it adds the attention of a layer, with its norm.
func (m *Model) attend(ctx context.Context, l *layer, st *saved, to kvTarget) error {
	w := &m.ws
	m.blockInput(m.projected(), st.x0, m.norm1(l, st), false)
	if m.cfg.latent() {
		if err := m.projectLatent(ctx, l, st); err != nil {
			return err
		}
		if to.position > 0 {
			m.attendLatents(l, st, to)
			return m.addAttention(ctx, l, st)
		}
		m.splitLatent(l, st, to, false)
	} else if err := m.project(ctx, l, st, to); err != nil {
		return err
	}
	if w.shape.contextRanks() > 1 {
		if err := m.headsOfSequence(ctx, to); err != nil {
			return err
		}
	}
	m.dev.Attend(m.attention(l, st, to))
	if l.sinks.w.Present() {
		m.dev.AddSinks(m.attention(l, st, to), m.ownSinks(l.sinks.w))
	}
	if w.shape.headRanks() > 1 {
		if err := m.exchangeHeads(ctx, false, m.ofQueries(m.context(st), st.wholeCtx)); err != nil {
			return err
		}
	}
	if m.cfg.latent() {
		m.narrowContext(st)
	}
	m.keepPrompt(l, to)
	return m.addAttention(ctx, l, st)
}

// addAttention computes x1 from x0 and the result of the attention.
func (m *Model) addAttention(ctx context.Context, l *layer, st *saved) error {
	if y := m.blockOutput(st.y1); y.Present() {
		biased := l.outBias.w.Present()
		if biased {
			m.dev.Embed(y, l.outBias.w.Reshape(1, m.cfg.HiddenSize), m.row0())
		}
		if err := m.blockProduct(ctx, y, st.ctx, l.out.w.T(), xpu.MatMulOptions{Accumulate: biased}); err != nil {
			return err
		}
		m.addBlock(st.x1, st.x0, y, m.norm1(l, st))
		return nil
	}
	if l.outBias.w.Present() {
		m.dev.Embed(st.x1, l.outBias.w.Reshape(1, m.cfg.HiddenSize), m.row0())
		m.dev.Add(st.x1, st.x1, st.x0)
	} else {
		m.dev.Copy(st.x1, st.x0)
	}
	return m.blockProduct(ctx, st.x1, st.ctx, l.out.w.T(), accumulate)
}

// attendGrad turns the gradient of x1 in ws.dx into the gradient of x0, and adds to the gradients
// of the layer's weights. fresh means that the layer was the last to run attend, so that its
// queries, keys and values are still in the workspace.
func (m *Model) attendGrad(ctx context.Context, l *layer, st *saved, fresh bool) error {
	w := &m.ws

	// Through the output projection.
	dy := m.blockOutputGrad(st.y1, m.norm1(l, st), l.norm1.g)
	if l.outBias.g.Present() {
		m.dev.EmbedGrad(l.outBias.g.Reshape(1, m.cfg.HiddenSize), dy, m.row0(), noRow)
	}
	dy, err := m.tokensOfAll(ctx, dy, w.all.y)
	if err != nil {
		return err
	}
	m.dev.MatMul(w.dctx, dy, l.out.w, xpu.MatMulOptions{})
	m.dev.MatMul(l.out.g, dy.T(), st.ctx, m.toGradients)

	// Through the attention.
	dctx, latent := w.dctx, m.cfg.latent()
	if latent {
		m.widenContext(st)
		dctx = w.latent.dwide
	}
	held := fresh && !l.hasNetwork() // otherwise the network has gathered its own inputs since
	switch {
	case fresh:
	case latent:
		var err error
		if held, err = m.restoreLatent(ctx, l, st); err != nil {
			return err
		}
	default:
		m.dev.SplitHeads(m.projections(l, st, w.ownKeys(), true))
	}
	if w.shape.contextRanks() > 1 {
		if err := m.attendWholeGrad(ctx, l, st, dctx, fresh); err != nil {
			return err
		}
	} else {
		m.dev.AttendGrad(m.attention(l, st, w.ownKeys()), dctx, w.dqkv, w.dk, w.dv)
		m.sinksGrad(l, st, dctx)
	}

	// Through the projections and the norm.
	m.blockInput(m.projected(), st.x0, m.norm1(l, st), true)
	if latent {
		if err := m.latentGrad(ctx, l, st, held); err != nil {
			return err
		}
	} else if err := m.projectionsGrad(ctx, l, st, held); err != nil {
		return err
	}
	m.blockInputGrad(st.x0, m.norm1(l, st), l.norm1.g)
	return nil
}

// projected returns ws.h for the input of projections. Only products read it, unless ranks exchange
// it.
func (m *Model) projected() xpu.Tensor {
	if m.ws.shape.tensor > 1 {
		return m.ws.h
	}
	return m.ws.h.AsOperand()
}

// project computes the heads of queries, keys and values from the normalised hidden states in ws.h.
func (m *Model) project(ctx context.Context, l *layer, st *saved, to kvTarget) error {
	h, err := m.allInputs(ctx)
	if err != nil {
		return err
	}
	if l.qkvBias.w.Present() {
		m.dev.Embed(st.qkv, l.qkvBias.w.Reshape(1, m.own.qkvWidth()), m.ws.row0)
	}
	m.dev.MatMul(st.qkv, h, l.qkv.w.T(), xpu.MatMulOptions{Accumulate: l.qkvBias.w.Present()})
	p := m.projections(l, st, to, m.ws.all.sums.Present())
	if p.Known {
		if err := m.wideRoots(ctx, p, st.rq, st.rk); err != nil {
			return err
		}
	}
	m.dev.SplitHeads(p)
	return nil
}

// projectionsGrad computes the gradient of the normalised hidden states in ws.dh from the gradients
// of the heads, and adds to the gradients of the projections. ws.h holds the normalised hidden
// states. held is as in [Model.attentionInputs].
func (m *Model) projectionsGrad(ctx context.Context, l *layer, st *saved, held bool) error {
	w := &m.ws
	dqkv := w.dqkv
	if !l.qkvBias.g.Present() {
		dqkv = dqkv.AsOperand()
	}
	p := m.projections(l, st, w.ownKeys(), true)
	if w.all.sums.Present() {
		var err error
		if p.Means, err = m.wideMeans(ctx, p); err != nil {
			return err
		}
	}
	m.dev.JoinHeads(p, dqkv, w.dk, w.dv, l.qNorm.g, l.kNorm.g)
	h, err := m.attentionInputs(ctx, held)
	if err != nil {
		return err
	}
	m.dev.MatMul(l.qkv.g, w.dqkv.T(), h, m.toGradients)
	if l.qkvBias.g.Present() {
		m.dev.EmbedGrad(l.qkvBias.g.Reshape(1, m.own.qkvWidth()), w.dqkv, w.row0, noRow)
	}
	return m.blockProduct(ctx, w.dh, w.dqkv, l.qkv.w, xpu.MatMulOptions{})
}
