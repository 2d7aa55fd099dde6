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
	m.crossEntropy(batch, &stats, 0)
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
	w.plan(c, passShape{rows: batch.Rows, s: batch.SequenceLength, keys: batch.SequenceLength, train: true, logits: true})
	stats := m.forward(batch, opts.Loss.Aux)

	m.crossEntropy(batch, &stats, 1/float64(targets))
	clear(w.dx)
	m.normGrad(w.dx, w.dh, w.xL, m.norm.w, m.norm.g, w.meanL, w.rstdL)
	zFactor := opts.Loss.ZCoefficient * share * 2 / (float64(c.Layers) * float64(own) * float64(max(1, c.ExpertsPerToken)))
	for i := c.Layers - 1; i >= 0; i-- {
		if c.moe() {
			m.auxSlope(opts.Loss, share, stats.ExpertCounts, i)
		}
		m.feedForwardGrad(&m.layers[i], &w.saved[i], zFactor)
		m.attendGrad(&m.layers[i], &w.saved[i])
	}
	m.embedGrad(batch)
	return stats, nil
}

// forward runs a batch up to the final norm, whose output is then in ws.h.
func (m *Model) forward(batch Batch, aux AuxForm) Stats {
	c, w := m.cfg, &m.ws
	stats := Stats{Targets: batch.Rows * batch.SequenceLength, RowLoss: make([]float64, batch.Rows)}
	if c.moe() {
		stats.ExpertCounts = make([][]int64, c.Layers)
	}
	s := batch.SequenceLength
	m.decode(func(i int) uint32 { return batch.Tokens[i/s*(s+1)+i%s] }, 0, func(int) kvTarget {
		return kvTarget{k: w.k, v: w.v, capacity: s}
	}, func(number int, st *saved) {
		if c.moe() {
			counts := make([]int64, c.Experts)
			for e, n := range st.counts {
				counts[e] = int64(n)
			}
			stats.ExpertCounts[number] = counts
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
	h := c.HiddenSize
	m.rope.extend(c, first+w.shape.s)
	x := w.saved[0].x0
	m.split(w.shape.rows*w.shape.s, func(_, lo, hi int) {
		for i := lo; i < hi; i++ {
			copy(x[i*h:][:h], m.embed.w[int(token(i))*h:])
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
	m.normalize(w.h, w.xL, m.norm.w, w.meanL, w.rstdL)
}

// crossEntropy fills in the losses of stats from the final hidden states in ws.h, a block of tokens at a time. With a scale other than 0 it
// also computes the gradient of scale·loss: that of the hidden states goes to ws.dh, that of the head is added to its gradient.
func (m *Model) crossEntropy(batch Batch, stats *Stats, scale float64) {
	c, w := m.cfg, &m.ws
	h, v, s := c.HiddenSize, c.VocabSize, batch.SequenceLength
	for first := 0; first < stats.Targets; first += w.logitsRows {
		n := min(w.logitsRows, stats.Targets-first)
		x := w.h[first*h:][:n*h]
		m.dev.MatMul(false, true, n, v, h, x, h, m.head.w, h, w.logits, v, false)
		m.split(n, func(_, lo, hi int) {
			for i := lo; i < hi; i++ {
				logits := w.logits[i*v:][:v]
				t := first + i
				target := batch.Tokens[t/s*(s+1)+t%s+1]
				right := float64(logits[target])
				top := cpu.Max(logits)
				sum := cpu.ExpSum(logits, logits, top)
				w.ce[t] = math.Log(float64(sum)) + float64(top) - right
				if scale != 0 {
					cpu.Scale(logits, float32(scale/float64(sum)))
					logits[target] -= float32(scale)
				}
			}
		})
		if scale != 0 {
			m.dev.MatMul(false, false, n, h, v, w.logits, v, m.head.w, h, w.dh[first*h:], h, false)
			m.dev.MatMul(true, false, v, h, n, w.logits, v, x, h, m.head.g, h, true)
		}
	}
	for t, ce := range w.ce {
		stats.RowLoss[t/s] += ce
	}
	for _, loss := range stats.RowLoss {
		stats.Loss += loss
	}
}

// embedGrad adds the gradient of the embeddings, a stripe of columns at a time: two tokens of the batch can be the same.
func (m *Model) embedGrad(batch Batch) {
	const stripe = 64
	c, w := m.cfg, &m.ws
	h, s := c.HiddenSize, batch.SequenceLength
	m.dev.Parallel((h+stripe-1)/stripe, func(i int) {
		lo, hi := i*stripe, min(h, (i+1)*stripe)
		for t := range batch.Rows * s {
			id := int(batch.Tokens[t/s*(s+1)+t%s])
			if id != c.PadTokenID {
				cpu.Axpy(m.embed.g[id*h+lo:id*h+hi], 1, w.dx[t*h+lo:t*h+hi])
			}
		}
	})
}
