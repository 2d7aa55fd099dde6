package moe

import (
	"math"

	"mula/xpu/cpu"
)

// Attention is cut into groups, one for each row of the batch and key head, that have nothing to do with each other: each takes its blocks
// of queries one after the other, in each the heads that read its keys, and the scores of a block never leave the cache. Of the scores only
// the logsumexp of each query is kept; the backward pass computes them again from it. The products of a group are calls of the device from
// within its loop over groups: where there are groups for all workers, each product is one worker's.

// queryBlock is the number of queries whose attention scores a group holds at a time. It decides the order in which the gradients of keys
// and values are summed, so the last bits of a result depend on it.
const queryBlock = 64

// A kvTarget is where keys and values of a pass go: head g of row r has its position p at element ((r·G+g)·capacity + first + p)·D.
type kvTarget struct {
	k, v     []float32
	capacity int
	first    int // position of the pass's first token
}

// ownKeys is the place of keys and values of a pass that begins at position 0.
func (w *workspace) ownKeys() kvTarget { return kvTarget{k: w.k, v: w.v, capacity: w.shape.s} }

// attend computes x1 = x0 + attention(norm(x0)) for a layer.
func (m *Model) attend(l *layer, st *saved, to kvTarget) {
	c, w := m.cfg, &m.ws
	h, width, t := c.HiddenSize, c.qkvWidth(), len(st.x0)/c.HiddenSize
	m.normalize(w.h, st.norm1(l))
	m.dev.MatMul(false, true, t, width, h, w.h, h, l.qkv.w, h, st.qkv, width, false)
	m.splitHeads(l, st, to, true)
	m.split(w.shape.rows*c.KVHeads, operands{saved: st, keys: to}, func(m *Model, o *operands, _, lo, hi int) {
		for group := lo; group < hi; group++ {
			m.attendGroup(group, o.saved, o.keys)
		}
	})
	m.copyRows(st.x1, st.x0)
	m.dev.MatMul(false, true, t, h, h, st.ctx, h, l.out.w, h, st.x1, h, true)
}

// copyRows copies x [T, H] to dst.
func (m *Model) copyRows(dst, x []float32) {
	m.split(len(x)/m.cfg.HiddenSize, operands{dst: dst, x: x}, func(m *Model, o *operands, _, lo, hi int) {
		h := m.cfg.HiddenSize
		copy(o.dst[lo*h:hi*h], o.x[lo*h:hi*h])
	})
}

// splitHeads takes q, k and v apart into rows of heads: q/k norm, clipping, rotation. Queries are scaled by D^(-1/2). The first time it keeps
// the statistics of the norms, which it reads later.
func (m *Model) splitHeads(l *layer, st *saved, to kvTarget, first bool) {
	m.split(m.ws.shape.rows*m.ws.shape.s, operands{layer: l, saved: st, keys: to, keep: first && m.cfg.moe()}, func(m *Model, o *operands, _, lo, hi int) {
		c, w, st, to := m.cfg, &m.ws, o.saved, o.keys
		h, kv, width, d, s := c.HiddenSize, c.kvWidth(), c.qkvWidth(), c.HeadDim(), w.shape.s
		scale := float32(1 / math.Sqrt(float64(d)))
		for i := lo; i < hi; i++ {
			row, pos := i/s, i%s
			x := st.qkv[i*width:][:width]
			if o.keep {
				st.rq[i], st.rk[i] = rmsInverse(x[:h], c.NormEps), rmsInverse(x[h:h+kv], c.NormEps)
			}
			cos, sin := m.rope.at(to.first+pos, d/2)
			for a := range c.Heads {
				m.writeHead(w.q[((row*c.Heads+a)*s+pos)*d:][:d], x[a*d:][:d], o.layer.qNorm.w, a*d, st.rq[i], cos, sin, scale)
			}
			for g := range c.KVHeads {
				place := ((row*c.KVHeads+g)*to.capacity + to.first + pos) * d
				m.writeHead(to.k[place:][:d], x[h+g*d:][:d], o.layer.kNorm.w, g*d, st.rk[i], cos, sin, 1)
				dst := to.v[place:][:d]
				copy(dst, x[h+kv+g*d:][:d])
				clip(dst, c.ClipQKV)
			}
		}
	})
}

// writeHead writes one head of a projection x to dst after norm, clipping and rotation, times scale. The head starts at element `at` of the
// projection, whose norm has the weights w and whose inverse root mean square is inv.
func (m *Model) writeHead(dst, x, w []float32, at int, inv float32, cos, sin []float32, scale float32) {
	if m.cfg.moe() {
		cpu.MulScaled(dst, w[at:][:len(dst)], inv, x)
		x = dst
	}
	if m.cfg.ClipQKV > 0 {
		copy(dst, x)
		clip(dst, m.cfg.ClipQKV)
		x = dst
	}
	cpu.Rotate(dst, x, cos, sin, scale)
}

// clip limits x to ±bound; 0 is no bound.
func clip(x []float32, bound float64) {
	if bound == 0 {
		return
	}
	b := float32(bound)
	for i, v := range x {
		x[i] = max(-b, min(b, v))
	}
}

// A scoreBlock is the scores of some queries of one head.
type scoreBlock struct {
	row, head int
	first, n  int // queries: position of the first in the pass, how many
	past      int // keys before the first query's own
	keys      int // past + n: keys up to the last query's own
	q         []float32
	k, v      []float32
}

// visible is the number of keys that query i of the block may read: its own and those before it.
func (b *scoreBlock) visible(i int) int { return b.past + i + 1 }

// block is the scores of the queries from position first on, of one head of a group.
func (m *Model) block(group, head, first int, to kvTarget) scoreBlock {
	c, s := &m.cfg, m.ws.shape.s
	d, share := c.HeadDim(), c.Heads/c.KVHeads
	b := scoreBlock{row: group / c.KVHeads, head: group%c.KVHeads*share + head, first: first, n: min(queryBlock, s-first), past: to.first + first}
	b.keys = b.past + b.n
	at := group * to.capacity * d
	b.k, b.v = to.k[at:][:b.keys*d], to.v[at:][:b.keys*d]
	b.q = m.ws.q[((b.row*c.Heads+b.head)*s+first)*d:][:b.n*d]
	return b
}

// attendGroup computes ctx and lse for the queries of a group.
func (m *Model) attendGroup(group int, st *saved, to kvTarget) {
	c, w := &m.cfg, &m.ws
	h, d, s := c.HiddenSize, c.HeadDim(), w.shape.s
	scores := w.scores[group*w.scoreSize:][:w.scoreSize]
	var sums [queryBlock]float32
	for first := 0; first < s; first += queryBlock {
		for head := range c.Heads / c.KVHeads {
			b := m.block(group, head, first, to)
			m.dev.MatMul(false, true, b.n, b.keys, d, b.q, d, b.k, d, scores, b.keys, false)
			lse := st.lse[(b.row*c.Heads+b.head)*s+first:][:b.n]
			for i := range b.n {
				row := scores[i*b.keys:][:b.keys]
				visible := row[:b.visible(i)]
				top := cpu.Max(visible)
				sums[i] = cpu.ExpSum(visible, visible, top)
				clear(row[len(visible):])
				lse[i] = top + float32(math.Log(float64(sums[i])))
			}
			ctx := st.ctx[(b.row*s+first)*h+b.head*d:]
			m.dev.MatMul(false, false, b.n, d, b.keys, scores, b.keys, b.v, d, ctx, h, false)
			for i, sum := range sums[:b.n] {
				cpu.Scale(ctx[i*h:][:d], 1/sum)
			}
		}
	}
}

// attendGrad takes the gradient of x1 in ws.dx to the gradient of x0, and adds to the gradients of the layer's weights. With fresh, the
// layer was the last to go through attend, and its queries, keys and values are still there.
func (m *Model) attendGrad(l *layer, st *saved, fresh bool) {
	c, w := m.cfg, &m.ws
	h, width, t := c.HiddenSize, c.qkvWidth(), len(st.x0)/c.HiddenSize

	// Through the output projection.
	m.dev.MatMul(false, false, t, h, h, w.dx, h, l.out.w, h, w.dh, h, false)
	m.dev.MatMul(true, false, h, h, t, w.dx, h, st.ctx, h, l.out.g, h, true)

	// Through the attention.
	if !fresh {
		m.splitHeads(l, st, w.ownKeys(), false)
	}
	m.split(w.shape.rows*c.KVHeads, operands{saved: st}, func(m *Model, o *operands, _, lo, hi int) {
		for group := lo; group < hi; group++ {
			m.attendGroupGrad(group, o.saved)
		}
	})
	m.joinHeads(l, st)

	// Through the projections and the norm.
	m.renormalize(w.h, st.norm1(l))
	m.dev.MatMul(true, false, width, h, t, w.dqkv, width, w.h, h, l.qkv.g, h, true)
	m.dev.MatMul(false, false, t, h, width, w.dqkv, width, l.qkv.w, h, w.dh, h, false)
	m.normGrad(w.dx, w.dh, st.norm1(l))
}

// attendGroupGrad takes the gradient of ctx in ws.dh to those of the group's queries, in their columns of ws.dqkv, and of its keys and
// values, in ws.dk and ws.dv: P = exp(S - lse), dP = dO·Vᵀ, dS = P ∘ (dP - Σ dO·O). The last block reads all keys, so its dK and dV start
// the sums.
func (m *Model) attendGroupGrad(group int, st *saved) {
	c, w := &m.cfg, &m.ws
	h, d, s, width := c.HiddenSize, c.HeadDim(), w.shape.s, c.qkvWidth()
	scores, dscores := w.scores[group*w.scoreSize:][:w.scoreSize], w.dscores[group*w.scoreSize:][:w.scoreSize]
	dk, dv := w.dk[group*s*d:][:s*d], w.dv[group*s*d:][:s*d]
	more := false
	for first := (s - 1) / queryBlock * queryBlock; first >= 0; first -= queryBlock {
		for head := range c.Heads / c.KVHeads {
			b := m.block(group, head, first, w.ownKeys())
			at := (b.row*s+first)*h + b.head*d
			do, ctx := w.dh[at:], st.ctx[at:]
			m.dev.MatMul(false, true, b.n, b.keys, d, b.q, d, b.k, d, scores, b.keys, false)
			m.dev.MatMul(false, true, b.n, b.keys, d, do, h, b.v, d, dscores, b.keys, false)
			lse := st.lse[(b.row*c.Heads+b.head)*s+first:][:b.n]
			for i := range b.n {
				n := b.visible(i)
				p, dp := scores[i*b.keys:][:b.keys], dscores[i*b.keys:][:b.keys]
				cpu.ExpSum(p[:n], p[:n], lse[i])
				cpu.SoftmaxGrad(dp[:n], p[:n], dp[:n], cpu.Dot(do[i*h:][:d], ctx[i*h:][:d]))
				clear(p[n:])
				clear(dp[n:])
			}
			m.dev.MatMul(false, false, b.n, d, b.keys, dscores, b.keys, b.k, d, w.dqkv[(b.row*s+first)*width+b.head*d:], width, false)
			m.dev.MatMul(true, false, b.keys, d, b.n, dscores, b.keys, b.q, d, dk, d, more)
			m.dev.MatMul(true, false, b.keys, d, b.n, scores, b.keys, do, h, dv, d, more)
			more = true
		}
	}
}

// joinHeads takes the gradients of the heads back to the projections, ws.dqkv, and adds to the gradients of the q and k norms.
func (m *Model) joinHeads(l *layer, st *saved) {
	c := m.cfg
	h, kv, t := c.HiddenSize, c.kvWidth(), m.ws.shape.rows*m.ws.shape.s
	m.split(t, operands{layer: l, saved: st}, func(m *Model, o *operands, part, lo, hi int) {
		c, w, l, st := m.cfg, &m.ws, o.layer, o.saved
		h, kv, width, d, s := c.HiddenSize, c.kvWidth(), c.qkvWidth(), c.HeadDim(), w.shape.s
		scale := float32(1 / math.Sqrt(float64(d)))
		sums := w.partial[part*(h+kv):][:h+kv]
		clear(sums)
		for i := lo; i < hi; i++ {
			row, pos := i/s, i%s
			x, dx := st.qkv[i*width:][:width], w.dqkv[i*width:][:width]
			cos, sin := m.rope.at(pos, d/2)
			for a := range c.Heads {
				cpu.RotateBack(dx[a*d:][:d], dx[a*d:][:d], cos, sin, scale)
			}
			for g := range c.KVHeads {
				place := ((row*c.KVHeads+g)*s + pos) * d
				cpu.RotateBack(dx[h+g*d:][:d], w.dk[place:][:d], cos, sin, 1)
				copy(dx[h+kv+g*d:][:d], w.dv[place:])
			}
			clipGrad(dx[h+kv:], x[h+kv:], nil, 1, c.ClipQKV)
			if !c.moe() {
				clipGrad(dx[:h+kv], x[:h+kv], nil, 1, c.ClipQKV)
				continue
			}
			projectionNormGrad(dx[:h], x[:h], l.qNorm.w, sums[:h], st.rq[i], c.ClipQKV)
			projectionNormGrad(dx[h:h+kv], x[h:h+kv], l.kNorm.w, sums[h:], st.rk[i], c.ClipQKV)
		}
	})
	if c.moe() {
		m.addPartials(l.qNorm.g, h+kv, 0, t)
		m.addPartials(l.kNorm.g, h+kv, h, t)
	}
}

// projectionNormGrad turns dy, the gradient of a clipped norm of the projection x, into the gradient of x, in place.
func projectionNormGrad(dy, x, w, dw []float32, r float32, bound float64) {
	clipGrad(dy, x, w, r, bound)
	a, b := rmsNormGrad(dy, x, w, dw, r)
	cpu.Scale(dy, a)
	cpu.Axpy(dy, -b, x)
}

// clipGrad clears the gradient where clipping took effect: where w·x·r, or x·r without w, lies beyond the bound.
func clipGrad(dy, x, w []float32, r float32, bound float64) {
	if bound == 0 {
		return
	}
	b := float32(bound)
	for j := range dy {
		v := x[j] * r
		if w != nil {
			v = w[j] * v
		}
		if v > b || v < -b {
			dy[j] = 0
		}
	}
}
