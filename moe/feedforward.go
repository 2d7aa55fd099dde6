package moe

import (
	"context"

	"mula/xpu"
)

// feedForward computes out = x1 + experts(norm(x1)) for layer number; out may alias x0.
//
// The rows of the expert products are the (token, expert) pairs in expert order. A row's routing
// weight is multiplied into the input of the down projection. As that projection is linear, the sum
// over a token's experts needs no weights, and the backward pass needs no expert outputs.
func (m *Model) feedForward(ctx context.Context, l *layer, st *saved, number int, out xpu.Tensor) error {
	w := &m.ws
	m.dev.Normalize(w.h, st.x1, m.norm2(l, st), false)
	if !m.cfg.moe() {
		m.expand(l, st, w.h)
		m.dev.SwiGLU(w.act, st.gateUp, xpu.Tensor{})
		m.dev.Copy(out, st.x1)
		m.dev.MatMul(out, w.act, l.down.w.T(), accumulate)
		return nil
	}
	m.route(l, st, number)
	if m.dispatch != nil {
		return m.dispatch.forward(ctx, m, l, st, number, out)
	}
	m.dev.SortRows(st.routing)
	m.expand(l, st, w.h)
	m.contract(l, st)
	m.dev.SumRows(out, st.x1, w.expert, st.routing.RowOf)
	return nil
}

// expand computes the gate and up projections of the normalised input x.
func (m *Model) expand(l *layer, st *saved, x xpu.Tensor) {
	w, r := &m.ws, &st.routing
	if !m.cfg.moe() {
		m.dev.MatMul(st.gateUp, x, l.gateUp.w.T(), xpu.MatMulOptions{})
		return
	}
	m.dev.GatherRows(w.gathered, x, r.TokenOf)
	m.dev.GroupedMatMul(st.gateUp, w.gathered, l.gateUp.w.T(), r.Counts, xpu.MatMulOptions{})
}

// contract computes the outputs of the experts, multiplied by their routing weights, in ws.expert.
func (m *Model) contract(l *layer, st *saved) {
	w, r := &m.ws, &st.routing
	m.dev.SwiGLU(w.act, st.gateUp, r.Weight)
	m.dev.GroupedMatMul(w.expert, w.act, l.down.w.T(), r.Counts, xpu.MatMulOptions{})
}

// feedForwardGrad turns the gradient of the output of layer number in ws.dx into the gradient of
// x1, and adds to the gradients of the weights. ws.h holds the input of the experts, ws.slopes the
// slopes of the load-balancing loss. zFactor is the derivative of the weighted z-loss by half the
// squared logsumexp.
func (m *Model) feedForwardGrad(ctx context.Context, l *layer, st *saved, number int, zFactor float64) error {
	w := &m.ws
	switch {
	case !m.cfg.moe():
		m.dev.MatMul(w.dact, w.dx, l.down.w, xpu.MatMulOptions{})
		m.dev.SwiGLUGrad(st.gateUp, w.act, w.dact, xpu.Tensor{}, xpu.Tensor{})
		m.dev.MatMul(l.down.g, w.dx.T(), w.act, accumulate)
		m.dev.MatMul(l.gateUp.g, st.gateUp.T(), w.h, accumulate)
		m.dev.MatMul(w.dh, st.gateUp, l.gateUp.w, xpu.MatMulOptions{})
	case m.dispatch != nil:
		if err := m.dispatch.grad(ctx, m, l, number); err != nil {
			return err
		}
		m.routeGrad(l, st, number, zFactor)
	default:
		m.contractGrad(l, st, w.dx)
		m.dev.SumRows(w.dh, xpu.Tensor{}, w.gathered, st.routing.RowOf)
		m.expertsGrad(l, st, w.h)
		m.routeGrad(l, st, number, zFactor)
	}
	m.dev.NormGrad(w.dx, w.dh, st.x1, m.norm2(l, st), l.norm2.g)
	return nil
}

// contractGrad computes, from the gradient dy of the layer's output, the gradients of the routing
// weights in ws.dweight and of the expert inputs in ws.gathered. For expertsGrad it leaves the rows
// of dy in ws.expert, the inputs of the down projection in ws.act, and the gradients of gate and up
// in st.gateUp.
func (m *Model) contractGrad(l *layer, st *saved, dy xpu.Tensor) {
	w, r := &m.ws, &st.routing
	m.dev.GatherRows(w.expert, dy, r.TokenOf)
	m.dev.GroupedMatMul(w.dact, w.expert, l.down.w, r.Counts, xpu.MatMulOptions{})
	m.dev.SwiGLUGrad(st.gateUp, w.act, w.dact, r.Weight, w.dweight)
	m.dev.GroupedMatMul(w.gathered, st.gateUp, l.gateUp.w, r.Counts, xpu.MatMulOptions{})
}

// expertsGrad adds to the gradients of the expert weights, from the expert input x and the buffers
// that contractGrad filled.
func (m *Model) expertsGrad(l *layer, st *saved, x xpu.Tensor) {
	w, r := &m.ws, &st.routing
	m.dev.GroupedWeightGrad(l.down.g, w.expert, w.act, r.Counts, accumulate)
	m.dev.GatherRows(w.gathered, x, r.TokenOf)
	m.dev.GroupedWeightGrad(l.gateUp.g, st.gateUp, w.gathered, r.Counts, accumulate)
}
