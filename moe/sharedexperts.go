package moe

import (
	"context"

	"mula/xpu"
)

// Shared experts (https://arxiv.org/abs/2401.06066, section 3.2) process all tokens, without a
// router. They are one network of width [Config.SharedSize], whose output is added to the output of
// the experts. All ranks that share the experts hold it.
//
// In some families, the output s(x) has a gate: the block adds sigmoid(g·x)·s(x) for the input x of
// a token and a vector g. As the down projection is linear, its input is multiplied instead.
//
// The commands of a router with one expert compute the gate: the score of the expert is the
// sigmoid, and each token chooses the expert.

// sharedParts describes the shared experts of a family. The zero value is none.
type sharedParts struct {
	number   string // field of the number of shared experts, each of the width of an expert
	optional bool   // the number may be 0
	width    string // field of the width of a single shared expert with a gate
}

func (s sharedParts) exist() bool { return s.number != "" || s.gated() }
func (s sharedParts) gated() bool { return s.width != "" }

// block returns the place of the network in a layer's feed-forward block.
func (s sharedParts) block() string {
	if s.gated() {
		return ".shared_expert."
	}
	return ".shared_experts."
}

// sharedGate is the end of the name of the gate's weights.
const sharedGate = ".shared_expert_gate.weight"

// validateShared returns an error if the width of shared experts does not fit the family.
func (c Config) validateShared(bad func(field, format string, args ...any) error) error {
	const field = "shared_expert_intermediate_size"
	shared := c.family().shared
	switch n := c.SharedSize; {
	case n != 0 && !shared.exist():
		return bad(field, "is %d; it must be 0, because a %s model has no shared experts", n, c.Architecture)
	case shared.gated() && (n < 1 || n > maxWidth):
		return bad(field, "is %d; it must be between 1 and %d", n, maxWidth)
	case n < 0 || n > maxWidth || shared.number != "" && (n == 0 && !shared.optional || n%c.IntermediateSize != 0):
		return bad(field, "is %d; it must be a multiple of intermediate_size %d, up to %d", n, c.IntermediateSize,
			maxWidth)
	}
	return nil
}

// sharedExperts reads the number or the width of shared experts.
func (f *hfFields) sharedExperts(c *Config) {
	switch shared := c.family().shared; {
	case shared.gated():
		c.SharedSize = f.size(shared.width)
	case shared.exist():
		n, least := f.size(shared.number), 1
		if shared.optional {
			least = 0
		}
		if len(f.problems) == 0 && (n < least || n > maxExperts) {
			f.fail("%s is %d; it must be between %d and %d", shared.number, n, least, maxExperts)
		}
		c.SharedSize = n * c.IntermediateSize
	}
}

// sharedFields sets the fields of shared experts in a config.json.
func (c Config) sharedFields(fields map[string]any) {
	switch shared := c.family().shared; {
	case shared.gated():
		fields[shared.width] = c.SharedSize
	case shared.exist():
		fields[shared.number] = c.SharedSize / c.IntermediateSize
	}
}

// HasSharedGate reports whether a layer has shared experts with a gate.
func (c Config) HasSharedGate(layer int) bool {
	return c.HasExperts(layer) && c.SharedSize > 0 && c.family().shared.gated()
}

func (l *layer) hasShared() bool { return l.sharedGateUp.w.Present() }

// sharedNetwork returns the network of a layer's shared experts.
func (m *Model) sharedNetwork(l *layer, st *saved) network {
	n := network{gateUp: l.sharedGateUp, down: l.sharedDown, products: st.shared, act: m.ws.sharedAct,
		dact: m.ws.sharedDact}
	switch all := m.ws.all; {
	case !l.sharedGate.w.Present():
	case all.scores.Present():
		n.weight, n.dweight = all.scores, all.dscores
	default:
		n.weight, n.dweight = st.sharedScore.Flat(), m.ws.sharedGate.dscore
	}
	return n
}

// sharedGateSpace are the buffers of the gate of shared experts that all layers share.
type sharedGateSpace struct {
	logits xpu.Tensor      // [T, 1]; in the backward pass their gradient
	lse    xpu.Tensor      // [T] set by Route, and not read
	counts xpu.Tensor      // [1] the same
	stats  xpu.RouterStats // the same, on the host
	dscore xpu.Tensor      // [T] gradient of the scores
	slope  xpu.Tensor      // [1] 0: there is no load-balancing loss
}

// cut allocates the buffers from a.
func (s *sharedGateSpace) cut(p passShape, a *arena) {
	t, onHost := p.tokens(), s.stats.Counts
	if onHost == nil {
		onHost = make([]int64, 1)
	}
	*s = sharedGateSpace{logits: a.f32(t, 1), lse: a.f32(t), counts: a.i32(1),
		stats: xpu.RouterStats{Probs: a.f64(1), Counts: onHost}}
	if p.train {
		s.dscore, s.slope = a.f32(t), a.f32(1)
	}
}

// writeOrder fills the buffer order of the current flight.
func (m *Model) writeOrder() {
	w := &m.ws
	if !w.order.Present() {
		return
	}
	order := room(&w.ints, w.order.Elements())
	for t := range order {
		order[t] = int32(t)
	}
	m.dev.WriteInts(w.order, order)
}

// sharedRouting returns the gate of a layer's shared experts as a router with one expert.
func (m *Model) sharedRouting(st *saved) xpu.Routing {
	w := &m.ws
	t := w.shape.tokens()
	return xpu.Routing{Probs: st.sharedScore, LSE: w.sharedGate.lse, Chosen: w.row0.Rows(0, t).Reshape(t, 1),
		Counts: w.sharedGate.counts, RowOf: w.order.Reshape(t, 1), RouterKind: xpu.RouterKind{Sigmoid: true}}
}

// scoreShared computes the scores of the tokens in ws.h, if the layer's shared experts have a gate,
// and sets the weights of [Model.sharedNetwork].
func (m *Model) scoreShared(ctx context.Context, l *layer, st *saved) error {
	if !l.sharedGate.w.Present() {
		return nil
	}
	w := &m.ws
	m.dev.MatMul(w.sharedGate.logits, w.h, l.sharedGate.w.T(), xpu.MatMulOptions{})
	m.dev.Route(m.sharedRouting(st), w.sharedGate.logits, false, &w.sharedGate.stats)
	return m.shareScores(ctx, l, st)
}

// shareScores sets the weights of [Model.sharedNetwork] again, after passes of other layers.
func (m *Model) shareScores(ctx context.Context, l *layer, st *saved) error {
	if !l.sharedGate.w.Present() {
		return nil
	}
	_, err := m.tokensOfAll(ctx, st.sharedScore.Flat(), m.ws.all.scores)
	return err
}

// scoreSharedGrad adds the part of the gate to the gradient of ws.h in ws.dh, and to the gradient
// of the gate's weights. [network.grad] has set the gradient of the scores.
func (m *Model) scoreSharedGrad(ctx context.Context, l *layer, st *saved) error {
	if !l.sharedGate.w.Present() {
		return nil
	}
	w := &m.ws
	if all := w.all.dscores; all.Present() {
		if err := m.sumOfRanks(ctx, w.sharedGate.dscore, all, xpu.MatMulOptions{}); err != nil {
			return err
		}
	}
	r, gate := m.sharedRouting(st), &w.sharedGate
	r.LSE = st.sharedScore.Flat() // the sum of the scores of one expert
	m.dev.Zero(gate.slope)
	m.dev.RouteGrad(r, gate.logits, gate.slope, gate.dscore, 0)
	m.dev.MatMul(l.sharedGate.g, gate.logits.T(), w.h, m.toGradients)
	m.dev.MatMul(w.dh, gate.logits, l.sharedGate.w, accumulate)
	return nil
}
