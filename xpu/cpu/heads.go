package cpu

import "mula/xpu"

// projections are [xpu.Projections] in host memory.
type projections struct {
	xpu.Heads
	Turned                                                  int // rotated elements of a head
	QKV, QWeight, KWeight, RQ, RK, Means, Cos, Sin, Q, K, V []float32
	halves                                                  []uint16 // QKV of BFloat16, instead of QKV
	Epsilon, Clip                                           float64
	scale                                                   float32 // of queries
	Known, Interleaved                                      bool
	First                                                   int
}

func (t *task) setProjections(p xpu.Projections) {
	qkv, halves := numbers(p.QKV)
	t.projections = projections{Heads: p.Heads(), Turned: p.Turned(), QKV: qkv, halves: halves,
		QWeight: t.weights(0, p.QWeight), KWeight: t.weights(1, p.KWeight),
		RQ: p.RQ.Floats(), RK: p.RK.Floats(), Means: p.Means.Floats(), Cos: p.Cos.Floats(), Sin: p.Sin.Floats(),
		Q: p.Q.Floats(), K: p.K.Floats(), V: p.V.Floats(), Epsilon: p.Epsilon, Clip: p.Clip,
		scale: float32(p.QueryScale()), Known: p.Known, Interleaved: p.Interleaved, First: p.First}
}

// SplitHeads splits projections into heads; see [xpu.Layers].
func (h *Host) SplitHeads(p xpu.Projections) {
	xpu.CheckSplitHeads(p)
	t := h.begin(operands{})
	defer t.end()
	t.setProjections(p)
	t.split(p.QKV.Dim(0), func(t *task, _, lo, hi int) {
		p := &t.projections
		d, s, width := p.Size, p.Length, p.Width()
		q, kv := p.Heads.Heads*d, p.KVHeads*d
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		for i := lo; i < hi; i++ {
			x := row(p.QKV, p.halves, i, width, buffer)
			row, pos := i/s, i%s
			rq, rk := p.roots(x[:q], p.QWeight, p.RQ, i), p.roots(x[q:q+kv], p.KWeight, p.RK, i)
			r := p.rotation(p.First + pos)
			for a := range p.Heads.Heads {
				place := ((row*p.Heads.Heads+a)*s + pos) * d
				writeHead(p.Q[place:][:d], x[a*d:][:d], p.QWeight, a*d, rq, p.Clip, r, p.scale)
			}
			for g := range p.KVHeads {
				place := ((row*p.KVHeads+g)*p.Capacity + p.First + pos) * d
				writeHead(p.K[place:][:d], x[q+g*d:][:d], p.KWeight, g*d, rk, p.Clip, r, 1)
				dst := p.V[place:][:d]
				copy(dst, x[q+kv+g*d:][:d])
				clip(dst, p.Clip)
			}
		}
	})
}

// roots returns the part of inverse that has the inverse roots of the norms of token i. Unless they
// are known, it computes them from the token's projection x. Each norm is over as many elements as
// there are weights.
func (p *projections) roots(x, weights, inverse []float32, i int) []float32 {
	if len(weights) == 0 {
		return nil
	}
	norms := len(x) / len(weights)
	inverse = inverse[i*norms:][:norms]
	if !p.Known {
		for j := range inverse {
			inverse[j] = rmsInverse(x[j*len(weights):][:len(weights)], p.Epsilon)
		}
	}
	return inverse
}

// A rotation is the rotation of a position.
type rotation struct {
	cos, sin    []float32
	interleaved bool
}

// rotation returns the rotation of a position.
func (p *projections) rotation(position int) rotation {
	half := p.Turned / 2
	return rotation{p.Cos[position*half:][:half], p.Sin[position*half:][:half], p.Interleaved}
}

// turn rotates the head x and multiplies it by scale. dst may be x.
func (r rotation) turn(dst, x []float32, scale float32) {
	turned := 2 * len(r.cos)
	if r.interleaved {
		rotatePairs(dst[:turned], x[:turned], r.cos, r.sin, scale, scale)
	} else {
		Rotate(dst[:turned], x[:turned], r.cos, r.sin, scale)
	}
	copy(dst[turned:], x[turned:])
	Scale(dst[turned:], scale)
}

// turnBack sets dst to the gradient of x of method turn, given the gradient dy of its dst. dst may
// be dy.
func (r rotation) turnBack(dst, dy []float32, scale float32) {
	turned := 2 * len(r.cos)
	if r.interleaved {
		rotatePairs(dst[:turned], dy[:turned], r.cos, r.sin, scale, -scale)
	} else {
		RotateBack(dst[:turned], dy[:turned], r.cos, r.sin, scale)
	}
	copy(dst[turned:], dy[turned:])
	Scale(dst[turned:], scale)
}

// writeHead writes one head of a projection x to dst after norm, clipping and rotation, times
// scale. The head starts at element `at` of the projection. The projection's norms have the weights
// w, if any, and the inverse root mean squares inverse.
func writeHead(dst, x, w []float32, at int, inverse []float32, bound float64, r rotation, scale float32) {
	if len(w) > 0 {
		MulScaled(dst, w[at%len(w):][:len(dst)], inverse[at/len(w)], x)
		x = dst
	}
	if bound > 0 {
		copy(dst, x)
		clip(dst, bound)
		x = dst
	}
	r.turn(dst, x, scale)
}

// clip limits x to ±bound; 0 means no limit.
func clip(x []float32, bound float64) {
	if bound == 0 {
		return
	}
	b := float32(bound)
	for i, v := range x {
		x[i] = max(-b, min(b, v))
	}
}

// JoinHeads computes the gradients of projections from the gradients of heads; see [xpu.Layers].
func (h *Host) JoinHeads(p xpu.Projections, dqkv, dk, dv, dqWeight, dkWeight xpu.Tensor) {
	xpu.CheckJoinHeads(p, dqkv, dk, dv, dqWeight, dkWeight)
	t := h.begin(operands{dst: dqkv.Floats(), x: dk.Floats(), y: dv.Floats()})
	defer t.end()
	t.setProjections(p)
	n, weights := dqkv.Dim(0), len(t.projections.QWeight)+len(t.projections.KWeight)
	room(&t.partial, min(n, parts)*weights)
	t.split(n, func(t *task, part, lo, hi int) {
		p := &t.projections
		d, s, width := p.Size, p.Length, p.Width()
		q, kv := p.Heads.Heads*d, p.KVHeads*d
		weights := len(p.QWeight) + len(p.KWeight)
		sums := t.partial[part*weights:][:weights]
		clear(sums)
		buffer := t.host.buffers.Get()
		defer t.host.buffers.Put(buffer)
		for i := lo; i < hi; i++ {
			x, dx := row(p.QKV, p.halves, i, width, buffer), t.dst[i*width:][:width]
			row, pos := i/s, i%s
			turn := p.rotation(pos)
			for a := range p.Heads.Heads {
				turn.turnBack(dx[a*d:][:d], dx[a*d:][:d], p.scale)
			}
			for g := range p.KVHeads {
				place := ((row*p.KVHeads+g)*s + pos) * d
				turn.turnBack(dx[q+g*d:][:d], t.x[place:][:d], 1)
				copy(dx[q+kv+g*d:][:d], t.y[place:])
			}
			clipGrad(dx[q+kv:], x[q+kv:], nil, 1, p.Clip)
			var means [2][]float32 // of queries and keys
			if len(p.Means) > 0 {
				means = [2][]float32{p.Means[i:][:1], p.Means[len(p.Means)/2+i:][:1]}
			}
			projectionGrad(dx[:q], x[:q], p.QWeight, sums, p.RQ, means[0], i, p.Clip)
			projectionGrad(dx[q:q+kv], x[q:q+kv], p.KWeight, sums[len(p.QWeight):], p.RK, means[1], i, p.Clip)
		}
	})
	if p.QWeight.Present() {
		t.addPartials(dqWeight, weights, 0, n)
	}
	if p.KWeight.Present() {
		t.addPartials(dkWeight, weights, p.QWeight.Elements(), n)
	}
}

// SumHeads adds the columns of norms; see [xpu.Layers].
func (h *Host) SumHeads(sums xpu.Tensor, p xpu.Projections, dqkv, dk xpu.Tensor) {
	xpu.CheckSumHeads(sums, p, dqkv, dk)
	t := h.begin(operands{dst: sums.Floats(), x: dqkv.Floats(), y: dk.Floats()})
	defer t.end()
	t.setProjections(p)
	t.split(p.QKV.Dim(0), func(t *task, _, lo, hi int) {
		p := &t.projections
		d, s, width := p.Size, p.Length, p.Width()
		q, kv, tokens := p.Heads.Heads*d, p.KVHeads*d, len(t.dst)/2
		numbers, gradient := t.host.buffers.Get(), t.host.buffers.Get()
		defer t.host.buffers.Put(numbers)
		defer t.host.buffers.Put(gradient)
		dy := room(gradient, d)
		for i := lo; i < hi; i++ {
			x := row(p.QKV, p.halves, i, width, numbers)
			if len(t.x) == 0 {
				t.dst[i], t.dst[tokens+i] = float32(SumSquares(x[:q])), float32(SumSquares(x[q:q+kv]))
				continue
			}
			row, pos := i/s, i%s
			turn := p.rotation(pos)
			// part returns a head's part of the sum.
			part := func(dhead, x, w []float32, r, scale float32) float64 {
				turn.turnBack(dy, dhead, scale)
				clipGrad(dy, x, w, r, p.Clip)
				MulScaled(dy, w, 1, dy)
				return float64(Dot(dy, x))
			}
			queries, keys := 0.0, 0.0
			for a := range p.Heads.Heads {
				queries += part(t.x[i*width+a*d:][:d], x[a*d:][:d], p.QWeight[a*d:][:d], p.RQ[i], p.scale)
			}
			for g := range p.KVHeads {
				keys += part(t.y[((row*p.KVHeads+g)*s+pos)*d:][:d], x[q+g*d:][:d], p.KWeight[g*d:][:d], p.RK[i], 1)
			}
			t.dst[i], t.dst[tokens+i] = float32(queries), float32(keys)
		}
	})
}

// projectionGrad turns dy into the gradient of the projection x of token i, in place. dy is the
// gradient of the clipped projection, or with weights w the gradient of its clipped norms. inverse
// holds the inverse roots of the norms of all tokens. mean has the mean of w·dy·x if the norm is
// over more columns than x, and is otherwise empty.
func projectionGrad(dy, x, w, dw, inverse, mean []float32, i int, bound float64) {
	if len(w) == 0 {
		clipGrad(dy, x, nil, 1, bound)
		return
	}
	n := len(w)
	for j := range len(x) / n { // the norms
		dy, x, r := dy[j*n:][:n], x[j*n:][:n], inverse[i*len(x)/n+j]
		clipGrad(dy, x, w, r, bound)
		a, b := rmsNormGrad(dy, x, w, dw[:n], r)
		if len(mean) > 0 {
			b = r * r * r * mean[0]
		}
		Scale(dy, a)
		Axpy(dy, -b, x)
	}
}

// clipGrad clears the gradient where clipping took effect: where w·x·r, or x·r without w, is beyond
// the bound.
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
