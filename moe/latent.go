package moe

import (
	"context"
	"math"

	"mula/xpu"
)

// Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1). Keys and values of a
// token are projections of one vector of KVRank numbers, its latent. A head of keys also has
// RotatedSize elements with rotary embedding, which are projections of the hidden state and the
// same in all heads. Queries are projections of the hidden state, or of a latent of QueryRank
// numbers. With x the hidden state after the norm of the attention, and u the head's part:
//
//	q = u(Wqb·norm(Wqa·x)), or u(Wq·x)       p plain elements, then r rotated elements
//	k = u(Wkvb·norm(Wkva·x))[:p], Wkr·x       Wkva and Wkr are rows of kv_a_proj_with_mqa
//	v = u(Wkvb·norm(Wkva·x))[p:]
//	out = Wo·Σ softmax(scale·q·k)·v            scale = (p+r)^(-1/2)·m², m from YaRN's mscale_all_dim
//
// The backward pass keeps the latents, and computes queries, keys and values again.
//
// The heads have the size that queries and keys, or values, need: the smaller ones are padded with
// zeros. Generation keeps the latents; see [layerCache].
//
// Ranks of [comm.TP] share the heads. Each computes the latents of the tokens of all ranks.

// latentNormEps is the epsilon of the norms of latents. transformers does not use rms_norm_eps
// there.
const latentNormEps = 1e-6

// latent reports whether the model has latent attention.
func (c Config) latent() bool { return c.family().latent }

// queryElements returns the size of a head of queries without padding.
func (c Config) queryElements() int { return c.PlainSize + c.RotatedSize }

// latentHeadDim returns the size of a padded head.
func (c Config) latentHeadDim() int { return (max(c.queryElements(), c.ValueSize) + 1) / 2 * 2 }

// ContextWidth returns the width of the attention's result for a token, before its output
// projection.
func (c Config) ContextWidth() int {
	if c.latent() {
		return c.Heads * c.ValueSize
	}
	return c.QueryWidth()
}

// ropeSize returns the number of rotated elements of a head.
func (c Config) ropeSize() int {
	if c.latent() {
		return c.RotatedSize
	}
	if c.RotaryPart != 0 {
		return int(float64(c.HeadDim()) * c.RotaryPart)
	}
	return c.HeadDim()
}

// validateLatent returns an error if the fields of latent attention do not fit the family.
func (c Config) validateLatent(bad func(field, format string, args ...any) error) error {
	sizes := []struct {
		field string
		v     int
	}{{"q_lora_rank", c.QueryRank}, {"kv_lora_rank", c.KVRank}, {"qk_nope_head_dim", c.PlainSize},
		{"qk_rope_head_dim", c.RotatedSize}, {"v_head_dim", c.ValueSize}}
	if !c.latent() {
		for _, s := range sizes {
			if s.v != 0 {
				return bad(s.field, "is %d; it must be 0, because a %s model has no latent attention", s.v,
					c.Architecture)
			}
		}
		if c.RopeInterleave {
			return bad("rope_interleave", "is true; a %s model does not interleave rotated elements", c.Architecture)
		}
		return nil
	}
	for i, s := range sizes {
		least, most := 1, maxWidth
		if i == 0 { // no latent of queries
			least = 0
		}
		if i > 1 { // the size of a head
			most = maxWidth / 4 / max(1, c.Heads)
		}
		if s.v < least || s.v > most {
			return bad(s.field, "is %d; it must be between %d and %d", s.v, least, most)
		}
	}
	switch {
	case !c.RopeInterleave && !c.family().interleaveField:
		return bad("rope_interleave", "is false; it must be true, because a %s model interleaves rotated elements",
			c.Architecture)
	case c.RotatedSize%2 != 0:
		return bad("qk_rope_head_dim", "is %d; rotary embedding needs an even number", c.RotatedSize)
	case c.HeadSize != 0:
		return bad("head_dim", "is %d; it must be 0, because latent attention has qk_nope_head_dim, qk_rope_head_dim "+
			"and v_head_dim", c.HeadSize)
	case c.KVHeads != c.Heads:
		return bad("num_key_value_heads", "is %d; latent attention needs num_attention_heads %d", c.KVHeads, c.Heads)
	}
	return nil
}

// latentTensors adds the projections of a layer's latent attention, except for its output.
func (list *tensorList) latentTensors(c Config, prefix string) {
	h, queries := c.HiddenSize, c.Heads*c.queryElements()
	if c.QueryRank == 0 {
		list.add(prefix+"self_attn.q_proj.weight", queries, h)
	} else {
		list.add(prefix+"self_attn.q_a_proj.weight", c.QueryRank, h)
		list.add(prefix+"self_attn.q_a_layernorm.weight", c.QueryRank)
		list.add(prefix+"self_attn.q_b_proj.weight", queries, c.QueryRank)
	}
	list.add(prefix+"self_attn.kv_a_proj_with_mqa.weight", c.KVRank+c.RotatedSize, h)
	list.add(prefix+"self_attn.kv_a_layernorm.weight", c.KVRank)
	list.add(prefix+"self_attn.kv_b_proj.weight", c.Heads*(c.PlainSize+c.ValueSize), c.KVRank)
}

// latentParameters returns the number of weights of latentTensors, and how many of them are
// weights of norms.
func (c Config) latentParameters() (n, norms int64) {
	var list tensorList
	list.latentTensors(c, "")
	for _, t := range list {
		if n += t.Elements(); len(t.Shape) == 1 {
			norms += t.Elements()
		}
	}
	return n, norms
}

// latentFLOPs is the part of latent attention in [Config.LayerFLOPs].
func (c Config) latentFLOPs(sequenceLength int) float64 {
	n, norms := c.latentParameters()
	heads := float64(c.Heads)
	return 6*float64(n-norms) + 6*float64(c.HiddenSize)*heads*float64(c.ValueSize) +
		6*float64(sequenceLength)*heads*float64(c.queryElements()+c.ValueSize)
}

// latentWeights are the weights of a layer's latent attention, except for its output projection.
type latentWeights struct {
	qA, qNorm tensor // [Rq, H], [Rq]; absent without a latent of queries
	q         tensor // [A(p+r), Rq], or without a latent of queries [A(p+r), H]
	kvA       tensor // [Rkv+r, H]
	kvNorm    tensor // [Rkv]
	kv        tensor // [A(p+v), Rkv]
}

// A latentSide is a latent of a layer's tokens with its norm.
type latentSide struct {
	x    xpu.Tensor // [T', R] before its norm
	rstd xpu.Tensor // [T']
}

// latentSaved are the results of a layer's latent projections that the backward pass reads.
type latentSaved struct {
	q, kv   latentSide
	rotated xpu.Tensor // [T', r] the keys' rotated elements, before rotation
}

// cut allocates the buffers from a.
func (s *latentSaved) cut(c Config, p passShape, a *arena) {
	t := p.blockTokens()
	*s = latentSaved{kv: latentSide{a.f32(t, c.KVRank), a.f32(t)}, rotated: a.f32(t, c.RotatedSize)}
	if c.QueryRank > 0 {
		s.q = latentSide{a.f32(t, c.QueryRank), a.f32(t)}
	}
}

// latentSpace are the buffers of latent attention that all layers share. The backward pass also
// uses the buffers of the forward pass, for gradients.
type latentSpace struct {
	queries    xpu.Tensor // [T', A(p+r)]
	keysValues xpu.Tensor // [T', A(p+v)]
	normedQ    xpu.Tensor // [T', Rq] latents after their norms
	normedKV   xpu.Tensor // [T', Rkv]
	wide       xpu.Tensor // [T', AD] result of the attention with padded heads
	narrow     xpu.Tensor // [T', Av] the same without padding

	dwide   xpu.Tensor // [T', AD] gradient of wide
	dq, dkv xpu.Tensor // [T', Rq], [T', Rkv] gradients of latents
	rotated xpu.Tensor // [T', r] gradient of the keys' rotated elements
}

// cut allocates the buffers from a.
func (s *latentSpace) cut(c Config, p passShape, a *arena) {
	t := p.blockTokens()
	*s = latentSpace{queries: a.f32(t, c.Heads*c.queryElements()),
		keysValues: a.f32(t, c.Heads*(c.PlainSize+c.ValueSize)), normedKV: a.f32(t, c.KVRank),
		wide: a.f32(t, c.QueryWidth()), narrow: a.f32(t, c.ContextWidth())}
	if c.QueryRank > 0 {
		s.normedQ = a.f32(t, c.QueryRank)
	}
	if !p.train {
		return
	}
	s.dwide, s.dkv, s.rotated = a.f32(t, c.QueryWidth()), a.f32(t, c.KVRank), a.f32(t, c.RotatedSize)
	if c.QueryRank > 0 {
		s.dq = a.f32(t, c.QueryRank)
	}
}

func (s latentSide) norm(weights tensor) xpu.Norm {
	return xpu.Norm{Epsilon: latentNormEps, Weight: weights.w, RStd: s.rstd}
}

// latentHeads returns a layer's projections and heads. The projections are absent.
func (m *Model) latentHeads(l *layer, to kvTarget) xpu.LatentHeads {
	cos, sin := m.positions(l, to)
	return xpu.LatentHeads{Interleaved: m.cfg.RopeInterleave, Cos: cos, Sin: sin, Scale: m.cfg.latentScale(),
		First: to.first, Q: m.ws.q, K: to.k, V: to.v}
}

// latentScale returns the factor of queries.
func (c Config) latentScale() float32 {
	scale := 1 / math.Sqrt(float64(c.queryElements()))
	if r := c.RopeScaling; r.Type == "yarn" && r.MScaleAllDim != 0 {
		m := yarnScale(r.Factor, r.MScaleAllDim)
		scale *= m * m
	}
	return float32(scale)
}

// projectLatent computes the latents of the normalised hidden states in ws.h, and the keys' rotated
// elements.
func (m *Model) projectLatent(ctx context.Context, l *layer, st *saved) error {
	s, rank := &st.latent, m.cfg.KVRank
	h, err := m.allInputs(ctx)
	if err != nil {
		return err
	}
	if s.q.x.Present() {
		m.dev.MatMul(s.q.x, h, l.latent.qA.w.T(), xpu.MatMulOptions{})
	} else {
		m.dev.MatMul(m.ws.latent.queries, h, l.latent.q.w.T(), xpu.MatMulOptions{})
	}
	m.dev.MatMul(s.kv.x, h, l.latent.kvA.rows(0, rank).w.T(), xpu.MatMulOptions{})
	m.dev.MatMul(s.rotated, h, l.latent.kvA.rows(rank, m.cfg.RotatedSize).w.T(), xpu.MatMulOptions{})
	return nil
}

// splitLatent computes the heads from the latents. Without a latent of queries, their projections
// must be in the workspace. known means that the statistics of the latents' norms were computed
// before.
func (m *Model) splitLatent(l *layer, st *saved, to kvTarget, known bool) {
	w, s := &m.ws.latent, &st.latent
	m.projectQueries(l, st, known)
	m.dev.Normalize(w.normedKV, s.kv.x, s.kv.norm(l.latent.kvNorm), known)
	m.dev.MatMul(w.keysValues, w.normedKV, l.latent.kv.w.T(), xpu.MatMulOptions{})
	m.splitLatentHeads(l, st, to)
}

// projectQueries computes the projections to queries in the workspace from the latent of queries,
// if there is one. known is as in splitLatent.
func (m *Model) projectQueries(l *layer, st *saved, known bool) {
	if w, q := &m.ws.latent, &st.latent.q; q.x.Present() {
		m.dev.Normalize(w.normedQ, q.x, q.norm(l.latent.qNorm), known)
		m.dev.MatMul(w.queries, w.normedQ, l.latent.q.w.T(), xpu.MatMulOptions{})
	}
}

// splitLatentHeads computes the heads from the projections in the workspace.
func (m *Model) splitLatentHeads(l *layer, st *saved, to kvTarget) {
	heads := m.latentHeads(l, to)
	heads.Queries, heads.KeysValues, heads.Rotated = m.ws.latent.queries, m.ws.latent.keysValues, st.latent.rotated
	m.dev.SplitLatent(heads)
}

// restoreLatent computes the heads again in a backward pass. It overwrites ws.h. held is as in
// [Model.attentionInputs].
func (m *Model) restoreLatent(ctx context.Context, l *layer, st *saved) (held bool, err error) {
	if held = !st.latent.q.x.Present(); held {
		m.blockInput(m.projected(), st.x0, m.norm1(l, st), true)
		h, err := m.allInputs(ctx)
		if err != nil {
			return false, err
		}
		m.dev.MatMul(m.ws.latent.queries, h, l.latent.q.w.T(), xpu.MatMulOptions{})
	}
	m.splitLatent(l, st, m.ws.ownKeys(), true)
	return held, nil
}

// narrowContext sets st.ctx to the result of the attention without padding.
func (m *Model) narrowContext(st *saved) {
	w, c := &m.ws.latent, &m.own
	rows := m.ws.shape.blockTokens() * c.Heads
	m.dev.CopyColumns(w.narrow.Reshape(rows, c.ValueSize), w.wide.Reshape(rows, c.HeadDim()))
	m.dev.Copy(st.ctx, w.narrow)
}

// widenContext sets the result of the attention with padding, and its gradient, from st.ctx and
// ws.dctx.
func (m *Model) widenContext(st *saved) {
	w, c := &m.ws.latent, &m.own
	rows := m.ws.shape.blockTokens() * c.Heads
	m.dev.Copy(w.narrow, st.ctx)
	m.dev.CopyColumns(w.wide.Reshape(rows, c.HeadDim()), w.narrow.Reshape(rows, c.ValueSize))
	m.dev.CopyColumns(w.dwide.Reshape(rows, c.HeadDim()), m.ws.dctx.Reshape(rows, c.ValueSize))
}

// latentGrad computes the gradient of the normalised hidden states in ws.dh from the gradients of
// the heads, and adds to the gradients of the projections. ws.h holds the normalised hidden states.
// held is as in [Model.attentionInputs].
func (m *Model) latentGrad(ctx context.Context, l *layer, st *saved, held bool) error {
	w, s, rank := &m.ws.latent, &st.latent, m.cfg.KVRank
	h, err := m.attentionInputs(ctx, held)
	if err != nil {
		return err
	}
	dh := m.ws.dh
	if m.ws.shape.tensor > 1 {
		dh = m.ws.all.y // of this rank's heads, for the tokens of all ranks
	}
	weights := &l.latent
	heads := m.latentHeads(l, m.ws.ownKeys())
	heads.Queries, heads.KeysValues, heads.Rotated = w.queries, w.keysValues, w.rotated
	m.dev.JoinLatent(heads, m.ws.dqkv, m.ws.dk, m.ws.dv)
	plain := xpu.MatMulOptions{}
	// through turns the gradient of the projections of a latent into the gradient of the latent.
	through := func(dx, dy, normed, x xpu.Tensor, n xpu.Norm, projection, norm tensor) {
		m.dev.Normalize(normed, x, n, true)
		m.dev.MatMul(projection.g, dy.T(), normed, m.toGradients)
		m.dev.MatMul(normed, dy, projection.w, plain)
		m.dev.Zero(dx)
		m.dev.NormGrad(dx, normed, x, n, norm.g)
	}
	dq, first := w.queries, weights.q // the gradient of the first projection to queries
	if s.q.x.Present() {
		dq, first = w.dq, weights.qA
		through(dq, w.queries, w.normedQ, s.q.x, s.q.norm(weights.qNorm), weights.q, weights.qNorm)
	}
	through(w.dkv, w.keysValues, w.normedKV, s.kv.x, s.kv.norm(weights.kvNorm), weights.kv, weights.kvNorm)
	m.dev.MatMul(dh, dq, first.w, plain)
	m.dev.MatMul(first.g, dq.T(), h, m.toGradients)
	for _, part := range []struct {
		dy     xpu.Tensor
		weight tensor
	}{{w.dkv, weights.kvA.rows(0, rank)}, {w.rotated, weights.kvA.rows(rank, m.cfg.RotatedSize)}} {
		m.dev.MatMul(dh, part.dy, part.weight.w, accumulate)
		m.dev.MatMul(part.weight.g, part.dy.T(), h, m.toGradients)
	}
	if m.ws.shape.tensor > 1 {
		return m.sumOfRanks(ctx, m.ws.dh, m.ws.all.y, plain)
	}
	return nil
}
