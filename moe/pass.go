package moe

import (
	"context"
	"errors"
	"fmt"
	"math"

	"mula/xpu/cpu"
)

// Forward computes the loss of a batch. Aux is in the form [AuxHF]. The context ends waiting for the ranks that share the experts, and with
// it their group; a whole model does not look at it.
func (m *Model) Forward(ctx context.Context, batch Batch) (Stats, error) {
	if err := m.oneStage(); err != nil {
		return Stats{}, err
	}
	return m.StageLoss(ctx, batch, nil, nil)
}

// Backward computes the loss of a batch and adds the gradient of
//
//	Σ cross entropies / Targets + share·(AuxCoefficient·Aux + ZCoefficient·Z)
//
// to the gradients of all parameters, where share is the batch's part of opts.Targets (see [BackwardOptions]). An expert's gradients get what
// the batches of all ranks add to them, those of the other parameters what this rank's batch adds: the sum over all ranks that hold a
// parameter is the gradient of the whole step, for both, without a factor. The context is that of [Model.Forward]. After an error the
// gradients are a part of what they should be.
func (m *Model) Backward(ctx context.Context, batch Batch, opts BackwardOptions) (Stats, error) {
	if err := m.oneStage(); err != nil {
		return Stats{}, err
	}
	if err := batch.check(m.cfg, m.parallel); err != nil {
		return Stats{}, err
	}
	targets, err := m.targets(batch, opts)
	if err != nil {
		return Stats{}, err
	}
	if err := m.take(0, batch, true); err != nil {
		return Stats{}, err
	}
	if err := m.forward(ctx, nil, nil); err != nil {
		return Stats{}, err
	}
	return m.backward(ctx, opts, targets, nil, nil)
}

// targets is the number of targets of the step that a batch belongs to, of which opts must hold for it.
func (m *Model) targets(batch Batch, opts BackwardOptions) (int64, error) {
	if err := opts.Loss.Validate(); err != nil {
		return 0, err
	}
	own := int64(batch.Rows) * int64(batch.SequenceLength)
	switch {
	case opts.Targets == 0 && m.parallel.ranks() > 1:
		return 0, errors.New("moe: a batch of one rank does not know the number of targets of the whole step; set Targets")
	case opts.Targets == 0:
		return own, nil
	case opts.Targets < own:
		return 0, fmt.Errorf("moe: the batch has %d targets, more than the %d of the whole step", own, opts.Targets)
	}
	return opts.Targets, nil
}

// backward is the backward pass of the flight at hand, of a step with so many targets. in is what comes from the stage behind, nil on the
// last; out is for the stage before, nil on the first.
func (m *Model) backward(ctx context.Context, opts BackwardOptions, targets int64, in, out *Relay) (Stats, error) {
	c, w := m.cfg, &m.ws
	share := float64(w.shape.rows*w.shape.s) / float64(targets)
	fresh := w.latest == w.flight // what flights share is still this one's
	w.latest = nil                // and is no more, once this pass is over
	done := progress{opts.Done, 0}
	stats := m.stats(opts.Loss.Aux)
	if in == nil {
		if !fresh {
			m.renormalize(w.h, w.normL(m))
		}
		m.crossEntropy(w.batch, opts, &stats, 1/float64(targets))
		clear(w.dx)
		m.normGrad(w.dx, w.dh, w.normL(m))
		if !c.TieEmbeddings {
			done.next()
		}
	} else {
		copy(w.dx, in.Hidden)
		copy(w.sums, in.Router)
	}
	zFactor := opts.Loss.ZCoefficient * share * 2 / (float64(c.Layers) * float64(w.tokens()) * float64(max(1, c.ExpertsPerToken)))
	for i := len(m.layers) - 1; i >= 0; i-- {
		l, st := &m.layers[i], &w.saved[i]
		last := fresh && i == len(m.layers)-1 // what layers share is still the last layer's
		if err := m.restore(ctx, l, st, i, last); err != nil {
			return Stats{}, err
		}
		if c.moe() {
			m.auxSlope(opts.Loss, share, i)
		}
		if err := m.feedForwardGrad(ctx, l, st, i, zFactor); err != nil {
			return Stats{}, err
		}
		if c.moe() {
			done.next()
		}
		m.attendGrad(l, st, w.shape.recompute.attention() || last)
		done.next()
	}
	if out == nil {
		m.embedGrad()
		done.next()
	} else {
		copy(out.Hidden, w.dx)
		copy(out.Router, w.sums)
	}
	return stats, nil
}

// A progress tells [BackwardOptions.Done] which buckets are complete.
type progress struct {
	done   func(bucket int)
	bucket int
}

func (p *progress) next() {
	if p.done != nil {
		p.done(p.bucket)
	}
	p.bucket++
}

// take plans a pass over a batch and takes the flight of a slot at hand. Its forward pass follows.
func (m *Model) take(slot int, batch Batch, train bool) error {
	shape := passShape{rows: batch.Rows, s: batch.SequenceLength, keys: batch.SequenceLength, train: train,
		logits: m.stage.last, layers: len(m.layers), last: m.stage.last, elsewhere: m.dispatch != nil}
	if train {
		if err := m.recompute.validate(); err != nil {
			return err
		}
		shape.recompute = m.recompute
	}
	f, err := m.flight(slot)
	if err != nil {
		return err
	}
	m.ws.plan(m.cfg, f, shape)
	f.batch = batch
	return nil
}

// flight returns that of a slot, which must be free.
func (m *Model) flight(slot int) (*flight, error) {
	for slot >= len(m.flights) {
		f := &flight{sums: make(routerSums, m.routerSums())}
		for range m.layers {
			f.counts = append(f.counts, make([]int64, m.cfg.Experts))
		}
		if m.dispatch != nil {
			f.ways, f.memory = m.dispatch.ways(len(m.layers)), make([]layerMemory, len(m.layers))
		}
		m.flights = append(m.flights, f)
	}
	f := m.flights[slot]
	if f.waits {
		return nil, fmt.Errorf("moe: slot %d has a batch under way; StageBackward comes first", slot)
	}
	return f, nil
}

// forward runs the batch of the flight at hand through the layers held here, and then through the final norm, whose output is in ws.h. in is
// what comes from the stage before, nil on the first; out is for the stage behind, nil on the last.
func (m *Model) forward(ctx context.Context, in, out *Relay) error {
	w := &m.ws
	if m.dispatch != nil {
		if err := m.dispatch.begin(ctx, w.batch.Rows*w.batch.SequenceLength); err != nil {
			return err
		}
	}
	m.rope.extend(m.cfg, w.shape.s)
	clear(w.sums)
	if in == nil {
		m.embedTokens(w.batch.input)
	} else {
		m.copyRows(w.saved[0].x0, in.Hidden)
		copy(w.sums, in.Router)
	}
	end := w.xL
	if out != nil {
		end = out.Hidden
	}
	w.latest = nil
	err := m.decode(ctx, end, func(int) kvTarget { return w.ownKeys() }, func(number int, st *saved) {
		for e, n := range st.counts {
			w.counts[number][e] = int64(n)
		}
		if m.cfg.moe() {
			w.sums.add(w, number)
		}
	})
	if err != nil {
		return err
	}
	if out != nil {
		copy(out.Router, w.sums)
	} else {
		m.normalize(w.h, w.normL(m))
	}
	w.latest = w.flight
	return nil
}

// stats are what is known after the forward pass of the flight at hand, but for the losses of the batch.
func (m *Model) stats(aux AuxForm) Stats {
	w := &m.ws
	s := Stats{Targets: w.batch.Rows * w.batch.SequenceLength, RowLoss: w.rowLoss}
	if m.cfg.moe() {
		s.ExpertCounts, s.RouterEntropy = w.counts, w.entropy
		if m.stage.last {
			s.Aux, s.Z = m.auxLoss(aux), m.zLoss()
		}
	}
	return s
}

// embedTokens looks up the tokens of the planned pass, of which token(i) is the i-th.
func (m *Model) embedTokens(token func(i int) uint32) {
	w := &m.ws
	for i := range w.ids {
		w.ids[i] = int32(token(i))
	}
	m.split(len(w.ids), operands{dst: w.saved[0].x0}, func(m *Model, o *operands, _, lo, hi int) {
		h := m.cfg.HiddenSize
		for i := lo; i < hi; i++ {
			copy(o.dst[i*h:][:h], m.embed.w[int(m.ws.ids[i])*h:])
		}
	})
}

// decode runs the layers on the input of the first, whose output of the last goes to end. Keys and values of layer l go to target(l); done
// is told about every layer whose forward pass is over.
func (m *Model) decode(ctx context.Context, end []float32, target func(l int) kvTarget, done func(l int, st *saved)) error {
	w := &m.ws
	for i := range m.layers {
		st, out := &w.saved[0], w.saved[0].x0
		if w.shape.train {
			st = &w.saved[i]
		}
		switch {
		case i == len(m.layers)-1:
			out = end
		case w.shape.train:
			out = w.saved[i+1].x0
		}
		m.attend(&m.layers[i], st, target(i))
		if err := m.feedForward(ctx, &m.layers[i], st, i, out); err != nil {
			return err
		}
		done(i, st)
	}
	return nil
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
