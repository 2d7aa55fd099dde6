package cpu

import "mula/xpu"

// columns are the widths of two matrices, and the distances between their rows.
type columns struct{ dst, x, dstStride, xStride int }

// latent is an [xpu.LatentHeads] in host memory.
type latent struct {
	xpu.LatentSizes
	Queries, KeysValues, Rotated, Cos, Sin, Q, K, V []float32
	Interleaved                                     bool
	Scale                                           float32
	First                                           int
}

func (t *task) setLatent(l xpu.LatentHeads) {
	t.latent = latent{l.Sizes(), l.Queries.Floats(), l.KeysValues.Floats(), l.Rotated.Floats(), l.Cos.Floats(),
		l.Sin.Floats(), l.Q.Floats(), l.K.Floats(), l.V.Floats(), l.Interleaved, l.Scale, l.First}
}

// rotation returns the rotation of a position.
func (l *latent) rotation(position int) (cos, sin []float32) {
	half := l.Turned / 2
	return l.Cos[position*half:][:half], l.Sin[position*half:][:half]
}

// pair returns the elements of a projection that are rotated together.
func (l *latent) pair(j int) (int, int) {
	if l.Interleaved {
		return 2 * j, 2*j + 1
	}
	return j, j + l.Turned/2
}

// turn rotates x, times scale, as the elements of a head from Plain on.
func (l *latent) turn(dst, x, cos, sin []float32, scale float32) {
	for j, c := range cos {
		one, two := l.pair(j)
		u, v, s := x[one], x[two], sin[j]
		dst[j], dst[j+len(cos)] = (u*c-v*s)*scale, (v*c+u*s)*scale
	}
}

// turnBack adds the gradient of the x of method turn to dx, given the gradient dy of its dst.
func (l *latent) turnBack(dx, dy, cos, sin []float32, scale float32) {
	for j, c := range cos {
		one, two := l.pair(j)
		u, v, s := dy[j], dy[j+len(cos)], sin[j]
		dx[one] += (u*c + v*s) * scale
		dx[two] += (v*c - u*s) * scale
	}
}

// SplitLatent splits projections into heads; see [xpu.Layers].
func (h *Host) SplitLatent(x xpu.LatentHeads) {
	xpu.CheckSplitLatent(x)
	t := h.begin(operands{})
	defer t.end()
	t.setLatent(x)
	t.split(x.Queries.Dim(0), func(t *task, _, lo, hi int) {
		l := &t.latent
		d, plain, keys := l.Size, l.Plain, l.Plain+l.Turned
		for i := lo; i < hi; i++ {
			row, position := i/l.Length, i%l.Length
			cos, sin := l.rotation(l.First + position)
			for a := range l.Heads.Heads {
				q := l.Queries[(i*l.Heads.Heads+a)*keys:][:keys]
				kv := l.KeysValues[(i*l.Heads.Heads+a)*(plain+l.Values):][:plain+l.Values]
				head := l.Q[((row*l.Heads.Heads+a)*l.Length+position)*d:][:d]
				for j, v := range q[:plain] {
					head[j] = v * l.Scale
				}
				l.turn(head[plain:], q[plain:], cos, sin, l.Scale)
				clear(head[keys:])
				at := ((row*l.Heads.Heads+a)*l.Capacity + l.First + position) * d
				head = l.K[at:][:d]
				copy(head, kv[:plain])
				l.turn(head[plain:], l.Rotated[i*l.Turned:][:l.Turned], cos, sin, 1)
				clear(head[keys:])
				head = l.V[at:][:d]
				copy(head, kv[plain:])
				clear(head[l.Values:])
			}
		}
	})
}

// JoinLatent computes the gradients of the projections; see [xpu.Layers].
func (h *Host) JoinLatent(x xpu.LatentHeads, dq, dk, dv xpu.Tensor) {
	xpu.CheckJoinLatent(x, dq, dk, dv)
	t := h.begin(operands{dst: dq.Floats(), x: dk.Floats(), y: dv.Floats()})
	defer t.end()
	t.setLatent(x)
	t.split(x.Queries.Dim(0), func(t *task, _, lo, hi int) {
		l := &t.latent
		d, plain, keys := l.Size, l.Plain, l.Plain+l.Turned
		for i := lo; i < hi; i++ {
			row, position := i/l.Length, i%l.Length
			cos, sin := l.rotation(position)
			shared := l.Rotated[i*l.Turned:][:l.Turned]
			clear(shared)
			for a := range l.Heads.Heads {
				q := l.Queries[(i*l.Heads.Heads+a)*keys:][:keys]
				kv := l.KeysValues[(i*l.Heads.Heads+a)*(plain+l.Values):][:plain+l.Values]
				from := t.dst[(i*l.Heads.Heads+a)*d:][:d]
				for j, v := range from[:plain] {
					q[j] = v * l.Scale
				}
				clear(q[plain:])
				l.turnBack(q[plain:], from[plain:], cos, sin, l.Scale)
				at := ((row*l.Heads.Heads+a)*l.Length + position) * d
				copy(kv[:plain], t.x[at:])
				l.turnBack(shared, t.x[at+plain:], cos, sin, 1)
				copy(kv[plain:], t.y[at:][:l.Values])
			}
		}
	})
}

// CopyColumns copies columns; see [xpu.Layers].
func (h *Host) CopyColumns(dst, x xpu.Tensor) {
	xpu.CheckCopyColumns(dst, x)
	t := h.begin(operands{dst: dst.Floats(), x: x.Floats()})
	defer t.end()
	t.columns = columns{dst.Dim(1), x.Dim(1), 0, 0}
	t.columns.dstStride, _, _ = dst.Stored()
	t.columns.xStride, _, _ = x.Stored()
	t.split(dst.Dim(0), func(t *task, _, lo, hi int) {
		c := &t.columns
		for i := lo; i < hi; i++ {
			row := t.dst[i*c.dstStride:][:c.dst]
			n := copy(row, t.x[i*c.xStride:][:c.x])
			clear(row[n:])
		}
	})
}
