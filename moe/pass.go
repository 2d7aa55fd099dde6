package moe

import (
	"fmt"
	"math"

	"mula/xpu/cpu"
)

// Forward computes the loss of a batch. Aux is in the form [AuxHF].
func (m *Model) Forward(batch Batch) (Stats, error) {
	if err := batch.check(m.cfg); err != nil {
		return Stats{}, err
	}
	m.ws.plan(m.cfg, passShape{rows: batch.Rows, s: batch.SequenceLength, keys: batch.SequenceLength, logits: true})
	stats := m.forward(batch, AuxHF)
	m.crossEntropy(batch, BackwardOptions{}, &stats, 0)
	return stats, nil
}

// Backward computes the loss of a batch and adds the gradient of
//
//	Σ cross entropies / Targets + share·(AuxCoefficient·Aux + ZCoefficient·Z)
//
// to the gradients of all parameters, where share is the batch's part of opts.Targets (see [BackwardOptions]).
func (m *Model) Backward(batch Batch, opts BackwardOptions) (Stats, error) {
	if err := batch.check(m.cfg); err != nil {
		return Stats{}, err
	}
	if err := opts.Loss.Validate(); err != nil {
		return Stats{}, err
	}
	own := int64(batch.Rows) * int64(batch.SequenceLength)
	targets := opts.Targets
	if targets == 0 {
		targets = own
	}
	if targets < own {
		return Stats{}, fmt.Errorf("moe: the batch has %d targets, more than the %d of the whole step", own, targets)
	}
	share := float64(own) / float64(targets)

	c, w := m.cfg, &m.ws
	w.plan(c, passShape{rows: batch.Rows, s: batch.SequenceLength, keys: batch.SequenceLength, train: true, recompute: m.recompute, logits: true})
	stats := m.forward(batch, opts.Loss.Aux)

	m.crossEntropy(batch, opts, &stats, 1/float64(targets))
	clear(w.dx)
	m.normGrad(w.dx, w.dh, w.normL(m))
	zFactor := opts.Loss.ZCoefficient * share * 2 / (float64(c.Layers) * float64(own) * float64(max(1, c.ExpertsPerToken)))
	for i := c.Layers - 1; i >= 0; i-- {
		l, st := &m.layers[i], &w.saved[i]
		last := i == c.Layers-1 // what layers share is still the last layer's
		if w.shape.recompute && !last {
			m.recomputeLayer(l, st)
		}
		if c.moe() {
			m.auxSlope(opts.Loss, share, stats.ExpertCounts, i)
		}
		m.feedForwardGrad(l, st, zFactor)
		m.attendGrad(l, st, w.shape.recompute || last)
	}
	m.embedGrad()
	return stats, nil
}

// recomputeLayer computes again, from its input and its routing, what the backward pass reads of a layer.
func (m *Model) recomputeLayer(l *layer, st *saved) {
	m.attend(l, st, m.ws.ownKeys())
	m.normalize(m.ws.h, st.norm2(l))
	m.expand(l, st)
}

// forward runs a batch up to the final norm, whose output is then in ws.h.
func (m *Model) forward(batch Batch, aux AuxForm) Stats {
	c, w := m.cfg, &m.ws
	stats := Stats{Targets: batch.Rows * batch.SequenceLength, RowLoss: w.rowLoss}
	if c.moe() {
		stats.ExpertCounts, stats.RouterEntropy = m.counts, w.entropy
	}
	m.decode(batch.input, 0, func(int) kvTarget { return w.ownKeys() }, func(number int, st *saved) {
		for e, n := range st.counts {
			m.counts[number][e] = int64(n)
		}
	})
	if c.moe() {
		stats.Aux, stats.Z = m.auxLoss(aux, stats.ExpertCounts), m.zLoss()
	}
	return stats
}

// decode runs the layers and the final norm on the tokens of the planned pass, of which token(i) is the i-th and first the position of the
// first. Keys and values of layer l go to target(l); done is told about every layer whose forward pass is over.
func (m *Model) decode(token func(i int) uint32, first int, target func(l int) kvTarget, done func(l int, st *saved)) {
	c, w := m.cfg, &m.ws
	m.rope.extend(c, first+w.shape.s)
	for i := range w.ids {
		w.ids[i] = int32(token(i))
	}
	m.split(len(w.ids), operands{dst: w.saved[0].x0}, func(m *Model, o *operands, _, lo, hi int) {
		h := m.cfg.HiddenSize
		for i := lo; i < hi; i++ {
			copy(o.dst[i*h:][:h], m.embed.w[int(m.ws.ids[i])*h:])
		}
	})
	for i := range m.layers {
		st, out := &w.saved[0], w.saved[0].x0
		if w.shape.train {
			st = &w.saved[i]
		}
		switch {
		case i == len(m.layers)-1:
			out = w.xL
		case w.shape.train:
			out = w.saved[i+1].x0
		}
		m.attend(&m.layers[i], st, target(i))
		m.feedForward(&m.layers[i], st, i, out)
		done(i, st)
	}
	m.normalize(w.h, w.normL(m))
}

// normL is the norm after the last layer.
func (w *workspace) normL(m *Model) norm { return norm{m.norm, w.xL, w.meanL, w.rstdL} }

// crossEntropy fills in the losses of stats from the final hidden states in ws.h, a block of tokens at a time. With a scale other than 0 it
// also computes the gradient of scale·loss: that of the hidden states goes to ws.dh, that of the head is added to its gradient.
func (m *Model) crossEntropy(batch Batch, opts BackwardOptions, stats *Stats, scale float64) {
	c, w := m.cfg, &m.ws
	h, v := c.HiddenSize, c.VocabSize
	for t := range w.targets {
		w.targets[t] = int32(batch.target(t))
	}
	for first := 0; first < stats.Targets; first += w.logitsRows {
		n := min(w.logitsRows, stats.Targets-first)
		x := w.h[first*h:][:n*h]
		m.dev.MatMul(false, true, n, v, h, x, h, m.head.w, h, w.logits, v, false)
		m.split(n, operands{first: first, scale: scale, opts: opts}, func(m *Model, o *operands, _, lo, hi int) {
			w, v := &m.ws, m.cfg.VocabSize
			for i := lo; i < hi; i++ {
				logits := w.logits[i*v:][:v]
				t := o.first + i
				right := float64(logits[w.targets[t]])
				top := cpu.Max(logits)
				sum := cpu.ExpSum(logits, logits, top)
				if o.opts.SampleTargets {
					target := drawTarget(logits, o.opts.SampleSeed, uint64(o.opts.FirstTarget)+uint64(t))
					w.targets[t] = int32(target)
					right = math.Log(float64(logits[target])) + float64(top)
				}
				w.ce[t] = math.Log(float64(sum)) + float64(top) - right
				if o.scale != 0 {
					cpu.Scale(logits, float32(o.scale/float64(sum)))
					logits[w.targets[t]] -= float32(o.scale)
				}
			}
		})
		if scale != 0 {
			m.dev.MatMul(false, false, n, h, v, w.logits, v, m.head.w, h, w.dh[first*h:], h, false)
			m.dev.MatMul(true, false, v, h, n, w.logits, v, x, h, m.head.g, h, true)
		}
	}
	clear(stats.RowLoss)
	for t, ce := range w.ce {
		stats.RowLoss[t/batch.SequenceLength] += ce
	}
	for _, loss := range stats.RowLoss {
		stats.Loss += loss
	}
}

// embedGrad adds the gradient of the embeddings, a stripe of columns at a time: two tokens of the batch can be the same.
func (m *Model) embedGrad() {
	const stripe = 64
	m.split((m.cfg.HiddenSize+stripe-1)/stripe, operands{}, func(m *Model, _ *operands, _, lo, hi int) {
		c, w := m.cfg, &m.ws
		h := c.HiddenSize
		lo, hi = lo*stripe, min(h, hi*stripe)
		for t, id := range w.ids {
			if int(id) != c.PadTokenID {
				at := int(id) * h
				cpu.Axpy(m.embed.g[at+lo:at+hi], 1, w.dx[t*h+lo:t*h+hi])
			}
		}
	})
}
