package moe

import "mula/xpu"

// Shared experts (https://arxiv.org/abs/2401.06066, section 3.2) process all tokens, without a
// router. They are one network of width [Config.SharedSize], whose output is added to the output of
// the experts. All ranks that share the experts hold it.

// sharedBlock is the place of shared experts in a layer's feed-forward block.
const sharedBlock = ".shared_experts."

// validateShared returns an error if the width of shared experts does not fit the family.
func (c Config) validateShared(bad func(field, format string, args ...any) error) error {
	switch n := c.SharedSize; {
	case n != 0 && !c.family().shared:
		return bad("shared_expert_intermediate_size", "is %d; it must be 0, because a %s model has no shared experts",
			n, c.Architecture)
	case n < 0 || n > maxWidth || c.family().shared && (n == 0 || n%c.IntermediateSize != 0):
		return bad("shared_expert_intermediate_size", "is %d; it must be a multiple of intermediate_size %d, up to %d",
			n, c.IntermediateSize, maxWidth)
	}
	return nil
}

// sharedExperts reads the number of shared experts.
func (f *hfFields) sharedExperts(c *Config) {
	if !c.family().shared {
		return
	}
	n := f.size("n_shared_experts")
	if len(f.problems) == 0 && (n < 1 || n > maxExperts) {
		f.fail("n_shared_experts is %d; it must be between 1 and %d", n, maxExperts)
	}
	c.SharedSize = n * c.IntermediateSize
}

// sharedForward computes the activations of a layer's shared experts from ws.h. With them,
// addShared adds the output of the shared experts to out.
func (m *Model) sharedForward(l *layer, st *saved) {
	if l.sharedGateUp.w.Present() {
		m.expandShared(l, st)
		m.dev.SwiGLU(m.ws.sharedAct, st.shared, xpu.Tensor{})
	}
}

func (m *Model) addShared(l *layer, out xpu.Tensor) {
	if l.sharedGateUp.w.Present() {
		m.dev.MatMul(out, m.ws.sharedAct, l.sharedDown.w.T(), accumulate)
	}
}

// expandShared computes the gate and up projections of a layer's shared experts from ws.h.
func (m *Model) expandShared(l *layer, st *saved) {
	if l.sharedGateUp.w.Present() {
		m.dev.MatMul(st.shared, m.ws.h, l.sharedGateUp.w.T(), xpu.MatMulOptions{})
	}
}

// sharedGrad adds the gradients of a layer's shared experts and of their input, ws.dh, given the
// gradient dy of their output. ws.h holds their input.
func (m *Model) sharedGrad(l *layer, st *saved, dy xpu.Tensor) {
	if !l.sharedGateUp.w.Present() {
		return
	}
	w := &m.ws
	m.dev.MatMul(w.sharedDact, dy, l.sharedDown.w, xpu.MatMulOptions{})
	m.dev.SwiGLUGrad(st.shared, w.sharedAct, w.sharedDact, xpu.Tensor{}, xpu.Tensor{})
	m.dev.MatMul(l.sharedDown.g, dy.T(), w.sharedAct, accumulate)
	m.dev.MatMul(l.sharedGateUp.g, st.shared.T(), w.h, accumulate)
	m.dev.MatMul(w.dh, st.shared, l.sharedGateUp.w, accumulate)
}
