package moe

import "mula/xpu"

// The three norms of the residual stream: before a layer's attention, before its experts, and after
// the last layer. They are RMSNorm with weights, or in an OLMo model LayerNorm without weights.

func (m *Model) norm1(l *layer, st *saved) xpu.Norm {
	return m.residualNorm(l.norm1, st.mean1, st.rstd1)
}
func (m *Model) norm2(l *layer, st *saved) xpu.Norm {
	return m.residualNorm(l.norm2, st.mean2, st.rstd2)
}
func (m *Model) normL() xpu.Norm { return m.residualNorm(m.norm, m.ws.meanL, m.ws.rstdL) }

func (m *Model) residualNorm(weights tensor, mean, rstd xpu.Tensor) xpu.Norm {
	return xpu.Norm{Epsilon: m.cfg.NormEps, Weight: weights.w, Mean: mean, RStd: rstd}
}
