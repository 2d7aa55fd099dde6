package moe

import "mula/xpu"

// A kvTarget is the destination of a pass's keys and values: position p of head g of row r is at
// element ((r·G+g)·capacity + first + p)·D.
type kvTarget struct {
	k, v     []float32
	capacity int
	first    int // position of the pass's first token
}

// ownKeys is the destination for a pass that starts at position 0.
func (w *workspace) ownKeys() kvTarget { return kvTarget{k: w.k, v: w.v, capacity: w.shape.s} }

// heads returns the attention shape of the current pass.
func (m *Model) heads() xpu.Heads {
	c, shape := &m.cfg, &m.ws.shape
	return xpu.Heads{Rows: shape.rows, Length: shape.s, Heads: c.Heads, KVHeads: c.KVHeads, Size: c.HeadDim()}
}

// projections returns a layer's q, k and v projections with the heads computed from them. known
// means that RQ and RK were computed before and are read, not written.
func (m *Model) projections(l *layer, st *saved, to kvTarget, known bool) xpu.Projections {
	return xpu.Projections{Heads: m.heads(), QKV: st.qkv, QWeight: l.qNorm.w, KWeight: l.kNorm.w,
		Epsilon: m.cfg.NormEps, RQ: st.rq, RK: st.rk,
		Known: known, Clip: m.cfg.ClipQKV, Cos: m.rope.cos, Sin: m.rope.sin, First: to.first, Capacity: to.capacity,
		Q: m.ws.q, K: to.k, V: to.v}
}

// attention returns the attention operands of a layer.
func (m *Model) attention(st *saved, to kvTarget) xpu.Attention {
	return xpu.Attention{Heads: m.heads(), Q: m.ws.q, K: to.k, V: to.v, First: to.first, Capacity: to.capacity,
		Begin: m.ws.begin, Context: st.ctx, LSE: st.lse}
}

// attend computes x1 = x0 + attention(norm(x0)) for a layer.
func (m *Model) attend(l *layer, st *saved, to kvTarget) {
	c, w := &m.cfg, &m.ws
	h, width, t := c.HiddenSize, c.qkvWidth(), w.shape.tokens()
	m.dev.Normalize(w.h, st.x0, m.norm1(l, st), false)
	m.dev.MatMul(xpu.Of(st.qkv, t, width), xpu.Of(w.h, t, h), xpu.Of(l.qkv.w, width, h).T(),
		xpu.MatMulOptions{})
	m.dev.SplitHeads(m.projections(l, st, to, false))
	m.dev.Attend(m.attention(st, to))
	m.dev.Copy(st.x1, st.x0)
	m.dev.MatMul(xpu.Of(st.x1, t, h), xpu.Of(st.ctx, t, h), xpu.Of(l.out.w, h, h).T(),
		xpu.MatMulOptions{Accumulate: true})
}

// attendGrad turns the gradient of x1 in ws.dx into the gradient of x0, and adds to the gradients
// of the layer's weights. fresh means that the layer was the last to run attend, so that its
// queries, keys and values are still in the workspace.
func (m *Model) attendGrad(l *layer, st *saved, fresh bool) {
	c, w := &m.cfg, &m.ws
	h, width, t := c.HiddenSize, c.qkvWidth(), w.shape.tokens()

	// Through the output projection.
	m.dev.MatMul(xpu.Of(w.dh, t, h), xpu.Of(w.dx, t, h), xpu.Of(l.out.w, h, h), xpu.MatMulOptions{})
	m.dev.MatMul(xpu.Of(l.out.g, h, h), xpu.Of(w.dx, t, h).T(), xpu.Of(st.ctx, t, h),
		xpu.MatMulOptions{Accumulate: true})

	// Through the attention.
	p := m.projections(l, st, w.ownKeys(), true)
	if !fresh {
		m.dev.SplitHeads(p)
	}
	m.dev.AttendGrad(m.attention(st, w.ownKeys()), w.dh, w.dqkv, w.dk, w.dv)
	m.dev.JoinHeads(p, w.dqkv, w.dk, w.dv, l.qNorm.g, l.kNorm.g)

	// Through the projections and the norm.
	m.dev.Normalize(w.h, st.x0, m.norm1(l, st), true)
	m.dev.MatMul(xpu.Of(l.qkv.g, width, h), xpu.Of(w.dqkv, t, width).T(), xpu.Of(w.h, t, h),
		xpu.MatMulOptions{Accumulate: true})
	m.dev.MatMul(xpu.Of(w.dh, t, h), xpu.Of(w.dqkv, t, width), xpu.Of(l.qkv.w, width, h),
		xpu.MatMulOptions{})
	m.dev.NormGrad(w.dx, w.dh, st.x0, m.norm1(l, st), l.norm1.g)
}
