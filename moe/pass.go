package moe

import (
	"context"
	"errors"
	"fmt"

	"mula/xpu"
	"mula/xpu/comm"
)

// Forward computes the loss of a batch. Aux is in the form [AuxHF]. When ctx ends, Forward stops
// waiting for the device and for the ranks that share the experts; their group is then unusable.
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
// to the gradients of all parameters, or with opts.First sets them to it, where share is the
// batch's fraction of opts.Tokens (see [BackwardOptions]). With D layers of multi-token prediction,
// it also adds PredictionCoefficient/D · Σ PredictionLoss / Targets. An expert's gradients include
// the batches of all ranks; the other gradients include this rank's batch only. For both, the sum
// over all ranks that hold a parameter is the gradient of the whole step, without a factor. ctx
// works as in [Model.Forward]. After an error the gradients are incomplete.
//
// The device may still be computing the gradients when Backward returns. Commands enqueued later
// run after them, and Read waits for them.
func (m *Model) Backward(ctx context.Context, batch Batch, opts BackwardOptions) (Stats, error) {
	if err := m.oneStage(); err != nil {
		return Stats{}, err
	}
	if err := batch.check(m.cfg, m.parallel); err != nil {
		return Stats{}, err
	}
	size, err := m.stepSize(batch, opts)
	if err != nil {
		return Stats{}, err
	}
	if err := m.take(0, batch, true, true); err != nil {
		return Stats{}, err
	}
	if err := m.forward(ctx, nil, nil); err != nil {
		return Stats{}, err
	}
	return m.backward(ctx, opts, size, nil, nil)
}

// A stepSize is the size of the step that a batch belongs to.
type stepSize struct{ targets, tokens int64 }

// stepSize returns the size of the step that a batch belongs to, or an error if opts contradicts
// the batch.
func (m *Model) stepSize(batch Batch, opts BackwardOptions) (stepSize, error) {
	if err := opts.Loss.Validate(); err != nil {
		return stepSize{}, err
	}
	if z := opts.Loss.ZCoefficient; z != 0 && m.cfg.HasSigmoidRouter() {
		return stepSize{}, fmt.Errorf("coefficient %g of the z-loss must be 0, because the scores of the router of a "+
			"%s model are sigmoids, without a logsumexp", z, m.cfg.Architecture)
	}
	own := stepSize{int64(batch.targets()), int64(batch.Rows) * int64(batch.SequenceLength)}
	step := stepSize{opts.Targets, opts.Tokens}
	if step.tokens == 0 {
		step.tokens = step.targets
	}
	_, sequenceRanks := m.parallel.sequenceRanks()
	switch {
	case opts.Loss.Aux == AuxGlobal && opts.StepCounts == nil &&
		(opts.Targets != 0 && step.tokens != own.tokens || sequenceRanks > 1):
		return stepSize{}, errors.New("the load-balancing loss over the global batch needs the counts of the whole " +
			"step; set StepCounts")
	case opts.Targets == 0 && m.parallel.Mesh.Size(comm.EP) > 1:
		return stepSize{}, errors.New("the number of targets of the whole step is unknown when ranks share the " +
			"experts; set Targets")
	case opts.Targets == 0:
		return stepSize{max(1, own.targets), own.tokens}, nil
	case step.targets < own.targets:
		return stepSize{}, fmt.Errorf("the batch has %d targets, more than the %d of the whole step", own.targets,
			step.targets)
	case step.tokens < own.tokens:
		return stepSize{}, fmt.Errorf("the batch has %d tokens, more than the %d of the whole step; set Tokens",
			own.tokens, step.tokens)
	}
	return step, nil
}

// backward is the backward pass of the current flight, which belongs to a step of the given size.
// in is the next stage's gradient, nil on the last stage; out is for the previous stage, nil on the
// first.
func (m *Model) backward(ctx context.Context, opts BackwardOptions, size stepSize, in, out *Relay) (Stats, error) {
	c, w := &m.cfg, &m.ws
	share := float64(w.shape.tokens()) / float64(size.tokens)
	// The buffers that flights share still hold this flight's values. With several groups of
	// layers, this depends on the order of batches, and is not used.
	fresh := w.latest == w.flight && len(m.groups) == 1
	predicts := len(w.predicted) > 0
	w.latest = nil // this pass overwrites them
	done := progress{opts.Done, m.firstBucket}
	m.startGradients(opts.First)
	if in == nil {
		if !fresh || predicts {
			m.normalizeLast(true)
		}
		m.crossEntropy(opts, 1/float64(size.targets), w.own.target, w.ce, m.toGradients)
		if predicts {
			m.predictionLosses(opts, size)
		} else {
			m.lastNormGrad(w.dh, &done)
		}
		if err := m.settle(ctx); err != nil {
			return Stats{}, err
		}
	} else {
		m.dev.Copy(w.dx, in.Hidden)
		copy(w.sums, in.Router)
	}
	stats := m.stats(opts.Loss.Aux)
	switch {
	case len(w.routers) > 0 && opts.Loss.Aux == AuxSequence:
		var err error
		if stats.Aux, err = m.sequenceSlopes(ctx, opts.Loss, size.tokens); err != nil {
			return Stats{}, err
		}
	case len(w.routers) > 0 && opts.Loss.Aux == AuxGlobal:
		counts, err := m.stepCounts(ctx, opts)
		if err != nil {
			return Stats{}, err
		}
		stats.Aux = m.globalSlopes(opts.Loss, counts, size.tokens)
	case len(w.routers) > 0:
		m.auxSlopes(opts.Loss, share)
	}
	zFactor := opts.Loss.ZCoefficient * share * 2 / (float64(m.meanLayers()) * float64(w.tokens()) * float64(max(1,
		c.ExpertsPerToken)))
	for k := len(w.predicted) - 1; k >= 0; k-- {
		m.predictionNormGrad(k)
		i := len(m.layers) + k
		last := fresh && k == len(w.predicted)-1 // as below
		if err := m.layerGrad(ctx, i, last, zFactor, &done); err != nil {
			return Stats{}, err
		}
		m.joinGrad(k, out)
		done.next()
	}
	if predicts {
		m.lastNormGrad(w.dn[0], &done)
	}
	for i := len(m.layers) - 1; i >= 0; i-- {
		// the buffers that layers share still hold the last layer's values
		last := fresh && !predicts && i == len(m.layers)-1
		if err := m.layerGrad(ctx, i, last, zFactor, &done); err != nil {
			return Stats{}, err
		}
		done.next()
	}
	if out == nil {
		if r := m.behindFirst(in); r != nil && w.shape.predicts {
			m.sentEmbeddingsGrad(r)
		}
		m.multiply(w.dx, c.EmbeddingMultiplier)
		m.dev.EmbedGrad(m.embed.g, w.dx, w.ids, int32(c.PadTokenID))
		done.next()
	} else {
		m.dev.Copy(out.Hidden, w.dx)
		copy(out.Router, w.sums)
	}
	return stats, nil
}

// lastNormGrad sets ws.dx to the gradient of the output of the last layer, given the gradient dh of
// the head's input, which it overwrites. It completes the bucket of the final norm.
func (m *Model) lastNormGrad(dh xpu.Tensor, done *progress) {
	w := &m.ws
	m.multiply(dh, m.cfg.headMultiplier())
	m.dev.Zero(w.dx)
	m.dev.NormGrad(w.dx, dh, w.xL, m.normL(), m.norm.g)
	if !m.cfg.TieEmbeddings {
		done.next()
	}
}

// layer returns layer number i of the current pass; the layers of multi-token prediction follow the
// others.
func (m *Model) layer(i int) *layer {
	if i < len(m.layers) {
		return &m.layers[i]
	}
	return &m.predictions[i-len(m.layers)].layer
}

// layerGrad turns the gradient of the output of layer number i in ws.dx into the gradient of its
// input, and adds to the gradients of its weights. Of its buckets, one is not complete afterwards:
// the bucket of the weights that are neither of experts nor slices. last means that the buffers
// that layers share still hold the layer's values.
func (m *Model) layerGrad(ctx context.Context, i int, last bool, zFactor float64, done *progress) error {
	l, st := m.layer(i), &m.ws.saved[i]
	if err := m.restore(ctx, l, st, i, last); err != nil {
		return err
	}
	if err := m.feedForwardGrad(ctx, l, st, i, zFactor); err != nil {
		return err
	}
	if l.hasExperts() {
		done.next()
	}
	if err := m.attendGrad(ctx, l, st, m.ws.shape.recompute.attention() || last); err != nil {
		return err
	}
	if m.ws.shape.tensor > 1 {
		done.next() // the bucket of slices
	}
	return nil
}

// A progress calls [BackwardOptions.Done] for each complete bucket.
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

// take plans a pass over a batch and makes the slot's flight the current one. Its forward pass
// follows. predict means that the pass includes the layers of multi-token prediction.
func (m *Model) take(slot int, batch Batch, train, predict bool) error {
	_, ranks := m.parallel.sequenceRanks()
	_, tensor := m.parallel.tensorRanks()
	shape := passShape{rows: batch.Rows, s: batch.SequenceLength / ranks, ranks: ranks, tensor: tensor,
		parts: m.cfg.sequenceParts(ranks/tensor, tensor), train: train,
		from: m.stage.from, layers: len(m.layers), first: m.stage.first, last: m.stage.last,
		elsewhere: m.cfg.dispatches(m.parallel.Mesh.Size(comm.EP)), documents: len(batch.Begin) > 0,
		rounded: m.activations}
	if m.stage.last {
		shape.logits = LogitsTokens(m.cfg.VocabSize, m.dev.ProductRows(), m.dev.Capacity())
	}
	shape.predicts = predict && m.cfg.PredictionLayers > 0
	if shape.predicts && m.stage.last {
		shape.predictions = m.cfg.PredictionLayers
		shape.layers += shape.predictions
	}
	shape.jitter = m.cfg.jitters(batch)
	if err := m.recompute.validate(); err != nil {
		return err
	}
	shape.recompute = m.recompute
	if shape.contextRanks() > 1 && m.activations == xpu.BFloat16 {
		return errors.New("activations of bf16 cannot be exchanged by ranks that share sequences; use fp32")
	}
	f, err := m.flight(slot)
	if err != nil {
		return err
	}
	f.batch, f.own, f.group = batch, m.parallel.ownInputs(batch), m.selected
	return m.ws.plan(m.dev, m.own, f, shape)
}

// flight returns the flight of a slot, which must be free.
func (m *Model) flight(slot int) (*flight, error) {
	for slot >= len(m.flights) {
		f := newFlight(m.cfg, mostExpertLayers(m.cfg, m.parallel.stages(m.cfg)))
		m.block.prepare(f, len(f.routers))
		m.flights = append(m.flights, f)
	}
	f := m.flights[slot]
	if f.waits {
		return nil, fmt.Errorf("slot %d has a batch under way; call StageBackward first", slot)
	}
	return f, nil
}

// forward runs the current flight's batch through this stage's layers, and on the last stage
// through the final norm, whose output is in ws.h. in is the previous stage's output, nil on the
// first stage; out is for the next stage, nil on the last.
func (m *Model) forward(ctx context.Context, in, out *Relay) error {
	w := &m.ws
	if err := m.block.begin(ctx, w.shape.tokens()); err != nil {
		return err
	}
	if err := m.extendRope(w.shape.s * w.shape.ranks); err != nil {
		return err
	}
	clear(w.sums)
	if in == nil {
		if r := m.behindFirst(out); r != nil && w.shape.predicts {
			m.sendEmbeddings(r)
		}
		m.embedTokens(w.own.input)
	} else {
		m.dev.Copy(w.saved[0].x0, in.Hidden)
		copy(w.sums, in.Router)
	}
	end := w.xL
	if out != nil {
		end = out.Hidden
	}
	w.latest = nil
	if err := m.decode(ctx, end, func(int) kvTarget { return w.ownKeys() }); err != nil {
		return err
	}
	if out != nil {
		if err := m.settle(ctx); err != nil {
			return err
		}
		copy(out.Router, w.sums)
	} else {
		m.normalizeLast(false)
		if err := m.predict(ctx, in); err != nil {
			return err
		}
	}
	w.latest = w.flight
	return nil
}

// stats returns the statistics of the current flight after settle.
func (m *Model) stats(aux AuxForm) Stats {
	w := &m.ws
	s := Stats{Tokens: w.shape.tokens(), Targets: w.own.targets()}
	if m.cfg.moe() {
		zero := func() float64 { return 0 }
		s.ExpertCounts, s.RouterEntropy = m.countsOfAllGroups(), ofAllGroups(m, w.entropy, zero)
		if m.cfg.ExpertCapacity > 0 {
			s.Dropped = ofAllGroups(m, w.lost, zero)
		}
	}
	if !m.stage.last {
		return s
	}
	s.RowLoss = w.rowLoss
	if m.cfg.moe() {
		s.Aux, s.Z = m.auxLoss(aux), m.zLoss()
	}
	clear(s.RowLoss)
	for t, ce := range w.ce {
		s.RowLoss[t/w.shape.s] += ce
	}
	for _, loss := range s.RowLoss {
		s.Loss += loss
	}
	s.PredictionLoss, s.PredictionTargets = m.predictionStats()
	return s
}

// ofAllGroups returns the values of the selected group's layers with experts, among the values of
// none for the layers with experts of this rank's other groups.
func ofAllGroups[E any](m *Model, values []E, none func() E) []E {
	if len(m.groups) == 1 {
		return values
	}
	var all []E
	for i := range m.groups {
		if i == m.selected {
			all = append(all, values...)
			continue
		}
		s := m.groups[i].stage
		for range m.cfg.ExpertLayers(s.from, s.from+s.layers) {
			all = append(all, none())
		}
	}
	return all
}

// countsOfAllGroups returns the counts of the current pass, with zeros for the other groups.
func (m *Model) countsOfAllGroups() [][]int64 {
	return ofAllGroups(m, m.ws.counts, func() []int64 { return make([]int64, m.cfg.Experts) })
}

// writeIDs sets ws.ids; token(i) returns the i-th.
func (m *Model) writeIDs(token func(i int) uint32) {
	ids := room(&m.ws.ints, m.ws.ids.Elements())
	for i := range ids {
		ids[i] = int32(token(i))
	}
	m.dev.WriteInts(m.ws.ids, ids)
}

// embedTokens looks up the tokens of the planned pass; token(i) returns the i-th.
func (m *Model) embedTokens(token func(i int) uint32) {
	w := &m.ws
	m.writeIDs(token)
	m.dev.Embed(w.saved[0].x0, m.embed.w, w.ids)
	m.multiply(w.saved[0].x0, m.cfg.EmbeddingMultiplier)
}

// decode runs the layers. The output of the last layer is written to end, keys and values of layer
// l to target(l).
func (m *Model) decode(ctx context.Context, end xpu.Tensor, target func(l int) kvTarget) error {
	w := &m.ws
	m.writeFirstKeys()
	m.writeNumbers()
	if w.row0.Present() {
		zeros := room(&w.ints, w.row0.Elements())
		clear(zeros)
		m.dev.WriteInts(w.row0, zeros)
	}
	m.writeOrder()
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
		if err := m.attend(ctx, &m.layers[i], st, target(i)); err != nil {
			return err
		}
		if err := m.feedForward(ctx, &m.layers[i], st, i, out); err != nil {
			return err
		}
	}
	return nil
}

// crossEntropy computes the losses of the current batch from the final hidden states in ws.h, a
// block of tokens at a time; after a wait they are in ce. target(t) is the target of token t, -1
// without one. With a scale other than 0 it also computes the gradient of scale·loss: the gradient
// of the hidden states in ws.dh, and the head's gradient, which the first block adds as toHead
// says.
func (m *Model) crossEntropy(opts BackwardOptions, scale float64, target func(t int) int32, ce []float64,
	toHead xpu.MatMulOptions) {
	w := &m.ws
	targets := room(&w.ints, w.targets.Elements())
	for t := range targets {
		targets[t] = target(t)
	}
	m.dev.WriteInts(w.targets, targets)
	rank, _ := m.parallel.sequenceRanks()
	before := uint64(opts.FirstTarget) + uint64(rank*len(targets)) // of this rank
	for first := 0; first < len(targets); first += w.logitsRows {
		end := min(first+w.logitsRows, len(targets))
		x, logits := w.h.Rows(first, end), w.logits.Rows(0, end-first)
		m.dev.MatMul(logits, x, m.head.w.T(), xpu.MatMulOptions{})
		m.dev.CrossEntropy(xpu.CrossEntropy{Logits: logits, Targets: w.targets.Rows(first, end),
			Loss: ce[first:end], Scale: scale, Sample: opts.SampleTargets, Seed: opts.SampleSeed,
			First: before + uint64(first)})
		if scale != 0 {
			m.dev.MatMul(w.dh.Rows(first, end), logits, m.head.w, xpu.MatMulOptions{})
			m.dev.MatMul(m.head.g, logits.T(), x, xpu.MatMulOptions{Accumulate: toHead.Accumulate || first > 0})
		}
	}
}
