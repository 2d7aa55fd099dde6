package moe

import (
	"math"

	"mula/xpu/cpu"
)

// Attention runs as products over groups, one group for each row of the batch and key head: its A matrix are the queries that read that
// head. Scores are computed for one block of queryBlock positions at a time, against the keys up to the end of the block, and not kept:
// the backward pass computes them again from the logsumexp of each query.
//
// Query order is the order that makes the queries of a group contiguous: by block of positions, row, head, position. With grouped-query
// attention the heads that share a key head are neighbours (head a reads key head a/(A/G)), so their queries form one group.

// queryAt is the place of a query in query order.
func queryAt(c Config, p passShape, row, head, pos int) int {
	block := pos / queryBlock
	first := block * queryBlock
	n := min(queryBlock, p.s-first)
	return first*p.rows*c.Heads + (row*c.Heads+head)*n + pos - first
}

// A kvTarget is where keys and values of a pass go: head g of row r has its position p at element ((r·G+g)·capacity + first + p)·D.
type kvTarget struct {
	k, v     []float32
	capacity int
	first    int // position of the pass's first token
}

// attend computes x1 = x0 + attention(norm(x0)) for layer l.
func (m *Model) attend(l *layer, st *saved, to kvTarget) {
	c, w := m.cfg, &m.ws
	h, width, t := c.HiddenSize, c.qkvWidth(), len(st.x0)/c.HiddenSize
	m.normalize(w.h, st.x0, l.norm1.w, st.mean1, st.rstd1)
	m.dev.MatMul(false, true, t, width, h, w.h, h, l.qkv.w, h, st.qkv, width, false)
	if c.moe() {
		m.split(t, func(_, lo, hi int) {
			for i := lo; i < hi; i++ {
				row := st.qkv[i*width:][:width]
				st.rq[i] = rmsInverse(row[:h], c.NormEps)
				st.rk[i] = rmsInverse(row[h:h+c.kvWidth()], c.NormEps)
			}
		})
	}
	m.splitHeads(l, st, to)
	for first := 0; first < w.shape.s; first += queryBlock {
		b := m.block(to, first)
		m.dev.GroupedMatMul(w.qCounts, true, b.keys, c.HeadDim(), w.q[b.lo*c.HeadDim():b.hi*c.HeadDim()], w.ks, w.scores, false)
		m.split(b.hi-b.lo, func(_, lo, hi int) {
			for i := lo; i < hi; i++ {
				row := w.scores[i*b.keys:][:b.keys]
				visible := row[:b.visible(i)]
				top := cpu.Max(visible)
				sum := cpu.ExpSum(visible, visible, top)
				cpu.Scale(visible, 1/sum)
				clear(row[len(visible):])
				st.lse[b.lo+i] = top + float32(math.Log(float64(sum)))
			}
		})
		m.dev.GroupedMatMul(w.qCounts, false, c.HeadDim(), b.keys, w.scores, w.vs, w.o[b.lo*c.HeadDim():b.hi*c.HeadDim()], false)
	}
	d := c.HeadDim()
	m.split(t, func(_, lo, hi int) {
		for i := lo; i < hi; i++ {
			for a := range c.Heads {
				copy(st.ctx[i*h+a*d:][:d], w.o[queryAt(c, w.shape, i/w.shape.s, a, i%w.shape.s)*d:])
			}
		}
		copy(st.x1[lo*h:hi*h], st.x0[lo*h:hi*h])
	})
	m.dev.MatMul(false, true, t, h, h, st.ctx, h, l.out.w, h, st.x1, h, true)
}

// A scoreBlock is a block of queries and the keys that they read.
type scoreBlock struct {
	lo, hi int // in query order
	n      int // positions in the block
	first  int // position of the first, counted from the first key
	keys   int // first + n: keys up to the last query's own
}

// visible is the number of keys that query i of the block may read: its own and those before it.
func (b scoreBlock) visible(i int) int { return b.first + i%b.n + 1 }

// block sets the operands of the grouped products for the queries from position first of the pass.
func (m *Model) block(to kvTarget, first int) scoreBlock {
	c, w := m.cfg, &m.ws
	n := min(queryBlock, w.shape.s-first)
	each := w.shape.rows * c.Heads
	b := scoreBlock{lo: first * each, hi: (first + n) * each, n: n, first: to.first + first, keys: to.first + first + n}
	for g := range w.qCounts {
		w.qCounts[g] = c.Heads / c.KVHeads * n
		lo := g * to.capacity * c.HeadDim()
		hi := lo + b.keys*c.HeadDim()
		w.ks[g], w.vs[g] = to.k[lo:hi], to.v[lo:hi]
	}
	return b
}

// splitHeads takes q, k and v apart: q/k norm, clipping, rotation, and the order that the products want. Queries are scaled by D^(-1/2).
func (m *Model) splitHeads(l *layer, st *saved, to kvTarget) {
	c, w := m.cfg, &m.ws
	h, kv, width, d, s := c.HiddenSize, c.kvWidth(), c.qkvWidth(), c.HeadDim(), w.shape.s
	scale := float32(1 / math.Sqrt(float64(d)))
	m.split(w.shape.rows*s, func(_, lo, hi int) {
		for i := lo; i < hi; i++ {
			row, pos := i/s, i%s
			x := st.qkv[i*width:][:width]
			cos, sin := m.rope.at(to.first+pos, d/2)
			for a := range c.Heads {
				at := a * d
				dst := w.q[queryAt(c, w.shape, row, a, pos)*d:][:d]
				m.writeHead(dst, x[at:at+d], l.qNorm, at, st.rq[i], cos, sin, scale)
			}
			for g := range c.KVHeads {
				at := g * d
				place := ((row*c.KVHeads+g)*to.capacity + to.first + pos) * d
				dst := to.k[place:][:d]
				m.writeHead(dst, x[h+at:h+at+d], l.kNorm, at, st.rk[i], cos, sin, 1)
				dst = to.v[place:][:d]
				copy(dst, x[h+kv+at:][:d])
				clip(dst, c.ClipQKV)
			}
		}
	})
}

// writeHead writes one head of a projection x to dst after norm, clipping and rotation, times scale. The head starts at element `at` of the
// projection, whose inverse root mean square is inv.
func (m *Model) writeHead(dst, x []float32, norm tensor, at int, inv float32, cos, sin []float32, scale float32) {
	if m.cfg.moe() && m.cfg.ClipQKV == 0 { // in one go
		half := len(cos)
		x0, x1, w0, w1 := x[:half], x[half:][:half], norm.w[at:][:half], norm.w[at+half:][:half]
		y0, y1, sin := dst[:half], dst[half:][:half], sin[:half]
		for j, cs := range cos {
			a, b := w0[j]*(x0[j]*inv), w1[j]*(x1[j]*inv)
			y0[j] = (a*cs - b*sin[j]) * scale
			y1[j] = (b*cs + a*sin[j]) * scale
		}
		return
	}
	copy(dst, x)
	if m.cfg.moe() {
		for j, w := range norm.w[at:][:len(dst)] {
			dst[j] = w * (dst[j] * inv)
		}
	}
	clip(dst, m.cfg.ClipQKV)
	rotate(dst, cos, sin, scale)
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

// rotate turns the pairs (x[j], x[j+D/2]) by the angles of a position and multiplies by scale.
func rotate(x, cos, sin []float32, scale float32) {
	half := len(cos)
	lo, hi := x[:half], x[half:][:half]
	sin = sin[:half]
	for j, cs := range cos {
		a, b := lo[j], hi[j]
		lo[j] = (a*cs - b*sin[j]) * scale
		hi[j] = (b*cs + a*sin[j]) * scale
	}
}

// rotateBack is the transpose of rotate, for gradients: the rotation by the negative angles.
func rotateBack(x, cos, sin []float32, scale float32) {
	half := len(cos)
	lo, hi := x[:half], x[half:][:half]
	sin = sin[:half]
	for j, cs := range cos {
		a, b := lo[j], hi[j]
		lo[j] = (a*cs + b*sin[j]) * scale
		hi[j] = (b*cs - a*sin[j]) * scale
	}
}

// attendGrad takes the gradient of x1 in ws.dx to the gradient of x0, and adds to the gradients of the layer's weights.
func (m *Model) attendGrad(l *layer, st *saved) {
	c, w := m.cfg, &m.ws
	h, width, d, s, t := c.HiddenSize, c.qkvWidth(), c.HeadDim(), w.shape.s, len(st.x0)/c.HiddenSize
	to := kvTarget{k: w.k, v: w.v, capacity: s}

	// Through the output projection, and into query order.
	m.dev.MatMul(false, false, t, h, h, w.dx, h, l.out.w, h, w.dh, h, false)
	m.dev.MatMul(true, false, h, h, t, w.dx, h, st.ctx, h, l.out.g, h, true)
	m.split(t, func(_, lo, hi int) {
		for i := lo; i < hi; i++ {
			for a := range c.Heads {
				at, place := i*h+a*d, queryAt(c, w.shape, i/s, a, i%s)
				copy(w.do[place*d:][:d], w.dh[at:])
				w.delta[place] = cpu.Dot(w.dh[at:][:d], st.ctx[at:][:d])
			}
		}
	})

	// Through the attention: P = exp(S - lse), dS = P ∘ (dO·Vᵀ - delta). The last block reads all keys, so its dK and dV start the sums.
	m.splitHeads(l, st, to)
	for first := (s - 1) / queryBlock * queryBlock; first >= 0; first -= queryBlock {
		b := m.block(to, first)
		for g := range w.ks {
			lo := g * s * d
			w.dks[g], w.dvs[g] = w.dk[lo:lo+b.keys*d], w.dv[lo:lo+b.keys*d]
		}
		q, do := w.q[b.lo*d:b.hi*d], w.do[b.lo*d:b.hi*d]
		m.dev.GroupedMatMul(w.qCounts, true, b.keys, d, q, w.ks, w.scores, false)
		m.dev.GroupedMatMul(w.qCounts, true, b.keys, d, do, w.vs, w.dscores, false)
		m.split(b.hi-b.lo, func(_, lo, hi int) {
			for i := lo; i < hi; i++ {
				n := b.visible(i)
				p, dp := w.scores[i*b.keys:][:b.keys], w.dscores[i*b.keys:][:b.keys]
				cpu.ExpSum(p[:n], p[:n], st.lse[b.lo+i])
				delta := w.delta[b.lo+i]
				for j, v := range p[:n] {
					dp[j] = v * (dp[j] - delta)
				}
				clear(p[n:])
				clear(dp[n:])
			}
		})
		more := b.keys < s
		m.dev.GroupedMatMul(w.qCounts, false, d, b.keys, w.dscores, w.ks, w.dq[b.lo*d:b.hi*d], false)
		m.dev.GroupedWeightGrad(w.qCounts, b.keys, d, w.dscores, q, w.dks, more)
		m.dev.GroupedWeightGrad(w.qCounts, b.keys, d, w.scores, do, w.dvs, more)
	}
	m.joinHeads(l, st)

	// Through the projections and the norm.
	m.renormalize(w.h, st.x0, l.norm1.w, st.mean1, st.rstd1)
	m.dev.MatMul(true, false, width, h, t, w.dqkv, width, w.h, h, l.qkv.g, h, true)
	m.dev.MatMul(false, false, t, h, width, w.dqkv, width, l.qkv.w, h, w.dh, h, false)
	m.normGrad(w.dx, w.dh, st.x0, l.norm1.w, l.norm1.g, st.mean1, st.rstd1)
}

// joinHeads takes the gradients of the heads back to the projections, ws.dqkv, and adds to the gradients of the q and k norms.
func (m *Model) joinHeads(l *layer, st *saved) {
	c, w := m.cfg, &m.ws
	h, kv, width, d, s := c.HiddenSize, c.kvWidth(), c.qkvWidth(), c.HeadDim(), w.shape.s
	scale := float32(1 / math.Sqrt(float64(d)))
	t := w.shape.rows * s
	m.split(t, func(part, lo, hi int) {
		sums := w.partial[part*(h+kv):][:h+kv]
		clear(sums)
		for i := lo; i < hi; i++ {
			row, pos := i/s, i%s
			x, dx := st.qkv[i*width:][:width], w.dqkv[i*width:][:width]
			cos, sin := m.rope.at(pos, d/2)
			for a := range c.Heads {
				dst := dx[a*d:][:d]
				copy(dst, w.dq[queryAt(c, w.shape, row, a, pos)*d:])
				rotateBack(dst, cos, sin, scale)
			}
			for g := range c.KVHeads {
				place := ((row*c.KVHeads+g)*s + pos) * d
				dst := dx[h+g*d:][:d]
				copy(dst, w.dk[place:])
				rotateBack(dst, cos, sin, 1)
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
	for j, u := range dy {
		dy[j] = a*(w[j]*u) - b*x[j]
	}
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
