package moe

import (
	"context"
	"math"
	"slices"

	"mula/xpu"
)

// Training of layers of multi-token prediction (https://arxiv.org/abs/2412.19437, section 2.2).
// They have the numbers L, L+1, … after the L layers of the model. For position i of a row of
// tokens t, layer k of D, from 0, computes
//
//	h = layer(Weh·[norm(E·t[i+k+1]), norm(n)])
//	n' = norm(h)
//	loss = -log softmax(head·n')[t[i+k+2]]
//
// E is the embedding and head the head of the model, and each norm has weights of its own. n is the
// input of the model's head, its final norm included, for k = 0, and otherwise n' of layer k-1, as
// in the source code of Megatron core 0.16.1. The loss of a step has the additional term
//
//	λ/D · Σ over layers, Σ over positions with a target, loss / Targets
//
// with the number of targets of the model's own loss, as in equation 24 of the paper.
//
// The router of such a layer counts as a router of the model in the losses of routers. Evaluation
// and generation do not compute these layers.
//
// In a pipeline, the last group of layers has them, and the head. Only the first group has E. It
// sends the rows E·t[i+k+1] of each micro-batch to the last group, which sends their gradients
// back; see [Relay]. For each micro-batch, in order, the first group adds the gradients of the
// layers D-1, …, 0 to the gradient of E, and then its own. That is the order of a model without
// stages, so that stages change no bit.

// A prediction is a layer of multi-token prediction.
type prediction struct {
	layer
	embeddingNorm, hiddenNorm tensor // [H]
	projection                tensor // [H, 2H] of both, the embedding first
	norm                      tensor // [H] before the head
}

// maxPredictions is an upper bound of [Config.PredictionLayers].
const maxPredictions = 16

// AllLayers returns the number of layers, with the layers of multi-token prediction.
func (c Config) AllLayers() int { return c.Layers + c.PredictionLayers }

// validatePredictions returns an error if the model cannot have the layers of multi-token
// prediction.
func (c Config) validatePredictions(bad func(field, format string, args ...any) error) error {
	const field = "num_nextn_predict_layers"
	switch f, n := c.family(), c.PredictionLayers; {
	case n < 0 || n > maxPredictions:
		return bad(field, "is %d; it must be between 0 and %d", n, maxPredictions)
	case n > 0 && f.predictionTensors != "":
		return bad(field, "is %d; it must be 0, because mula does not train the layers of multi-token prediction of a "+
			"%s model, which have another form", n, c.Architecture)
	case n > 0 && !c.TrainsPredictions():
		return bad(field, "is %d; it must be 0, because a %s model has no layers of multi-token prediction", n,
			c.Architecture)
	}
	return nil
}

// TrainsPredictions reports whether mula can train the layers of multi-token prediction of the
// family.
func (c Config) TrainsPredictions() bool {
	return c.family().predictionLayers != "" && c.family().predictionTensors == ""
}

// predictedTokens are the values of a layer of multi-token prediction that its backward pass reads,
// besides its [saved].
type predictedTokens struct {
	ids                             xpu.Tensor // [T] tokens whose embeddings it reads, if the embedding is here
	embedded                        xpu.Tensor // [T, H] the embeddings, if another stage has sent them
	out                             xpu.Tensor // [T, H] output of the layer
	rstd, embeddingRStd, hiddenRStd xpu.Tensor // [T] of the norms
	ce                              []float64  // [T] cross entropy of each target, on the host
}

// cutPredictions allocates the buffers of a flight from a.
func (f *flight) cutPredictions(c Config, p passShape, a *arena) {
	t, h := p.tokens(), c.HiddenSize
	f.predicted = slices.Grow(f.predicted[:0], p.predictions)[:p.predictions]
	for k := range f.predicted {
		of := &f.predicted[k]
		*of = predictedTokens{out: a.f32(t, h), rstd: a.f32(t), embeddingRStd: a.f32(t), hiddenRStd: a.f32(t),
			ce: a.f64(t)}
		if p.first {
			of.ids = a.i32(t)
		} else {
			of.embedded = a.f32(t, h)
		}
	}
}

// predictionSpace is the working memory of layers of multi-token prediction; absent without them.
type predictionSpace struct {
	embedded xpu.Tensor // [T, H] embeddings, if the embedding is here
	half     xpu.Tensor // [T, H] a normalised half of the input of the projection, or its gradient
	pair     xpu.Tensor // [T, 2H] input of the projection; in the backward pass also its gradient
	// [T, H] gradients of the head's inputs: of the model, and of each layer of multi-token
	// prediction
	dn []xpu.Tensor

	// on the host
	predictionLoss    []float64 // [D] for Stats
	predictionTargets []int64   // [D] for Stats
}

// cut allocates the buffers of a pass from a.
func (w *predictionSpace) cut(c Config, p passShape, a *arena) {
	*w = predictionSpace{dn: w.dn[:0], predictionLoss: w.predictionLoss, predictionTargets: w.predictionTargets}
	if p.predictions == 0 {
		return
	}
	t, h := p.tokens(), c.HiddenSize
	if p.first {
		w.embedded = a.f32(t, h)
	}
	w.half, w.pair = a.f32(t, h), a.f32(t, 2*h)
	for range p.predictions + 1 {
		if p.train {
			w.dn = append(w.dn, a.f32(t, h))
		}
	}
}

// predictionNorm returns the norm before the head of layer k of multi-token prediction.
func (m *Model) predictionNorm(k int) xpu.Norm {
	return m.residualNorm(m.predictions[k].norm, xpu.Tensor{}, m.ws.predicted[k].rstd)
}

// rowPosition returns the row of token t of this rank, and its position in the complete row.
func (m *Model) rowPosition(t int) (row, i int) {
	rank, _ := m.parallel.sequenceRanks()
	s := m.ws.shape.s
	return t / s, rank*s + t%s
}

// writePredicted sets ids to the tokens that layer k of multi-token prediction reads.
func (m *Model) writePredicted(ids xpu.Tensor, k int) {
	w := &m.ws
	all := room(&w.ints, ids.Elements())
	for t := range all {
		row, i := m.rowPosition(t)
		id, _ := w.batch.predicted(row, i, k)
		all[t] = int32(id)
	}
	m.dev.WriteInts(ids, all)
}

// ofLayer returns the rows of layer k of multi-token prediction in a relay's embeddings.
func (m *Model) ofLayer(r *Relay, k int) xpu.Tensor {
	t := m.ws.shape.tokens()
	return r.Embeddings.Rows(k*t, (k+1)*t)
}

// sendEmbeddings sets the embeddings of a relay for the last group of layers. It overwrites ws.ids.
func (m *Model) sendEmbeddings(r *Relay) {
	for k := range m.cfg.PredictionLayers {
		m.writePredicted(m.ws.ids, k)
		m.dev.Embed(m.ofLayer(r, k), m.embed.w, m.ws.ids)
	}
}

// sentEmbeddingsGrad adds the gradients of sent embeddings, from the last group of layers, to the
// gradient of the embedding.
func (m *Model) sentEmbeddingsGrad(r *Relay) {
	for k := m.cfg.PredictionLayers - 1; k >= 0; k-- {
		m.writePredicted(m.ws.ids, k)
		m.dev.EmbedGrad(m.embed.g, m.ofLayer(r, k), m.ws.ids, int32(m.cfg.PadTokenID))
	}
	m.writeIDs(m.ws.own.input)
}

// predict runs the layers of multi-token prediction of the pass, given the input of the head in
// ws.h. It overwrites ws.h. in has the embeddings, if this is not the first group of layers.
func (m *Model) predict(ctx context.Context, in *Relay) error {
	w := &m.ws
	for k := range w.predicted {
		p := &w.predicted[k]
		if in == nil {
			m.writePredicted(p.ids, k)
		} else {
			m.dev.Copy(p.embedded, m.ofLayer(in, k))
		}
		if k > 0 {
			m.dev.Normalize(w.h, w.predicted[k-1].out, m.predictionNorm(k-1), false)
		}
		m.join(k, false)
		i := len(m.layers) + k
		st := &w.saved[0]
		if w.shape.train {
			st = &w.saved[i]
		}
		l := &m.predictions[k]
		m.dev.MatMul(st.x0, w.pair, l.projection.w.T(), xpu.MatMulOptions{})
		if err := m.attend(ctx, &l.layer, st, w.ownKeys()); err != nil {
			return err
		}
		if err := m.feedForward(ctx, &l.layer, st, i, p.out); err != nil {
			return err
		}
	}
	if n := len(w.predicted); n > 0 && w.shape.train {
		m.dev.Normalize(w.h, w.predicted[n-1].out, m.predictionNorm(n-1), false) // for its statistics
	}
	return nil
}

// join sets ws.pair to the input of the projection of layer k, given n in ws.h, and returns the
// embeddings. known means that the statistics of the norms were computed before.
func (m *Model) join(k int, known bool) (embedded xpu.Tensor) {
	w, h := &m.ws, m.cfg.HiddenSize
	hidden, embedding := m.inputNorms(k)
	m.dev.Normalize(w.half, w.h, hidden, known)
	m.dev.CopyColumns(w.pair.Slice(1, h, 2*h), w.half)
	if embedded = w.predicted[k].embedded; m.stage.first {
		embedded = w.embedded
		m.dev.Embed(embedded, m.embed.w, w.predicted[k].ids)
	}
	m.dev.Normalize(w.half, embedded, embedding, known)
	m.dev.CopyColumns(w.pair.Slice(1, 0, h), w.half)
	return embedded
}

// inputNorms returns the norms of the inputs of layer k of multi-token prediction.
func (m *Model) inputNorms(k int) (hidden, embedding xpu.Norm) {
	p, of := &m.predictions[k], &m.ws.predicted[k]
	return m.residualNorm(p.hiddenNorm, xpu.Tensor{}, of.hiddenRStd),
		m.residualNorm(p.embeddingNorm, xpu.Tensor{}, of.embeddingRStd)
}

// predictionSeeds times k+1 is added to [BackwardOptions.SampleSeed] for layer k of multi-token
// prediction.
const predictionSeeds = 0x9e3779b97f4a7c15

// predictionLosses computes the losses of the layers of multi-token prediction, and adds to the
// gradient of the head. It sets ws.dn to the gradients of the head's inputs; ws.dh has the first.
func (m *Model) predictionLosses(opts BackwardOptions, size stepSize) {
	w, n := &m.ws, len(m.ws.predicted)
	weight := opts.Loss.PredictionCoefficient / float64(n)
	if opts.SampleTargets { // the square of the gradient has the weight
		weight = math.Sqrt(weight)
	}
	scale, seed := weight/float64(size.targets), opts.SampleSeed
	m.dev.Copy(w.dn[0], w.dh)
	for k := range w.predicted {
		m.dev.Normalize(w.h, w.predicted[k].out, m.predictionNorm(k), true)
		opts.SampleSeed = seed + uint64(k+1)*predictionSeeds
		m.crossEntropy(opts, scale, func(t int) int32 {
			row, i := m.rowPosition(t)
			_, target := w.batch.predicted(row, i, k)
			return target
		}, w.predicted[k].ce, accumulate)
		if scale == 0 { // there is no gradient
			m.dev.Zero(w.dn[k+1])
		} else {
			m.dev.Copy(w.dn[k+1], w.dh)
		}
	}
}

// predictionNormGrad sets ws.dx to the gradient of the output of layer k of multi-token prediction,
// from the gradient of the head's input.
func (m *Model) predictionNormGrad(k int) {
	w := &m.ws
	m.dev.Zero(w.dx)
	m.dev.NormGrad(w.dx, w.dn[k+1], w.predicted[k].out, m.predictionNorm(k), m.predictions[k].norm.g)
}

// joinGrad adds to the gradients of the projection of layer k of multi-token prediction, of its
// norms, and of the embedding, from the gradient of the projection in ws.dx. It adds the gradient
// of n to ws.dn[k]. If the first group of layers has the embedding, it gets the gradients of the
// embeddings in out.
func (m *Model) joinGrad(k int, out *Relay) {
	w, h, p := &m.ws, m.cfg.HiddenSize, &m.predictions[k]
	if k == 0 {
		m.normalizeLast(true)
	} else {
		m.dev.Normalize(w.h, w.predicted[k-1].out, m.predictionNorm(k-1), true)
	}
	embedded := m.join(k, true)
	m.dev.MatMul(p.projection.g, w.dx.T(), w.pair, m.toGradients)
	m.dev.MatMul(w.pair, w.dx, p.projection.w, xpu.MatMulOptions{})
	hidden, embedding := m.inputNorms(k)
	m.dev.CopyColumns(w.half, w.pair.Slice(1, h, 2*h))
	m.dev.NormGrad(w.dn[k], w.half, w.h, hidden, p.hiddenNorm.g)
	m.dev.CopyColumns(w.half, w.pair.Slice(1, 0, h))
	m.dev.Zero(w.dx)
	m.dev.NormGrad(w.dx, w.half, embedded, embedding, p.embeddingNorm.g)
	if out == nil {
		m.dev.EmbedGrad(m.embed.g, w.dx, w.predicted[k].ids, int32(m.cfg.PadTokenID))
	} else {
		m.dev.Copy(m.ofLayer(out, k), w.dx)
	}
}

// predictionStats returns the losses of the layers of multi-token prediction after settle.
func (m *Model) predictionStats() (losses []float64, targets []int64) {
	w := &m.ws
	if len(w.predicted) == 0 || !w.shape.train {
		return nil, nil
	}
	losses = room(&w.predictionLoss, len(w.predicted))
	targets = room(&w.predictionTargets, len(w.predicted))
	clear(losses)
	clear(targets)
	for k := range w.predicted {
		for t, ce := range w.predicted[k].ce {
			row, i := m.rowPosition(t)
			if _, target := w.batch.predicted(row, i, k); target >= 0 {
				losses[k] += ce
				targets[k]++
			}
		}
	}
	return losses, targets
}
