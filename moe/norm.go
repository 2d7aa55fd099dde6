package moe

import (
	"math"

	"mula/xpu/cpu"
)

// A norm is one of the three places of a layer, or of the model's end, where the residual stream x [T, H] is normalised: RMSNorm with
// weights, or LayerNorm without any. mean and rstd are what the forward pass keeps of each row; RMSNorm has no mean.
type norm struct {
	weights    tensor
	x          []float32
	mean, rstd []float32
}

// rmsInverse is (mean x² + eps)^(-1/2).
func rmsInverse(x []float32, eps float64) float32 {
	return float32(1 / math.Sqrt(cpu.SumSquares(x)/float64(len(x))+eps))
}

// normalize writes the norm of the rows of x to h and keeps their statistics. Like the original, RMSNorm multiplies by the inverse first
// and by the weight then.
func (m *Model) normalize(h []float32, n norm) {
	m.split(len(n.x)/m.cfg.HiddenSize, operands{dst: h, norm: n}, func(m *Model, o *operands, _, lo, hi int) {
		width, n := m.cfg.HiddenSize, &o.norm
		for t := lo; t < hi; t++ {
			row := n.x[t*width:][:width]
			if m.cfg.moe() {
				n.rstd[t] = rmsInverse(row, m.cfg.NormEps)
			} else {
				n.mean[t], n.rstd[t] = layerStatistics(row, m.cfg.NormEps)
			}
			m.applyNorm(o.dst[t*width:][:width], n, t)
		}
	})
}

// renormalize computes h again from the statistics that normalize kept.
func (m *Model) renormalize(h []float32, n norm) {
	m.split(len(n.x)/m.cfg.HiddenSize, operands{dst: h, norm: n}, func(m *Model, o *operands, _, lo, hi int) {
		width := m.cfg.HiddenSize
		for t := lo; t < hi; t++ {
			m.applyNorm(o.dst[t*width:][:width], &o.norm, t)
		}
	})
}

// applyNorm writes the norm of row t to dst.
func (m *Model) applyNorm(dst []float32, n *norm, t int) {
	row, r := n.x[t*len(dst):][:len(dst)], n.rstd[t]
	if m.cfg.moe() {
		cpu.MulScaled(dst, n.weights.w, r, row)
		return
	}
	mu := n.mean[t]
	for i, v := range row {
		dst[i] = (v - mu) * r
	}
}

// layerStatistics is the mean of x and (variance + eps)^(-1/2).
func layerStatistics(x []float32, eps float64) (mean, rstd float32) {
	sum := 0.0
	for _, v := range x {
		sum += float64(v)
	}
	mu := sum / float64(len(x))
	squares := 0.0
	for _, v := range x {
		d := float64(v) - mu
		squares += d * d
	}
	return float32(mu), float32(1 / math.Sqrt(squares/float64(len(x))+eps))
}

// normGrad adds the gradient that comes through a norm, dh, to dx, and the gradient of its weights to theirs. It spoils dh.
func (m *Model) normGrad(dx, dh []float32, n norm) {
	width := m.cfg.HiddenSize
	m.split(len(n.x)/width, operands{dst: dx, y: dh, norm: n}, func(m *Model, o *operands, part, lo, hi int) {
		width, n := m.cfg.HiddenSize, &o.norm
		if !m.cfg.moe() {
			for t := lo; t < hi; t++ {
				layerNormGrad(o.dst[t*width:][:width], o.y[t*width:][:width], n.x[t*width:][:width], n.mean[t], n.rstd[t])
			}
			return
		}
		sums := m.ws.partial[part*width:][:width]
		clear(sums)
		for t := lo; t < hi; t++ {
			dst, dy, row := o.dst[t*width:][:width], o.y[t*width:][:width], n.x[t*width:][:width]
			a, b := rmsNormGrad(dy, row, n.weights.w, sums, n.rstd[t])
			cpu.Axpy(dst, a, dy)
			cpu.Axpy(dst, -b, row)
		}
	})
	if m.cfg.moe() {
		m.addPartials(n.weights.g, width, 0, len(n.x)/width)
	}
}

// rmsNormGrad adds a row's share to the gradient of the weights, dw, multiplies dy by the weights, and returns the factors of the gradient
// of its input, dx = a·(w·dy) - b·x.
//
// With r = (mean x² + eps)^(-1/2) and y = w·x·r: dx = r·w·dy - x·(r³/n)·Σ w·dy·x, dw = Σ dy·x·r.
func rmsNormGrad(dy, x, w, dw []float32, r float32) (a, b float32) {
	cpu.AddProduct(dw, r, dy, x)
	cpu.MulScaled(dy, w, 1, dy)
	return r, r * r * r / float32(len(dy)) * cpu.Dot(dy, x)
}

// layerNormGrad adds the gradient of a LayerNorm without weights to dx. With y = (x-mean)·r: dx = r·(dy - mean(dy) - y·mean(dy·y)).
func layerNormGrad(dx, dy, x []float32, mean, r float32) {
	x, dx = x[:len(dy)], dx[:len(dy)]
	var s1, s2 float64
	for i, d := range dy {
		s1 += float64(d)
		s2 += float64(d) * float64((x[i]-mean)*r)
	}
	n := float64(len(dy))
	m1, m2 := float32(s1/n), float32(s2/n)
	for i, d := range dy {
		dx[i] += r * (d - m1 - (x[i]-mean)*r*m2)
	}
}

// addPartials adds to dw the columns [first, first+len(dw)) of the partial sums that a split over n things left in rows of the given width.
func (m *Model) addPartials(dw []float32, width, first, n int) {
	for part := range min(n, parts) {
		cpu.Axpy(dw, 1, m.ws.partial[part*width+first:][:len(dw)])
	}
}
