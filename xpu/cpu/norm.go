package cpu

import (
	"math"

	"mula/xpu"
)

// rmsInverse returns (mean x² + eps)^(-1/2).
func rmsInverse(x []float32, eps float64) float32 {
	return float32(1 / math.Sqrt(SumSquares(x)/float64(len(x))+eps))
}

// norm is an [xpu.Norm] in host memory.
type norm struct {
	Width              int
	Epsilon            float64
	Weight, Mean, RStd []float32
}

func (t *task) setNorm(n xpu.Norm, width int) {
	t.norm = norm{width, n.Epsilon, t.weights(0, n.Weight), n.Mean.Floats(), n.RStd.Floats()}
}

// Normalize writes the norm of the rows of x to y; see [xpu.Layers]. Like the original, RMSNorm
// multiplies by the inverse first and then by the weight.
func (h *Host) Normalize(y, x xpu.Tensor, n xpu.Norm, known bool) {
	xpu.CheckNormalize(y, x, n)
	t := h.begin(operands{dst: y.Floats(), x: x.Floats(), known: known})
	defer t.end()
	t.setNorm(n, x.Dim(1))
	t.split(x.Dim(0), func(t *task, _, lo, hi int) {
		n := &t.norm
		for i := lo; i < hi; i++ {
			row, dst := t.x[i*n.Width:][:n.Width], t.dst[i*n.Width:][:n.Width]
			switch {
			case t.known:
			case len(n.Weight) > 0:
				n.RStd[i] = rmsInverse(row, n.Epsilon)
			default:
				n.Mean[i], n.RStd[i] = layerStatistics(row, n.Epsilon)
			}
			r := n.RStd[i]
			if len(n.Weight) > 0 {
				MulScaled(dst, n.Weight[:n.Width], r, row)
				continue
			}
			mu := n.Mean[i]
			for j, v := range row {
				dst[j] = (v - mu) * r
			}
		}
	})
}

// layerStatistics returns the mean of x and (variance + eps)^(-1/2).
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

// NormGrad computes the gradient of a norm; see [xpu.Layers].
func (h *Host) NormGrad(dx, dh, x xpu.Tensor, n xpu.Norm, dweight xpu.Tensor) {
	xpu.CheckNormGrad(dx, dh, x, n, dweight)
	rows, width := x.Dim(0), x.Dim(1)
	t := h.begin(operands{dst: dx.Floats(), y: dh.Floats(), x: x.Floats()})
	defer t.end()
	t.setNorm(n, width)
	if !n.Weight.Present() {
		t.split(rows, func(t *task, _, lo, hi int) {
			n, width := &t.norm, t.norm.Width
			for i := lo; i < hi; i++ {
				layerNormGrad(t.dst[i*width:][:width], t.y[i*width:][:width], t.x[i*width:][:width], n.Mean[i],
					n.RStd[i])
			}
		})
		return
	}
	room(&t.partial, min(rows, parts)*width)
	t.split(rows, func(t *task, part, lo, hi int) {
		n, width := &t.norm, t.norm.Width
		sums := t.partial[part*width:][:width]
		clear(sums)
		for i := lo; i < hi; i++ {
			dst, dy, row := t.dst[i*width:][:width], t.y[i*width:][:width], t.x[i*width:][:width]
			a, b := rmsNormGrad(dy, row, n.Weight[:width], sums, n.RStd[i])
			Axpy(dst, a, dy)
			Axpy(dst, -b, row)
		}
	})
	t.addPartials(dweight, width, 0, rows)
}

// rmsNormGrad adds a row's part to the gradient of the weights, dw, multiplies dy by the weights,
// and returns the factors of the gradient of its input, dx = a·(w·dy) - b·x.
func rmsNormGrad(dy, x, w, dw []float32, r float32) (a, b float32) {
	AddProduct(dw, r, dy, x)
	MulScaled(dy, w, 1, dy)
	return r, r * r * r / float32(len(dy)) * Dot(dy, x)
}

// layerNormGrad adds the gradient of a LayerNorm without weights to dx.
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
