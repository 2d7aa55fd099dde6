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
	case p.Mesh.Size(comm.EP) == 1:
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

// denseBlock is the block of a layer without experts.
type denseBlock struct{ localBlock }

func (b denseBlock) forward(ctx context.Context, m *Model, l *layer, st *saved, number int, out, x xpu.Tensor) error {
	w := &m.ws
	b.expand(ctx, m, l, st, number)
	m.dev.SwiGLU(w.denseAct.AsOperand(), st.dense, xpu.Tensor{})
	if x.Present() {
		m.dev.Copy(out, x)
	}
	m.dev.MatMul(out, w.denseAct, l.down.w.T(), xpu.MatMulOptions{Accumulate: x.Present()})
	return nil
}

func (denseBlock) expand(_ context.Context, m *Model, l *layer, st *saved, _ int) error {
	m.dev.MatMul(st.dense, m.ws.h, l.gateUp.w.T(), xpu.MatMulOptions{})
	return nil
}

func (denseBlock) grad(_ context.Context, m *Model, l *layer, st *saved, _ int, dy xpu.Tensor, _ float64) error {
	w := &m.ws
	m.dev.MatMul(w.denseDact, dy, l.down.w, xpu.MatMulOptions{})
	m.dev.SwiGLUGrad(st.dense.AsOperand(), w.denseAct.AsOperand(), w.denseDact, xpu.Tensor{}, xpu.Tensor{})
	m.dev.MatMul(l.down.g, dy.T(), w.denseAct, accumulate)
	m.dev.MatMul(l.gateUp.g, st.dense.T(), w.h, accumulate)
	m.dev.MatMul(w.dh, st.dense, l.gateUp.w, xpu.MatMulOptions{})
	return nil
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
	block := m.blockOf(l)
	m.sharedForward(l, st)
	if !st.y2.Present() {
		err := block.forward(ctx, m, l, st, number, out, st.x1)
		if err == nil {
			m.addShared(l, out)
		}
		return err
	}
	if err := block.forward(ctx, m, l, st, number, st.y2, xpu.Tensor{}); err != nil {
		return err
	}
	m.addShared(l, st.y2)
	m.addNorm(out, st.x1, st.y2, m.norm2(l, st))
	return nil
}

// feedForwardGrad turns the gradient of the output of layer number in ws.dx into the gradient of
// x1, and adds to the gradients of the weights. ws.h holds the input of the block.
func (m *Model) feedForwardGrad(ctx context.Context, l *layer, st *saved, number int, zFactor float64) error {
	dy := m.blockOutputGrad(st.y2, m.norm2(l, st), l.norm2.g)
	if err := m.blockOf(l).grad(ctx, m, l, st, number, dy, zFactor); err != nil {
		return err
	}
	m.sharedGrad(l, st, dy)
	m.blockInputGrad(st.x1, m.norm2(l, st), l.norm2.g)
	return nil
}

// expand computes the gate and up projections of the experts' rows of the normalised input x.
func (m *Model) expand(l *layer, st *saved, x xpu.Tensor) {
	w, r := &m.ws, &st.routing
	m.dev.GatherRows(w.gathered.AsOperand(), x, r.TokenOf)
	m.dev.GroupedMatMul(st.gateUp, w.gathered, l.gateUp.w.T(), r.Counts, xpu.MatMulOptions{})
}

// contract computes the outputs of the experts, multiplied by their routing weights, in ws.expert.
func (m *Model) contract(l *layer, st *saved) {
	w, r := &m.ws, &st.routing
	m.dev.SwiGLU(w.act.AsOperand(), st.gateUp, r.Weight)
	m.dev.GroupedMatMul(w.expert, w.act, l.down.w.T(), r.Counts, xpu.MatMulOptions{})
}

// contractGrad computes, from the gradient dy of the layer's output, the gradients of the routing
// weights in ws.dweight and of the expert inputs in ws.gathered. For expertsGrad it leaves the rows
// of dy in ws.expert, the inputs of the down projection in ws.act, and the gradients of gate and up
// in st.gateUp.
func (m *Model) contractGrad(l *layer, st *saved, dy xpu.Tensor) {
	w, r := &m.ws, &st.routing
	m.dev.GatherRows(w.expert.AsOperand(), dy, r.TokenOf)
	m.dev.GroupedMatMul(w.dact, w.expert, l.down.w, r.Counts, xpu.MatMulOptions{})
	m.dev.SwiGLUGrad(st.gateUp.AsOperand(), w.act.AsOperand(), w.dact, r.Weight, w.dweight)
	m.dev.GroupedMatMul(w.gathered, st.gateUp, l.gateUp.w, r.Counts, xpu.MatMulOptions{})
}

// expertsGrad adds to the gradients of the expert weights, from the expert input x and the buffers
// that contractGrad filled.
func (m *Model) expertsGrad(l *layer, st *saved, x xpu.Tensor) {
	w, r := &m.ws, &st.routing
	m.dev.GroupedWeightGrad(l.down.g, w.expert, w.act, r.Counts, accumulate)
	m.dev.GatherRows(w.gathered.AsOperand(), x, r.TokenOf)
	m.dev.GroupedWeightGrad(l.gateUp.g, st.gateUp, w.gathered, r.Counts, accumulate)
}
