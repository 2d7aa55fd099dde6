package moe

import (
	"context"
	"fmt"
	"slices"

	"mula/xpu"
	"mula/xpu/comm"
)

// route computes the router's distribution for the tokens in ws.h and chooses their experts.
func (m *Model) route(l *layer, st *saved) {
	w := &m.ws
	if l.routerBias.w.Present() {
		m.dev.Embed(w.router, l.routerBias.w.Reshape(1, m.cfg.Experts), m.row0())
	}
	m.dev.MatMul(w.router, w.h, l.router.w.T(), xpu.MatMulOptions{Accumulate: l.routerBias.w.Present()})
	st.routing.Bias = l.bias
	m.dev.Route(st.routing, w.router, m.parallel.UniformRouting, &w.routers[l.sparse])
}

// settle waits for the commands given so far, and adds up the router measurements of the current
// flight.
func (m *Model) settle(ctx context.Context) error {
	if err := m.dev.Wait(ctx); err != nil {
		return fmt.Errorf("a pass over %d rows of %d tokens: %w", m.ws.shape.rows, m.ws.shape.s, err)
	}
	if m.cfg.moe() {
		w := &m.ws
		for number := range w.routers {
			w.sums.add(w, number)
			w.entropy[number] = w.routers[number].Entropy / float64(w.tokens())
		}
	}
	return nil
}

// tokens returns the number of tokens for means, at least 1: without tokens, sums and means are
// zero.
func (w *workspace) tokens() int { return max(1, w.shape.tokens()) }

// routerSums are the sums over layers that the router losses need, added layer by layer: for each
// expert the number of tokens that chose it, [E], and the sum over tokens of its probability, [E];
// then the sum over layers of Σ_e c_le · (Σ_t p_le / T), and the sum over layers and tokens of the
// squared logsumexp.
type routerSums []float64 // [2E+2]

// routerSums returns the number of sums.
func (m *Model) routerSums() int {
	if !m.cfg.moe() {
		return 0
	}
	return 2*m.cfg.Experts + 2
}

// add adds a layer of the current pass, the given one of those with experts.
func (r routerSums) add(w *workspace, number int) {
	e, t, layer := len(r)/2-1, float64(w.tokens()), &w.routers[number]
	for i, p := range layer.Probs {
		n := float64(layer.Counts[i])
		r[i] += n
		r[e+i] += p
		r[2*e] += n * (p / t)
	}
	r[2*e+1] += layer.LSE2
}

// meanLayers returns the number of layers with experts of the complete model that means over layers
// include: without layers of multi-token prediction that the pass does not compute.
func (m *Model) meanLayers() int {
	if m.ws.shape.predicts {
		return m.expertLayers
	}
	return m.expertLayers - m.cfg.PredictionLayers
}

// auxLoss returns the load-balancing loss of the pass, without its coefficient, from the sums over
// all layers.
func (m *Model) auxLoss(form AuxForm) float64 {
	c, sums := m.cfg, m.ws.sums
	e, layers, t, k := c.Experts, float64(m.meanLayers()), float64(m.ws.tokens()), float64(c.ExpertsPerToken)
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

// zLoss returns the router z-loss of the pass, without its coefficient, from the sum over all
// layers.
func (m *Model) zLoss() float64 {
	return m.ws.sums[2*m.cfg.Experts+1] / float64(m.meanLayers()*m.ws.tokens()*m.cfg.ExpertsPerToken)
}

// auxSlopes sets ws.slopes to the derivatives of the weighted load-balancing loss by the
// probabilities of a token of each layer, which are equal for all rows of the batch. It treats the
// counts of chosen experts as constants.
func (m *Model) auxSlopes(o LossOptions, share float64) {
	c, w := &m.cfg, &m.ws
	layers, t := float64(m.meanLayers()), float64(w.tokens())
	slopes := room(&w.floats, w.slopes.Elements())
	for number := range w.routers {
		rows := slopes[number*w.slopes.Dim(1)*c.Experts:][:w.slopes.Dim(1)*c.Experts]
		for i := range c.Experts {
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
			rows[i] = float32(o.AuxCoefficient * share * float64(c.Experts) * factor * selected)
		}
		for row := range slices.Chunk(rows[c.Experts:], c.Experts) {
			copy(row, rows)
		}
	}
	m.dev.Write(w.slopes.Flat(), slopes)
}

// sequenceSlopes sets ws.slopes for [AuxSequence] and returns the loss without its coefficient.
// tokens is the number of tokens of the step. Ranks that share rows add their counts.
func (m *Model) sequenceSlopes(ctx context.Context, o LossOptions, tokens int64) (aux float64, err error) {
	w, c := &m.ws, &m.cfg
	rows, s, e, k := w.shape.rows, w.shape.s, c.Experts, c.ExpertsPerToken
	counts := room(&w.rowCounts, len(w.routers)*rows*e)
	clear(counts)
	chosen := room(&w.ints, rows*s*k)
	for i := range w.saved {
		l := m.layer(i).sparse
		if l < 0 {
			continue
		}
		if err := m.dev.ReadInts(ctx, chosen, w.saved[i].routing.Chosen); err != nil {
			return 0, fmt.Errorf("reading the experts of %d rows of %d tokens: %w", rows, s, err)
		}
		for i, expert := range chosen {
			counts[(l*rows+i/(s*k))*e+int(expert)]++
		}
	}
	if rows > 0 && w.shape.ranks > 1 {
		if err := comm.AllReduce(ctx, m.parallel.Sequence, counts); err != nil {
			return 0, fmt.Errorf("adding the tokens of experts over the ranks of the same sequences: %w", err)
		}
	}
	length := float64(s * w.shape.ranks)
	perChoice := float64(e) / (float64(m.meanLayers()) * length * float64(k)) // of one token, in the mean over layers
	for i := range w.saved {
		l := m.layer(i).sparse
		if l < 0 {
			continue
		}
		probs, err := xpu.Numbers(ctx, m.dev, w.saved[i].routing.Probs, &w.probs)
		if err != nil {
			return 0, fmt.Errorf("reading the routers of %d rows of %d tokens: %w", rows, s, err)
		}
		var sums []float32 // of the scores of a token, with a sigmoid
		if c.HasSigmoidRouter() {
			if sums, err = xpu.Numbers(ctx, m.dev, w.saved[i].routing.LSE, &w.scoreSums); err != nil {
				return 0, fmt.Errorf("reading the routers of %d rows of %d tokens: %w", rows, s, err)
			}
		}
		for i, p := range probs {
			term := perChoice * float64(counts[(l*rows+i/(s*e))*e+i%e]) * float64(p)
			if sums != nil {
				term /= float64(sums[i/e])
			}
			aux += term
		}
	}
	slopes := room(&w.floats, w.slopes.Elements())
	clear(slopes) // a batch without rows has a row of slopes
	for i, n := range counts {
		slopes[i] = float32(o.AuxCoefficient * perChoice / float64(tokens) * float64(n))
	}
	m.dev.Write(w.slopes.Flat(), slopes)
	return aux / float64(w.tokens()), nil
}

// stepCounts returns the number of tokens of the step that chose each expert of the current group's
// layers with experts.
func (m *Model) stepCounts(ctx context.Context, opts BackwardOptions) ([][]int64, error) {
	if opts.StepCounts == nil {
		return m.ws.counts, nil
	}
	own := m.countsOfAllGroups()
	counts, err := opts.StepCounts(ctx, own)
	if err != nil {
		return nil, fmt.Errorf("adding the tokens of experts over the step: %w", err)
	}
	if len(counts) != len(own) {
		return nil, fmt.Errorf("the tokens of experts of the step have %d layers, and the model has %d", len(counts),
			len(own))
	}
	first := 0
	for i := range m.selected {
		s := m.groups[i].stage
		first += len(m.cfg.ExpertLayers(s.from, s.from+s.layers))
	}
	return counts[first:][:len(m.ws.counts)], nil
}

// globalSlopes sets ws.slopes for [AuxGlobal] and returns the loss without its coefficient. counts
// are the choices of the step, and tokens is its number of tokens.
func (m *Model) globalSlopes(o LossOptions, counts [][]int64, tokens int64) (aux float64) {
	c, w := &m.cfg, &m.ws
	perChoice := float64(c.Experts) / (float64(m.meanLayers()) * float64(tokens) * float64(c.ExpertsPerToken))
	slopes := room(&w.floats, w.slopes.Elements())
	rows := w.slopes.Dim(1)
	for number := range w.routers {
		for e, p := range w.routers[number].Probs {
			term := perChoice * float64(counts[number][e])
			aux += term * p
			slope := float32(o.AuxCoefficient * term / float64(tokens))
			for row := range rows {
				slopes[(number*rows+row)*c.Experts+e] = slope
			}
		}
	}
	m.dev.Write(w.slopes.Flat(), slopes)
	return aux / float64(w.tokens())
}

// routeGrad turns the gradients of the routing weights, ws.dweight, and of the router losses into
// the gradient of the layer's logits, ws.router. With that it adds to the gradients of the
// router's weights and of its input, ws.dh.
func (m *Model) routeGrad(l *layer, st *saved, zFactor float64) {
	w := &m.ws
	m.dev.RouteGrad(st.routing, w.router, w.slopes.Index(l.sparse), w.dweight, zFactor)
	if l.routerBias.g.Present() {
		m.dev.EmbedGrad(l.routerBias.g.Reshape(1, m.cfg.Experts), w.router, m.row0(), noRow)
	}
	m.dev.MatMul(l.router.g, w.router.T(), w.h, m.toGradients)
	m.dev.MatMul(w.dh, w.router, l.router.w, accumulate)
}
