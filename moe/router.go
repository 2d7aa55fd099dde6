package moe

import (
	"math"

	"mula/xpu/cpu"
)

// route computes the router's distribution for the tokens of ws.h and chooses their experts. number is the layer's.
func (m *Model) route(l *layer, st *saved, number int) {
	c, w := m.cfg, &m.ws
	e, h, t := c.Experts, c.HiddenSize, w.shape.rows*w.shape.s
	m.dev.MatMul(false, true, t, e, h, w.h, h, l.router.w, h, w.router, e, false)
	m.split(t, operands{saved: st}, func(m *Model, o *operands, part, lo, hi int) {
		w, st, e, k := &m.ws, o.saved, m.cfg.Experts, m.cfg.ExpertsPerToken
		sums := w.psum[part*(e+2):][:e+2]
		clear(sums)
		for i := lo; i < hi; i++ {
			z, p := w.router[i*e:][:e], st.probs[i*e:][:e]
			top := cpu.Max(z)
			sum := cpu.ExpSum(p, z, top)
			cpu.Scale(p, 1/sum)
			lse := float64(top) + math.Log(float64(sum))
			st.zlse[i] = float32(lse)
			for j, v := range p {
				sums[j] += float64(v)
			}
			sums[e] += lse * lse
			sums[e+1] += lse - float64(cpu.Dot(p, z)) // -ln p = lse - z
			if m.parallel.UniformRouting {
				inTurn(st.chosen[i*k:][:k], i, e)
			} else {
				topK(st.chosen[i*k:][:k], p)
			}
		}
	})
	total := w.probSum[number*e:][:e]
	clear(total)
	w.z[number] = 0
	entropy := 0.0
	for part := range min(t, parts) {
		sums := w.psum[part*(e+2):][:e+2]
		for j := range total {
			total[j] += sums[j]
		}
		w.z[number] += sums[e]
		entropy += sums[e+1]
	}
	w.entropy[number] = entropy / float64(w.tokens())
	clear(st.counts)
	for _, e := range st.chosen {
		st.counts[e]++
	}
}

// topK fills chosen with the indices of the largest elements of p, largest first; of equal ones the lower index comes first.
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

// inTurn fills chosen with the experts that [Parallel.UniformRouting] gives to a token.
func inTurn(chosen []int32, token, experts int) {
	for j := range chosen {
		chosen[j] = int32((token*len(chosen) + j) % experts)
	}
}

// sort numbers the (token, expert) pairs by expert and, within an expert, by token.
func (st *routing) sort(k int) {
	var start [maxExperts]int32
	at := int32(0)
	for e, n := range st.counts {
		start[e] = at
		at += int32(n)
	}
	experts := len(st.counts)
	for pair, e := range st.chosen {
		token := pair / k
		r := start[e]
		start[e]++
		st.rowOf[pair], st.tokenOf[r], st.weight[r] = r, int32(token), st.probs[token*experts+int(e)]
	}
}

// tokens is the number of tokens that means are taken over. Without any the sums are zero, and so are the means.
func (w *workspace) tokens() int { return max(1, w.shape.rows*w.shape.s) }

// routerSums are what the losses of the router need of all layers up to one, added up layer by layer: for each expert the number of tokens
// that chose it, [E], and the sum over tokens of its probability, [E]; then the sum over layers of Σ_e c_le · (Σ_t p_le / T), and the sum
// over layers and tokens of the squared logsumexp.
type routerSums []float64 // [2E+2]

// routerSums is the number of sums.
func (m *Model) routerSums() int {
	if !m.cfg.moe() {
		return 0
	}
	return 2*m.cfg.Experts + 2
}

// add adds layer number of the pass at hand.
func (r routerSums) add(w *workspace, number int) {
	e, t := len(r)/2-1, float64(w.tokens())
	for i, p := range w.probSum[number*e:][:e] {
		n := float64(w.counts[number][i])
		r[i] += n
		r[e+i] += p
		r[2*e] += n * (p / t)
	}
	r[2*e+1] += w.z[number]
}

// auxLoss is the load-balancing loss of the pass, without its coefficient, from the sums over all layers.
func (m *Model) auxLoss(form AuxForm) float64 {
	c, sums := m.cfg, m.ws.sums
	e, layers, t, k := c.Experts, float64(c.Layers), float64(m.ws.tokens()), float64(c.ExpertsPerToken)
	switch form {
	case AuxHF:
		n, sum := layers*t, 0.0
		for i := range e {
			sum += sums[i] / n * (sums[e+i] / n)
		}
		return float64(e) * sum
	case AuxMegaBlocks:
		return float64(e) / (layers * t * k) * sums[2*e]
	}
	return 0
}

// zLoss is the router z-loss of the pass, without its coefficient, from the sum over all layers.
func (m *Model) zLoss() float64 {
	return m.ws.sums[2*m.cfg.Experts+1] / float64(m.cfg.Layers*m.ws.tokens()*m.cfg.ExpertsPerToken)
}

// auxSlope sets ws.slope to the derivative of the weighted load-balancing loss by the probabilities of a token of layer number. The counts
// of chosen experts are constants to it.
func (m *Model) auxSlope(o LossOptions, share float64, number int) {
	c, w := m.cfg, &m.ws
	layers, t := float64(c.Layers), float64(w.tokens())
	for i := range w.slope {
		var selected, factor float64
		switch o.Aux {
		case AuxHF:
			selected = w.sums[i]
			n := layers * t
			factor = 1 / (n * n)
		case AuxMegaBlocks:
			selected = float64(w.counts[number][i])
			factor = 1 / (layers * t * float64(c.ExpertsPerToken) * t)
		}
		w.slope[i] = float32(o.AuxCoefficient * share * float64(c.Experts) * factor * selected)
	}
}

// routeGrad turns the gradients of the routing weights, ws.dweight, and of the router's losses into the gradient of its logits, ws.router,
// and from there adds to the gradients of its weights and of its input, ws.dh.
//
// The softmax comes before the choice, so the gradient reaches all experts: dz_i = p_i·(G_i - Σ p_j·G_j) + z·lse·p_i, where G_i is the
// derivative of the loss by p_i: the routing weight's if i was chosen, and the slope of the load-balancing loss.
func (m *Model) routeGrad(l *layer, st *saved, zFactor float64) {
	c, w := m.cfg, &m.ws
	e, h, t := c.Experts, c.HiddenSize, w.shape.rows*w.shape.s
	m.split(t, operands{saved: st, scale: zFactor}, func(m *Model, o *operands, _, lo, hi int) {
		w, st, e, k := &m.ws, o.saved, m.cfg.Experts, m.cfg.ExpertsPerToken
		for i := lo; i < hi; i++ {
			p, dz := st.probs[i*e:][:e], w.router[i*e:][:e]
			copy(dz, w.slope)
			for j := i * k; j < (i+1)*k; j++ {
				dz[st.chosen[j]] += w.dweight[st.rowOf[j]]
			}
			cpu.SoftmaxGrad(dz, p, dz, cpu.Dot(p, dz)-float32(o.scale)*st.zlse[i])
		}
	})
	m.dev.MatMul(true, false, e, h, t, w.router, e, w.h, h, l.router.g, h, true)
	m.dev.MatMul(false, false, t, h, e, w.router, e, l.router.w, h, w.dh, h, true)
}
