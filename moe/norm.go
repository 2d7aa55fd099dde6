package moe

import "mula/xpu"

// A layer has a norm of its attention and a norm of its feed-forward block, and a norm follows the
// last layer. They are RMSNorm with weights, or in an OLMo model LayerNorm without weights.
//
// A block f with its norm is x + f(norm(x)), or in a family with postNorm x + norm(f(x))
// (https://arxiv.org/abs/2501.00656). With a residual multiplier r, it is x + r·f(norm(x)).

func (m *Model) norm1(l *layer, st *saved) xpu.Norm {
	return m.residualNorm(l.norm1, st.mean1, st.rstd1)
}

func (m *Model) norm2(l *layer, st *saved) xpu.Norm {
	if m.cfg.family().postNorm {
		return m.residualNorm(l.norm2, xpu.Tensor{}, st.rstdY2)
	}
	return m.residualNorm(l.norm2, st.mean2, st.rstd2)
}

func (m *Model) normL() xpu.Norm { return m.residualNorm(m.norm, m.ws.meanL, m.ws.rstdL) }

func (m *Model) residualNorm(weights tensor, mean, rstd xpu.Tensor) xpu.Norm {
	return xpu.Norm{Epsilon: m.cfg.NormEps, Weight: weights.w, Mean: mean, RStd: rstd}
}

// blockInput sets h, which is ws.h, to the input of a block, given its input x from the residual
// stream. known means that the statistics of n were computed before.
func (m *Model) blockInput(h, x xpu.Tensor, n xpu.Norm, known bool) {
	if m.cfg.family().postNorm {
		m.dev.Copy(h, x)
	} else {
		m.dev.Normalize(h, x, n, known)
	}
}

// blockOutput returns the tensor for the output of a block if it is not added to the residual
// stream as it is; otherwise it is absent. With postNorm, it is kept for the backward pass.
func (m *Model) blockOutput(kept xpu.Tensor) xpu.Tensor {
	if m.cfg.ResidualMultiplier != 0 {
		return m.ws.dy
	}
	return kept
}

// addBlock sets out to x + norm(y) with postNorm, or to x + r·y with a residual multiplier, where y
// is a tensor of blockOutput. It may overwrite ws.h.
func (m *Model) addBlock(out, x, y xpu.Tensor, n xpu.Norm) {
	if r := m.cfg.ResidualMultiplier; r != 0 {
		m.dev.Combine(out, x, y, 1, float32(r), 0)
		return
	}
	m.dev.Normalize(m.ws.h, y, n, false)
	m.dev.Add(out, x, m.ws.h)
}

// blockOutputGrad returns the gradient of a block's output y, given the gradient of the residual
// stream after the block in ws.dx. With postNorm it adds to the gradient of the norm's weight, and
// overwrites ws.dh. It may be in ws.dy.
func (m *Model) blockOutputGrad(y xpu.Tensor, n xpu.Norm, dweight xpu.Tensor) xpu.Tensor {
	w := &m.ws
	if r := m.cfg.ResidualMultiplier; r != 0 {
		m.dev.Combine(w.dy, w.dx, xpu.Tensor{}, float32(r), 0, 0)
		return w.dy
	}
	if !m.cfg.family().postNorm {
		return w.dx
	}
	m.dev.Zero(w.dy)
	m.dev.Copy(w.dh, w.dx)
	m.dev.NormGrad(w.dy, w.dh, y, n, dweight)
	return w.dy
}

// blockInputGrad adds the gradient of the residual stream before a block to ws.dx, given the
// gradient of the block's input in ws.dh, which it overwrites. x and n are the arguments of
// blockInput.
func (m *Model) blockInputGrad(x xpu.Tensor, n xpu.Norm, dweight xpu.Tensor) {
	w := &m.ws
	if m.cfg.family().postNorm {
		m.dev.Add(w.dx, w.dx, w.dh)
	} else {
		m.dev.NormGrad(w.dx, w.dh, x, n, dweight)
	}
}
