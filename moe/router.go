package moe

import (
	"math"

	"mula/xpu/cpu"
)

// route computes the router's distribution for the tokens of ws.h, chooses the experts and sorts the rows. number is the layer's.
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
			topK(st.chosen[i*k:][:k], p)
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
	w.entropy[number] = entropy / float64(t)
	st.sort(c.ExpertsPerToken)
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

// sort numbers the (token, expert) pairs by expert and, within an expert, by token.
func (st *routing) sort(k int) {
	clear(st.counts)
	for _, e := range st.chosen {
		st.counts[e]++
	}
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

// auxLoss is the load-balancing loss of the pass, without its coefficient.
func (m *Model) auxLoss(form AuxForm, counts [][]int64) float64 {
	c, w := m.cfg, &m.ws
	e, layers, t, k := c.Experts, float64(c.Layers), float64(w.shape.rows*w.shape.s), float64(c.ExpertsPerToken)
	sum := 0.0
	switch form {
	case AuxHF:
		n := layers * t
		for i := range e {
			var selected, p float64
			for l := range c.Layers {
				selected += float64(counts[l][i])
				p += w.probSum[l*e+i]
			}
			sum += selected / n * (p / n)
		}
		return float64(e) * sum
	case AuxMegaBlocks:
		for l := range c.Layers {
			for i := range e {
				sum += float64(counts[l][i]) * (w.probSum[l*e+i] / t)
			}
		}
		return float64(e) / (layers * t * k) * sum
	}
	return 0
}

// zLoss is the router z-loss of the pass, without its coefficient.
func (m *Model) zLoss() float64 {
	sum := 0.0
	for _, z := range m.ws.z {
		sum += z
	}
	return sum / float64(m.cfg.Layers*m.ws.shape.rows*m.ws.shape.s*m.cfg.ExpertsPerToken)
}

// auxSlope sets ws.slope to the derivative of the weighted load-balancing loss by the probabilities of a token of layer number. The counts
// of chosen experts are constants to it.
func (m *Model) auxSlope(o LossOptions, share float64, counts [][]int64, number int) {
	c, w := m.cfg, &m.ws
	layers, t := float64(c.Layers), float64(w.shape.rows*w.shape.s)
	for i := range w.slope {
		var selected, factor float64
		switch o.Aux {
		case AuxHF:
			for l := range c.Layers {
				selected += float64(counts[l][i])
			}
			n := layers * t
			factor = 1 / (n * n)
		case AuxMegaBlocks:
			selected = float64(counts[number][i])
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
