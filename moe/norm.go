package moe

import (
	"math"

	"mula/xpu/cpu"
)

// split calls f for the pieces [lo, hi) of n things, at once on the workers of the device. part numbers the pieces from 0; there are
// min(n, parts) of them, whatever the number of workers.
func (m *Model) split(n int, f func(part, lo, hi int)) {
	pieces := min(n, parts)
	m.dev.Parallel(pieces, func(i int) { f(i, n*i/pieces, n*(i+1)/pieces) })
}

// rmsInverse is (mean x² + eps)^(-1/2).
func rmsInverse(x []float32, eps float64) float32 {
	return float32(1 / math.Sqrt(cpu.SumSquares(x)/float64(len(x))+eps))
}

// normalize writes the norm of the rows of x [T, H] to h and keeps their statistics: RMSNorm with weights w, or LayerNorm without any.
// Like the original, RMSNorm multiplies by the inverse first and by the weight then.
func (m *Model) normalize(h, x, w, mean, rstd []float32) {
	width := m.cfg.HiddenSize
	m.split(len(x)/width, func(_, lo, hi int) {
		for t := lo; t < hi; t++ {
			row := x[t*width:][:width]
			if m.cfg.moe() {
				rstd[t] = rmsInverse(row, m.cfg.NormEps)
			} else {
				mean[t], rstd[t] = layerStatistics(row, m.cfg.NormEps)
			}
		}
		m.applyNorm(h, x, w, mean, rstd, lo, hi)
	})
}

// renormalize computes h again from the statistics that normalize kept.
func (m *Model) renormalize(h, x, w, mean, rstd []float32) {
	m.split(len(x)/m.cfg.HiddenSize, func(_, lo, hi int) { m.applyNorm(h, x, w, mean, rstd, lo, hi) })
}

func (m *Model) applyNorm(h, x, w, mean, rstd []float32, lo, hi int) {
	width := m.cfg.HiddenSize
	for t := lo; t < hi; t++ {
		src, dst, r := x[t*width:][:width], h[t*width:][:width], rstd[t]
		if m.cfg.moe() {
			for i, v := range src {
				dst[i] = w[i] * (v * r)
			}
		} else {
			mu := mean[t]
			for i, v := range src {
				dst[i] = (v - mu) * r
			}
		}
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

// normGrad adds the gradient that comes through a norm, dh, to dx, and the gradient of its weights to dw.
func (m *Model) normGrad(dx, dh, x, w, dw, mean, rstd []float32) {
	width := m.cfg.HiddenSize
	m.split(len(x)/width, func(part, lo, hi int) {
		if !m.cfg.moe() {
			for t := lo; t < hi; t++ {
				layerNormGrad(dx[t*width:][:width], dh[t*width:][:width], x[t*width:][:width], mean[t], rstd[t])
			}
			return
		}
		sums := m.ws.partial[part*width:][:width]
		clear(sums)
		for t := lo; t < hi; t++ {
			dst, dy, row := dx[t*width:][:width], dh[t*width:][:width], x[t*width:][:width]
			a, b := rmsNormGrad(dy, row, w, sums, rstd[t])
			w := w[:width]
			for i, u := range dy {
				dst[i] += a*(w[i]*u) - b*row[i]
			}
		}
	})
	if m.cfg.moe() {
		m.addPartials(dw, width, 0, len(x)/width)
	}
}

// rmsNormGrad adds a row's share to the gradient of the weights, dw, and returns the factors of the gradient of its input,
// dx = a·(w·dy) - b·x.
//
// With r = (mean x² + eps)^(-1/2) and y = w·x·r: dx = r·w·dy - x·(r³/n)·Σ w·dy·x, dw = Σ dy·x·r.
func rmsNormGrad(dy, x, w, dw []float32, r float32) (a, b float32) {
	n := len(dy)
	x, w, dw = x[:n], w[:n], dw[:n]
	var s [4]float32 // four sums, so that an addition need not wait for the one before
	i := 0
	for ; i+4 <= n; i += 4 {
		d, x, w, dw := dy[i:i+4:i+4], x[i:i+4:i+4], w[i:i+4:i+4], dw[i:i+4:i+4]
		p0, p1, p2, p3 := d[0]*x[0], d[1]*x[1], d[2]*x[2], d[3]*x[3]
		dw[0] += p0 * r
		dw[1] += p1 * r
		dw[2] += p2 * r
		dw[3] += p3 * r
		s[0] += p0 * w[0]
		s[1] += p1 * w[1]
		s[2] += p2 * w[2]
		s[3] += p3 * w[3]
	}
	for ; i < n; i++ {
		p := dy[i] * x[i]
		dw[i] += p * r
		s[0] += p * w[i]
	}
	return r, r * r * r / float32(n) * ((s[0] + s[1]) + (s[2] + s[3]))
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
