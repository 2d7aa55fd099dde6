package moe

import (
	"context"

	"mula/xpu/cpu"
)

// feedForward computes out = x1 + experts(norm(x1)) for layer number; out may be the memory of x0.
//
// The rows of the expert products are the (token, expert) pairs in expert order. A row's routing weight is multiplied into the input of
// the down projection, which is linear: the sum over a token's experts is then a plain one, and the backward pass needs no outputs of
// experts.
func (m *Model) feedForward(ctx context.Context, l *layer, st *saved, number int, out []float32) error {
	c, w := m.cfg, &m.ws
	h, ffn, t := c.HiddenSize, c.IntermediateSize, w.shape.rows*w.shape.s
	m.normalize(w.h, st.norm2(l))
	if !c.moe() {
		m.expand(l, st, w.h)
		m.split(t, operands{saved: st}, func(m *Model, o *operands, _, lo, hi int) { m.activate(o.saved, lo, hi) })
		m.copyRows(out, st.x1)
		m.dev.MatMul(false, true, t, h, ffn, w.act, ffn, l.down.w, ffn, out, h, true)
		return nil
	}
	m.route(l, st, number)
	if m.dispatch != nil {
		return m.dispatch.forward(ctx, m, l, st, number, out)
	}
	st.sort(c.ExpertsPerToken)
	m.expand(l, st, w.h)
	m.contract(l, st)
	m.sumRows(out, st.x1, w.expert, st)
	return nil
}

// expand computes the gate and up projections of the normalised input x.
func (m *Model) expand(l *layer, st *saved, x []float32) {
	c, w := m.cfg, &m.ws
	h, ffn := c.HiddenSize, c.IntermediateSize
	if !c.moe() {
		m.dev.MatMul(false, true, w.shape.rows*w.shape.s, 2*ffn, h, x, h, l.gateUp.w, h, st.gateUp, 2*ffn, false)
		return
	}
	m.gatherRows(w.gathered, x, st)
	m.dev.GroupedMatMul(st.counts, true, 2*ffn, h, w.gathered, l.gateUpW, st.gateUp, false)
}

// contract computes the outputs of the experts, times their routing weights, in ws.expert.
func (m *Model) contract(l *layer, st *saved) {
	m.split(len(st.weight), operands{saved: st}, func(m *Model, o *operands, _, lo, hi int) {
		ffn := m.cfg.IntermediateSize
		m.activate(o.saved, lo, hi)
		for r := lo; r < hi; r++ {
			cpu.Scale(m.ws.act[r*ffn:][:ffn], o.saved.weight[r])
		}
	})
	m.dev.GroupedMatMul(st.counts, true, m.cfg.HiddenSize, m.cfg.IntermediateSize, m.ws.act, l.downW, m.ws.expert, false)
}

// activate sets rows [lo, hi) of ws.act to silu(gate)·up.
func (m *Model) activate(st *saved, lo, hi int) {
	ffn := m.cfg.IntermediateSize
	for r := lo; r < hi; r++ {
		both := st.gateUp[r*2*ffn:][:2*ffn]
		cpu.SwiGLU(m.ws.act[r*ffn:][:ffn], both[:ffn], both[ffn:])
	}
}

// gatherRows copies the rows of x [T, H] to dst [R, H] in expert order.
func (m *Model) gatherRows(dst, x []float32, st *saved) {
	m.split(len(st.tokenOf), operands{saved: st, dst: dst, x: x}, func(m *Model, o *operands, _, lo, hi int) {
		h := m.cfg.HiddenSize
		for r := lo; r < hi; r++ {
			copy(o.dst[r*h:][:h], o.x[int(o.saved.tokenOf[r])*h:])
		}
	})
}

// sumRows sets dst [T, H] to x plus the sum of each token's rows of y [R, H], in the order of its choices; without x to the sum alone.
func (m *Model) sumRows(dst, x, y []float32, st *saved) {
	m.split(m.ws.shape.rows*m.ws.shape.s, operands{saved: st, dst: dst, x: x, y: y}, func(m *Model, o *operands, _, lo, hi int) {
		h, k, y := m.cfg.HiddenSize, m.cfg.ExpertsPerToken, o.y
		for t := lo; t < hi; t++ {
			row := o.dst[t*h:][:h]
			rows := o.saved.rowOf[t*k:][:k]
			if o.x != nil {
				cpu.AddScaled(row, o.x[t*h:][:h], 1, y[int(rows[0])*h:][:h])
			} else {
				copy(row, y[int(rows[0])*h:])
			}
			for _, r := range rows[1:] {
				cpu.Axpy(row, 1, y[int(r)*h:][:h])
			}
		}
	})
}

// feedForwardGrad takes the gradient of the output of layer number in ws.dx to the gradient of x1, and adds to the gradients of the weights.
// ws.h holds the input of the experts, ws.slope the slope of the load-balancing loss; zFactor is the derivative of the weighted z-loss by half
// the squared logsumexp.
func (m *Model) feedForwardGrad(ctx context.Context, l *layer, st *saved, number int, zFactor float64) error {
	c, w := m.cfg, &m.ws
	h, ffn, t := c.HiddenSize, c.IntermediateSize, w.shape.rows*w.shape.s
	switch {
	case !c.moe():
		m.dev.MatMul(false, false, t, ffn, h, w.dx, h, l.down.w, ffn, w.dact, ffn, false)
		m.split(t, operands{saved: st}, func(m *Model, o *operands, _, lo, hi int) {
			m.activate(o.saved, lo, hi)
			m.activateGrad(o.saved, lo, hi)
		})
		m.dev.MatMul(true, false, h, ffn, t, w.dx, h, w.act, ffn, l.down.g, ffn, true)
		m.dev.MatMul(true, false, 2*ffn, h, t, st.gateUp, 2*ffn, w.h, h, l.gateUp.g, h, true)
		m.dev.MatMul(false, false, t, h, 2*ffn, st.gateUp, 2*ffn, l.gateUp.w, h, w.dh, h, false)
	case m.dispatch != nil:
		if err := m.dispatch.grad(ctx, m, l, number); err != nil {
			return err
		}
		m.routeGrad(l, st, zFactor)
	default:
		m.contractGrad(l, st, w.dx)
		m.sumRows(w.dh, nil, w.gathered, st)
		m.expertsGrad(l, st, w.h)
		m.routeGrad(l, st, zFactor)
	}
	m.normGrad(w.dx, w.dh, st.norm2(l))
	return nil
}

// contractGrad takes the gradient dy of the layer's output to those of the routing weights, in ws.dweight, and of the inputs of the experts,
// in ws.gathered. It leaves for expertsGrad the rows of dy in ws.expert, the inputs of the down projection in ws.act, and the gradients of
// gate and up in their place.
func (m *Model) contractGrad(l *layer, st *saved, dy []float32) {
	c, w := m.cfg, &m.ws
	h, ffn := c.HiddenSize, c.IntermediateSize
	m.gatherRows(w.expert, dy, st)
	m.dev.GroupedMatMul(st.counts, false, ffn, h, w.expert, l.downW, w.dact, false)
	m.split(len(st.weight), operands{saved: st}, func(m *Model, o *operands, _, lo, hi int) {
		w, st, ffn := &m.ws, o.saved, m.cfg.IntermediateSize
		m.activate(st, lo, hi)
		for r := lo; r < hi; r++ {
			act, dact := w.act[r*ffn:][:ffn], w.dact[r*ffn:][:ffn]
			w.dweight[r] = cpu.Dot(act, dact)
			cpu.Scale(act, st.weight[r])
			cpu.Scale(dact, st.weight[r])
		}
		m.activateGrad(st, lo, hi)
	})
	m.dev.GroupedMatMul(st.counts, false, h, 2*ffn, st.gateUp, l.gateUpW, w.gathered, false)
}

// expertsGrad adds to the gradients of the weights of the experts, from their input x and what contractGrad has left.
func (m *Model) expertsGrad(l *layer, st *saved, x []float32) {
	w, h, ffn := &m.ws, m.cfg.HiddenSize, m.cfg.IntermediateSize
	m.dev.GroupedWeightGrad(st.counts, h, ffn, w.expert, w.act, l.downG, true)
	m.gatherRows(w.gathered, x, st)
	m.dev.GroupedWeightGrad(st.counts, 2*ffn, h, st.gateUp, w.gathered, l.gateUpG, true)
}

// activateGrad replaces rows [lo, hi) of gateUp by their gradient, from the gradient of silu(gate)·up in ws.dact.
func (m *Model) activateGrad(st *saved, lo, hi int) {
	ffn := m.cfg.IntermediateSize
	for r := lo; r < hi; r++ {
		gate, up := st.gateUp[r*2*ffn:][:ffn], st.gateUp[r*2*ffn+ffn:][:ffn]
		cpu.SwiGLUGrad(gate, up, gate, up, m.ws.dact[r*ffn:][:ffn])
	}
}
