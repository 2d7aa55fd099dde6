package moe

import (
	"context"

	"mula/xpu"
	"mula/xpu/comm"
)

// A feedForwardBlock computes the function f of a layer's second half, a dense network or a sum
// over experts. In its methods number is the index of the layer.
type feedForwardBlock interface {
	// begin starts a pass over the given number of tokens of this rank.
	begin(ctx context.Context, tokens int) error

	// forward computes out = x + f(ws.h), or f(ws.h) if x is absent; out may alias x0. It may
	// overwrite ws.h.
	forward(ctx context.Context, m *Model, l *layer, st *saved, number int, out, x xpu.Tensor) error

	// expand computes again the gate and up projections of ws.h, which forward computes but does
	// not keep at some levels of recomputation.
	expand(ctx context.Context, m *Model, l *layer, st *saved, number int) error

	// grad computes the gradient of ws.h in ws.dh from dy, the gradient of f(ws.h), and adds to the
	// gradients of the weights. ws.slopes holds the slopes of the load-balancing loss. zFactor is
	// the derivative of the weighted z-loss by half the squared logsumexp.
	grad(ctx context.Context, m *Model, l *layer, st *saved, number int, dy xpu.Tensor, zFactor float64) error

	// prepare allocates what a flight through the given number of layers with experts needs.
	prepare(f *flight, layers int)

	// free releases the device memory that does not belong to a flight.
	free()
}

// newFeedForward returns the block of a model's layers with experts on one rank, or denseBlock if
// it has none.
func newFeedForward(c Config, dev xpu.Device, p Parallel) feedForwardBlock {
	switch {
	case len(p.expertLayers(c)) == 0:
		return denseBlock{}
	case !c.dispatches(p.Mesh.Size(comm.EP)):
		return expertBlock{}
	}
	return newDispatch(c, dev, p)
}

// blockOf returns the block of a layer.
func (m *Model) blockOf(l *layer) feedForwardBlock {
	if !l.hasExperts() {
		return denseBlock{}
	}
	return m.block
}

// A localBlock exchanges nothing with other ranks and has no memory of its own.
type localBlock struct{}

func (localBlock) begin(context.Context, int) error { return nil }
func (localBlock) prepare(*flight, int)             {}
func (localBlock) free()                            {}

// A network is the feed-forward network of a layer without experts, or of its shared experts, with
// the buffers of a pass.
type network struct {
	gateUp, down tensor
	products     xpu.Tensor // gate and up projections; in the backward pass their gradients
	act, dact    xpu.Tensor

	// The output of a token is multiplied by its weight. dweight is the gradient of the weights.
	// Both are [T]; without weights they are absent.
	weight, dweight xpu.Tensor
}

// expand computes the gate and up projections of ws.h.
func (n network) expand(ctx context.Context, m *Model) error {
	h, err := m.allInputs(ctx)
	if err != nil {
		return err
	}
	m.dev.MatMul(n.products, h, n.gateUp.w.T(), xpu.MatMulOptions{})
	return nil
}

// activate computes the activations of ws.h.
func (n network) activate(ctx context.Context, m *Model) error {
	if err := n.expand(ctx, m); err != nil {
		return err
	}
	m.dev.SwiGLU(n.act.AsOperand(), n.products, n.weight)
	return nil
}

// contract computes the output of the network after activate.
func (n network) contract(ctx context.Context, m *Model, out xpu.Tensor, opts xpu.MatMulOptions) error {
	return m.blockProduct(ctx, out, n.act, n.down.w.T(), opts)
}

// grad computes the gradient of ws.h in ws.dh from dy, the gradient of the output, and adds to the
// gradients of the network's parameters. [Model.restore] has set [Model.heldInputs].
func (n network) grad(ctx context.Context, m *Model, dy xpu.Tensor, opts xpu.MatMulOptions) error {
	dy, err := m.tokensOfAll(ctx, dy, m.ws.all.y)
	if err != nil {
		return err
	}
	m.dev.MatMul(n.dact, dy, n.down.w, xpu.MatMulOptions{})
	m.dev.SwiGLUGrad(n.products.AsOperand(), n.act.AsOperand(), n.dact, n.weight, n.dweight)
	m.dev.MatMul(n.down.g, dy.T(), n.act, m.toGradients)
	m.dev.MatMul(n.gateUp.g, n.products.T(), m.heldInputs(), m.toGradients)
	return m.blockProduct(ctx, m.ws.dh, n.products, n.gateUp.w, opts)
}

// denseBlock is the block of a layer without experts.
type denseBlock struct{ localBlock }

func (denseBlock) network(m *Model, l *layer, st *saved) network {
	return network{gateUp: l.gateUp, down: l.down, products: st.dense, act: m.ws.denseAct, dact: m.ws.denseDact}
}

func (b denseBlock) forward(ctx context.Context, m *Model, l *layer, st *saved, _ int, out, x xpu.Tensor) error {
	n := b.network(m, l, st)
	if err := n.activate(ctx, m); err != nil {
		return err
	}
	if x.Present() {
		m.dev.Copy(out, x)
	}
	return n.contract(ctx, m, out, xpu.MatMulOptions{Accumulate: x.Present()})
}

func (b denseBlock) expand(ctx context.Context, m *Model, l *layer, st *saved, _ int) error {
	return b.network(m, l, st).expand(ctx, m)
}

func (b denseBlock) grad(ctx context.Context, m *Model, l *layer, st *saved, _ int, dy xpu.Tensor, _ float64) error {
	return b.network(m, l, st).grad(ctx, m, dy, xpu.MatMulOptions{})
}

// expertBlock is the block of a mixture of experts whose experts are all on this rank.
//
// The rows of the expert products are the (token, expert) pairs in expert order. A row's routing
// weight is multiplied into the input of the down projection. As that projection is linear, the sum
// over a token's experts needs no weights, and the backward pass needs no expert outputs.
type expertBlock struct{ localBlock }

func (expertBlock) forward(_ context.Context, m *Model, l *layer, st *saved, number int, out, x xpu.Tensor) error {
	m.route(l, st)
	m.dev.SortRows(st.routing)
	m.expand(l, st, m.ws.h)
	m.contract(l, st)
	m.dev.SumRows(out, x, m.ws.expert, st.routing.RowOf)
	return nil
}

func (expertBlock) expand(_ context.Context, m *Model, l *layer, st *saved, _ int) error {
	m.expand(l, st, m.ws.h)
	return nil
}

func (expertBlock) grad(_ context.Context, m *Model, l *layer, st *saved, number int, dy xpu.Tensor,
	zFactor float64) error {
	w := &m.ws
	m.contractGrad(l, st, dy)
	m.dev.SumRows(w.dh, xpu.Tensor{}, w.gathered, st.routing.RowOf)
	m.expertsGrad(l, st, w.h)
	m.routeGrad(l, st, zFactor)
	return nil
}

// feedForward computes the output of layer number from x1: it adds the feed-forward block, with its
// norm. out may alias x0.
func (m *Model) feedForward(ctx context.Context, l *layer, st *saved, number int, out xpu.Tensor) error {
	m.blockInput(m.ws.h, st.x1, m.norm2(l, st), false)
	m.jitter(l, number, m.ws.h)
	shared := m.sharedNetwork(l, st)
	if l.hasShared() { // before the block, which may overwrite ws.h
		if err := m.scoreShared(ctx, l, st); err != nil {
			return err
		}
		if err := shared.activate(ctx, m); err != nil {
			return err
		}
	}
	y, x := out, st.x1
	own := m.blockOutput(st.y2)
	if own.Present() {
		y, x = own, xpu.Tensor{}
	}
	if err := m.blockOf(l).forward(ctx, m, l, st, number, y, x); err != nil {
		return err
	}
	if l.hasShared() {
		if err := shared.contract(ctx, m, y, accumulate); err != nil {
			return err
		}
	}
	if own.Present() {
		m.addBlock(out, st.x1, own, m.norm2(l, st))
	}
	return nil
}

// feedForwardGrad turns the gradient of the output of layer number in ws.dx into the gradient of
// x1, and adds to the gradients of the weights. ws.h holds the input of the block.
func (m *Model) feedForwardGrad(ctx context.Context, l *layer, st *saved, number int, zFactor float64) error {
	dy := m.blockOutputGrad(st.y2, m.norm2(l, st), l.norm2.g)
	if err := m.blockOf(l).grad(ctx, m, l, st, number, dy, zFactor); err != nil {
		return err
	}
	if l.hasShared() {
		if err := m.shareScores(ctx, l, st); err != nil {
			return err
		}
		if err := m.sharedNetwork(l, st).grad(ctx, m, dy, accumulate); err != nil {
			return err
		}
		if err := m.scoreSharedGrad(ctx, l, st); err != nil {
			return err
		}
	}
	m.jitter(l, number, m.ws.dh)
	m.blockInputGrad(st.x1, m.norm2(l, st), l.norm2.g)
	return nil
}

// The experts of [GPTOSS] have biases b and a clamped SwiGLU:
//
//	y = down·clamped(gate·x + b_gate, up·x + b_up) + b_down
//
// The routing weight of a row is also multiplied into b_down.

// expand computes the gate and up projections of the experts' rows of the normalised input x.
func (m *Model) expand(l *layer, st *saved, x xpu.Tensor) {
	w, r := &m.ws, &st.routing
	m.dev.GatherRows(w.gathered.AsOperand(), x, r.TokenOf)
	m.dev.GroupedMatMul(st.gateUp, w.gathered, l.gateUp.w.T(), r.Counts, xpu.MatMulOptions{})
	if l.gateUpBias.w.Present() {
		m.dev.GroupedBias(st.gateUp, l.gateUpBias.w, xpu.Tensor{}, r.Counts)
	}
}

// contract computes the outputs of the experts, multiplied by their routing weights, in ws.expert.
func (m *Model) contract(l *layer, st *saved) {
	w, r := &m.ws, &st.routing
	if clamp := m.cfg.family().clamp; clamp.Limit > 0 {
		m.dev.ClampedSwiGLU(w.act.AsOperand(), st.gateUp, r.Weight, clamp)
	} else {
		m.dev.SwiGLU(w.act.AsOperand(), st.gateUp, r.Weight)
	}
	m.dev.GroupedMatMul(w.expert, w.act, l.down.w.T(), r.Counts, xpu.MatMulOptions{})
	if l.downBias.w.Present() {
		m.dev.GroupedBias(w.expert, l.downBias.w, r.Weight, r.Counts)
	}
}

// contractGrad computes, from the gradient dy of the layer's output, the gradients of the routing
// weights in ws.dweight and of the expert inputs in ws.gathered. For expertsGrad it leaves the rows
// of dy in ws.expert, the inputs of the down projection in ws.act, and the gradients of gate and up
// in st.gateUp.
func (m *Model) contractGrad(l *layer, st *saved, dy xpu.Tensor) {
	w, r := &m.ws, &st.routing
	rows, gradients := w.expert, st.gateUp
	if !l.downBias.g.Present() { // otherwise the gradients of biases are sums of them
		rows, gradients = rows.AsOperand(), gradients.AsOperand()
	}
	m.dev.GatherRows(rows, dy, r.TokenOf)
	m.dev.GroupedMatMul(w.dact, w.expert, l.down.w, r.Counts, xpu.MatMulOptions{})
	if clamp := m.cfg.family().clamp; clamp.Limit > 0 {
		m.dev.ClampedSwiGLUGrad(gradients, w.act.AsOperand(), w.dact, r.Weight, w.dweight, clamp)
	} else {
		m.dev.SwiGLUGrad(gradients, w.act.AsOperand(), w.dact, r.Weight, w.dweight)
	}
	if l.downBias.g.Present() {
		m.dev.GroupedBiasGrad(l.downBias.g, w.expert, l.downBias.w, r.Weight, w.dweight, r.Counts)
		m.dev.GroupedBiasGrad(l.gateUpBias.g, st.gateUp, xpu.Tensor{}, xpu.Tensor{}, xpu.Tensor{}, r.Counts)
	}
	m.dev.GroupedMatMul(w.gathered, st.gateUp, l.gateUp.w, r.Counts, xpu.MatMulOptions{})
}

// expertsGrad adds to the gradients of the expert weights, from the expert input x and the buffers
// that contractGrad filled.
func (m *Model) expertsGrad(l *layer, st *saved, x xpu.Tensor) {
	w, r := &m.ws, &st.routing
	m.dev.GroupedWeightGrad(l.down.g, w.expert, w.act, r.Counts, m.toGradients)
	m.dev.GatherRows(w.gathered.AsOperand(), x, r.TokenOf)
	m.dev.GroupedWeightGrad(l.gateUp.g, st.gateUp, w.gathered, r.Counts, m.toGradients)
}
