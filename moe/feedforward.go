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
func (m *Model) feedForward(ctx context.Context, l *layer, st *saved, number int, out []float32) error {
	c, w := &m.cfg, &m.ws
	h, ffn := c.HiddenSize, c.IntermediateSize
	m.dev.Normalize(w.h, st.x1, m.norm2(l, st), false)
	if !c.moe() {
		m.expand(l, st, w.h)
		m.dev.SwiGLU(w.act, st.gateUp, nil, ffn)
		m.dev.Copy(out, st.x1)
		m.dev.MatMul(xpu.Of(out, w.shape.tokens(), h), xpu.Of(w.act, w.shape.tokens(), ffn),
			xpu.Of(l.down.w, h, ffn).T(), xpu.MatMulOptions{Accumulate: true})
		return nil
	}
	m.route(l, st, number)
	if m.dispatch != nil {
		return m.dispatch.forward(ctx, m, l, st, number, out)
	}
	m.dev.SortRows(st.routing)
	m.expand(l, st, w.h)
	m.contract(l, st)
	m.dev.SumRows(out, st.x1, w.expert, st.routing.RowOf, c.ExpertsPerToken, h)
	return nil
}

// expand computes the gate and up projections of the normalised input x.
func (m *Model) expand(l *layer, st *saved, x []float32) {
	w, h, ffn := &m.ws, m.cfg.HiddenSize, m.cfg.IntermediateSize
	if !m.cfg.moe() {
		m.dev.MatMul(xpu.Of(st.gateUp, w.shape.tokens(), 2*ffn), xpu.Of(x, w.shape.tokens(), h),
			xpu.Of(l.gateUp.w, 2*ffn, h).T(), xpu.MatMulOptions{})
		return
	}
	r := &st.routing
	m.dev.GatherRows(w.gathered, x, r.TokenOf, h)
	m.dev.GroupedMatMul(xpu.Of(st.gateUp, len(r.TokenOf), 2*ffn), xpu.Of(w.gathered, len(r.TokenOf), h),
		xpu.Of(l.gateUp.w, len(r.Counts), 2*ffn, h).T(), xpu.OfInts(r.Counts, len(r.Counts)),
		xpu.MatMulOptions{})
}

// contract computes the outputs of the experts, multiplied by their routing weights, in ws.expert.
func (m *Model) contract(l *layer, st *saved) {
	w, r, h, ffn := &m.ws, &st.routing, m.cfg.HiddenSize, m.cfg.IntermediateSize
	m.dev.SwiGLU(w.act, st.gateUp, r.Weight, ffn)
	m.dev.GroupedMatMul(xpu.Of(w.expert, len(r.TokenOf), h), xpu.Of(w.act, len(r.TokenOf), ffn),
		xpu.Of(l.down.w, len(r.Counts), h, ffn).T(), xpu.OfInts(r.Counts, len(r.Counts)), xpu.MatMulOptions{})
}

// feedForwardGrad turns the gradient of the output of layer number in ws.dx into the gradient of
// x1, and adds to the gradients of the weights. ws.h holds the input of the experts, ws.slopes the
// slopes of the load-balancing loss. zFactor is the derivative of the weighted z-loss by half the
// squared logsumexp.
func (m *Model) feedForwardGrad(ctx context.Context, l *layer, st *saved, number int, zFactor float64) error {
	c, w := &m.cfg, &m.ws
	h, ffn, t := c.HiddenSize, c.IntermediateSize, w.shape.tokens()
	switch {
	case !c.moe():
		m.dev.MatMul(xpu.Of(w.dact, t, ffn), xpu.Of(w.dx, t, h), xpu.Of(l.down.w, h, ffn),
			xpu.MatMulOptions{})
		m.dev.SwiGLUGrad(st.gateUp, w.act, w.dact, nil, nil, ffn)
		m.dev.MatMul(xpu.Of(l.down.g, h, ffn), xpu.Of(w.dx, t, h).T(), xpu.Of(w.act, t, ffn),
			xpu.MatMulOptions{Accumulate: true})
		m.dev.MatMul(xpu.Of(l.gateUp.g, 2*ffn, h), xpu.Of(st.gateUp, t, 2*ffn).T(),
			xpu.Of(w.h, t, h), xpu.MatMulOptions{Accumulate: true})
		m.dev.MatMul(xpu.Of(w.dh, t, h), xpu.Of(st.gateUp, t, 2*ffn), xpu.Of(l.gateUp.w, 2*ffn, h),
			xpu.MatMulOptions{})
	case m.dispatch != nil:
		if err := m.dispatch.grad(ctx, m, l, number); err != nil {
			return err
		}
		m.routeGrad(l, st, number, zFactor)
	default:
		m.contractGrad(l, st, w.dx)
		m.dev.SumRows(w.dh, nil, w.gathered, st.routing.RowOf, c.ExpertsPerToken, h)
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
func (m *Model) contractGrad(l *layer, st *saved, dy []float32) {
	w, r, h, ffn := &m.ws, &st.routing, m.cfg.HiddenSize, m.cfg.IntermediateSize
	m.dev.GatherRows(w.expert, dy, r.TokenOf, h)
	m.dev.GroupedMatMul(xpu.Of(w.dact, len(r.TokenOf), ffn), xpu.Of(w.expert, len(r.TokenOf), h),
		xpu.Of(l.down.w, len(r.Counts), h, ffn), xpu.OfInts(r.Counts, len(r.Counts)), xpu.MatMulOptions{})
	m.dev.SwiGLUGrad(st.gateUp, w.act, w.dact, r.Weight, w.dweight, ffn)
	m.dev.GroupedMatMul(xpu.Of(w.gathered, len(r.TokenOf), h), xpu.Of(st.gateUp, len(r.TokenOf), 2*ffn),
		xpu.Of(l.gateUp.w, len(r.Counts), 2*ffn, h), xpu.OfInts(r.Counts, len(r.Counts)), xpu.MatMulOptions{})
}

// expertsGrad adds to the gradients of the expert weights, from the expert input x and the buffers
// that contractGrad filled.
func (m *Model) expertsGrad(l *layer, st *saved, x []float32) {
	w, r, h, ffn := &m.ws, &st.routing, m.cfg.HiddenSize, m.cfg.IntermediateSize
	m.dev.GroupedWeightGrad(xpu.Of(l.down.g, len(r.Counts), h, ffn), xpu.Of(w.expert, len(r.TokenOf), h),
		xpu.Of(w.act, len(r.TokenOf), ffn), xpu.OfInts(r.Counts, len(r.Counts)),
		xpu.MatMulOptions{Accumulate: true})
	m.dev.GatherRows(w.gathered, x, r.TokenOf, h)
	m.dev.GroupedWeightGrad(xpu.Of(l.gateUp.g, len(r.Counts), 2*ffn, h),
		xpu.Of(st.gateUp, len(r.TokenOf), 2*ffn), xpu.Of(w.gathered, len(r.TokenOf), h),
		xpu.OfInts(r.Counts, len(r.Counts)), xpu.MatMulOptions{Accumulate: true})
}
