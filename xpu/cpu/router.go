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
	bias               []float32 // of kind
	kind               xpu.RouterKind
}

func routingOf(r xpu.Routing) routing {
	return routing{r.Probs.Dim(1), r.Chosen.Dim(1), r.Probs.Floats(), r.LSE.Floats(), r.Weight.Floats(),
		r.Chosen.Ints(), r.Counts.Ints(), r.RowOf.Ints(), r.TokenOf.Ints(), r.Bias.Floats(), r.RouterKind}
}

// RoutingDivisor returns the number that divides the scores p of a token's chosen experts in their
// routing weights, without the factor. It adds scores in the order of chosen.
func RoutingDivisor(k xpu.RouterKind, p []float32, chosen []int32) (sum float32) {
	if !k.Renormalize {
		return 1
	}
	for _, e := range chosen {
		sum += p[e]
	}
	if k.Sigmoid {
		sum += 1e-20
	}
	return max(sum, k.LeastSum)
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
			if r.kind.Sigmoid {
				r.LSE[i] = sigmoids(p, z, sums)
			} else {
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
			}
			if t.uniform {
				inTurn(r.Chosen[i*k:][:k], i, e)
			} else {
				r.choose(r.Chosen[i*k:][:k], p, t.host)
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

// sigmoids sets p to the sigmoids of a token's logits z and returns their sum. It adds the token's
// distribution, p divided by the sum, and its entropy to the sums of Route.
func sigmoids(p, z []float32, sums []float64) float32 {
	for j, v := range z {
		p[j] = -v
	}
	ExpSum(p, p, 0)
	sum, logs := 0.0, 0.0
	for j, v := range p {
		p[j] = 1 / (1 + v)
		sum += float64(p[j])
	}
	for j, v := range p {
		sums[j] += float64(v) / sum
		if v > 0 {
			logs += float64(v) * math.Log(float64(v))
		}
	}
	sums[len(p)+1] += math.Log(sum) - logs/sum
	return float32(sum)
}

// choose fills chosen with a token's experts, given its scores p.
func (r *routing) choose(chosen []int32, p []float32, h *Host) {
	if len(r.bias) == 0 && r.kind.Groups <= 1 {
		top(chosen, 0, p, 0, len(p))
		return
	}
	buffer := h.buffers.Get()
	defer h.buffers.Put(buffer)
	keys := room(buffer, r.Experts+max(1, r.kind.Groups))
	keys, values := keys[:r.Experts], keys[r.Experts:]
	copy(keys, p)
	for j, b := range r.bias {
		keys[j] += b
	}
	if r.kind.Groups <= 1 {
		top(chosen, 0, keys, 0, len(keys))
		return
	}
	size := r.Experts / r.kind.Groups
	for g := range values {
		var two [2]int32
		best := two[:1]
		if r.kind.SumOfTwo {
			best = two[:]
		}
		group := keys[g*size:][:size]
		top(best, 0, group, 0, size)
		values[g] = 0
		for _, e := range best {
			values[g] += group[e]
		}
	}
	n := 0
	for g, v := range values {
		before := 0 // groups with a larger value, or the same and a lower index
		for other, w := range values {
			if w > v || w == v && other < g {
				before++
			}
		}
		if before < r.kind.TopGroups {
			n = top(chosen, n, keys, g*size, (g+1)*size)
		}
	}
}

// top inserts the indices from first to end of keys into chosen, which has n indices already, the
// largest key first, and returns their number. Of equal keys the lower index is first.
func top(chosen []int32, n int, keys []float32, first, end int) int {
	for j := first; j < end; j++ {
		at := n
		for at > 0 && keys[j] > keys[chosen[at-1]] {
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
	return n
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
	at, factor := int32(0), r.kind.Factor()
	for e, n := range r.Counts[:r.Experts] {
		start[e] = at
		at += n
	}
	for token := range len(r.Chosen) / r.PerToken {
		chosen, p := r.Chosen[token*r.PerToken:][:r.PerToken], r.Probs[token*r.Experts:][:r.Experts]
		sum := RoutingDivisor(r.kind, p, chosen)
		for j, e := range chosen {
			row := start[e]
			start[e]++
			r.RowOf[token*r.PerToken+j], r.TokenOf[row], r.Weight[row] = row, int32(token), p[e]/sum*factor
		}
	}
}

// RouteGrad computes the gradient of the router's logits; see [xpu.Layers]. The softmax precedes
// the choice, so its gradient reaches all experts.
func (h *Host) RouteGrad(r xpu.Routing, dlogits, slope, dweight xpu.Tensor, zFactor float64) {
	xpu.CheckRouteGrad(r, dlogits, slope, dweight, zFactor)
	h.split(dlogits.Dim(0), operands{routing: routingOf(r), dst: dlogits.Floats(), x: slope.Floats(),
		y: dweight.Floats(), width: dlogits.Elements() / slope.Elements(), // tokens with the same slopes
		factor: zFactor}, func(t *task, _, lo, hi int) {
		r, e, k, factor := &t.routing, t.routing.Experts, t.routing.PerToken, t.routing.kind.Factor()
		for i := lo; i < hi; i++ {
			p, dz := r.Probs[i*e:][:e], t.dst[i*e:][:e]
			copy(dz, t.x[i/t.width*e:][:e])
			if r.kind.Sigmoid {
				share := 1 / r.LSE[i]
				mean := Dot(p, dz) * share
				for j := range dz {
					dz[j] = (dz[j] - mean) * share
				}
			}
			chosen, rows, scale, mean := r.Chosen[i*k:][:k], r.RowOf[i*k:][:k], float32(1), float32(0)
			if r.kind.Renormalize {
				sum := RoutingDivisor(r.kind, p, chosen)
				scale = 1 / sum
				if least := r.kind.LeastSum; least == 0 || sum > least {
					for j, e := range chosen {
						mean += p[e] * scale * t.y[rows[j]]
					}
				}
			}
			for j, e := range chosen {
				dz[e] += (t.y[rows[j]] - mean) * scale * factor
			}
			if r.kind.Sigmoid {
				for j, v := range p {
					dz[j] *= v * (1 - v)
				}
			} else {
				SoftmaxGrad(dz, p, dz, Dot(p, dz)-float32(t.factor)*r.LSE[i])
			}
		}
	})
}
