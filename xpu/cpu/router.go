package cpu

import (
	"math"

	"mula/xpu"
)

// routing is an [xpu.Routing] in host memory.
type routing struct {
	Experts, PerToken  int
	Probs, LSE, Weight []float32
	Chosen, Counts     []int32
	RowOf, TokenOf     []int32
	Renormalize        bool
}

func routingOf(r xpu.Routing) routing {
	return routing{r.Probs.Dim(1), r.Chosen.Dim(1), r.Probs.Floats(), r.LSE.Floats(), r.Weight.Floats(),
		r.Chosen.Ints(), r.Counts.Ints(), r.RowOf.Ints(), r.TokenOf.Ints(), r.Renormalize}
}

// Selected returns the sum of the elements of p at these indices, added in their order.
func Selected(p []float32, indices []int32) (sum float32) {
	for _, i := range indices {
		sum += p[i]
	}
	return sum
}

// Route computes the router's distribution and chooses experts; see [xpu.Layers].
func (h *Host) Route(choice xpu.Routing, logits xpu.Tensor, uniform bool, stats *xpu.RouterStats) {
	xpu.CheckRoute(choice, logits, stats)
	r := routingOf(choice)
	tokens, e := logits.Dim(0), logits.Dim(1)
	t := h.begin(operands{routing: r, x: logits.Floats(), uniform: uniform})
	defer t.end()
	room(&t.sums, min(tokens, parts)*(e+2))
	t.split(tokens, func(t *task, part, lo, hi int) {
		r, e, k := &t.routing, t.routing.Experts, t.routing.PerToken
		sums := t.sums[part*(e+2):][:e+2]
		clear(sums)
		for i := lo; i < hi; i++ {
			z, p := t.x[i*e:][:e], r.Probs[i*e:][:e]
			top := Max(z)
			sum := ExpSum(p, z, top)
			Scale(p, 1/sum)
			lse := float64(top) + math.Log(float64(sum))
			r.LSE[i] = float32(lse)
			for j, v := range p {
				sums[j] += float64(v)
			}
			sums[e] += lse * lse
			sums[e+1] += lse - float64(Dot(p, z)) // -ln p = lse - z
			if t.uniform {
				inTurn(r.Chosen[i*k:][:k], i, e)
			} else {
				topK(r.Chosen[i*k:][:k], p)
			}
		}
	})
	clear(stats.Probs[:e])
	stats.LSE2, stats.Entropy = 0, 0
	for part := range min(tokens, parts) {
		sums := t.sums[part*(e+2):][:e+2]
		for j := range e {
			stats.Probs[j] += sums[j]
		}
		stats.LSE2 += sums[e]
		stats.Entropy += sums[e+1]
	}
	clear(r.Counts[:e])
	for _, e := range r.Chosen[:tokens*r.PerToken] {
		r.Counts[e]++
	}
	for e, n := range r.Counts[:e] {
		stats.Counts[e] = int64(n)
	}
}

// topK fills chosen with the indices of the largest elements of p, the largest first. Of equal
// elements the lower index is first.
func topK(chosen []int32, p []float32) {
	n := 0
	for j, v := range p {
		at := n
		for at > 0 && v > p[chosen[at-1]] {
			at--
		}
		if at == len(chosen) {
			continue
		}
		if n < len(chosen) {
			n++
		}
		copy(chosen[at+1:n], chosen[at:n-1])
		chosen[at] = int32(j)
	}
}

// inTurn fills chosen with a token's experts under uniform routing.
func inTurn(chosen []int32, token, experts int) {
	for j := range chosen {
		chosen[j] = int32((token*len(chosen) + j) % experts)
	}
}

// SortRows orders the choices by expert and, within an expert, by token; see [xpu.Layers].
func (h *Host) SortRows(choice xpu.Routing) {
	xpu.CheckSortRows(choice)
	r := routingOf(choice)
	t := h.begin(operands{})
	defer t.end()
	start := room(&t.starts, r.Experts)
	at := int32(0)
	for e, n := range r.Counts[:r.Experts] {
		start[e] = at
		at += n
	}
	for token := range len(r.Chosen) / r.PerToken {
		chosen, p, sum := r.Chosen[token*r.PerToken:][:r.PerToken], r.Probs[token*r.Experts:][:r.Experts], float32(1)
		if r.Renormalize {
			sum = Selected(p, chosen)
		}
		for j, e := range chosen {
			row := start[e]
			start[e]++
			r.RowOf[token*r.PerToken+j], r.TokenOf[row], r.Weight[row] = row, int32(token), p[e]/sum
		}
	}
}

// RouteGrad computes the gradient of the router's logits; see [xpu.Layers]. The softmax precedes
// the choice, so the gradient reaches all experts.
func (h *Host) RouteGrad(r xpu.Routing, dlogits, slope, dweight xpu.Tensor, zFactor float64) {
	xpu.CheckRouteGrad(r, dlogits, slope, dweight)
	h.split(dlogits.Dim(0), operands{routing: routingOf(r), dst: dlogits.Floats(), x: slope.Floats(),
		y: dweight.Floats(), width: dlogits.Elements() / slope.Elements(), // tokens with the same slopes
		factor: zFactor}, func(t *task, _, lo, hi int) {
		r, e, k := &t.routing, t.routing.Experts, t.routing.PerToken
		for i := lo; i < hi; i++ {
			p, dz := r.Probs[i*e:][:e], t.dst[i*e:][:e]
			copy(dz, t.x[i/t.width*e:][:e])
			chosen, rows, scale, mean := r.Chosen[i*k:][:k], r.RowOf[i*k:][:k], float32(1), float32(0)
			if r.Renormalize {
				scale = 1 / Selected(p, chosen)
				for j, e := range chosen {
					mean += p[e] * scale * t.y[rows[j]]
				}
			}
			for j, e := range chosen {
				dz[e] += (t.y[rows[j]] - mean) * scale
			}
			SoftmaxGrad(dz, p, dz, Dot(p, dz)-float32(t.factor)*r.LSE[i])
		}
	})
}
