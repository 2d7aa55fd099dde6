package train

import (
	"mula/moe"
	"mula/xpu/cpu"
)

// adamW is [AdamW], over all parameters as one group.
//
// With g the gradient, η the learning rate, λ the weight decay, t the number of updates from 1, m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ):
//
//	m ← β₁m + (1−β₁)g;   v ← β₂v + (1−β₂)g²
//	DecayTorch      p ← p − η·λ·p;             p ← p − η·m̂/(√v̂ + ε)
//	DecayOptimus    p ← p − η·m̂/(√v̂ + ε);      p ← p − η·λ·p
//
// Loshchilov and Hutter 2019 (arXiv 1711.05101). Reference: torch.optim.AdamW of torch 2.15.0.
type adamW struct {
	config OptimizerConfig
	kernel cpu.AdamW
	keep   float32 // what weights are multiplied with after the update
}

func newAdamW(config OptimizerConfig) *adamW { return &adamW{config: config} }

func (*adamW) state(*moe.Parameter) []string { return []string{"exp_avg", "exp_avg_sq"} }

func (r *adamW) begin(o *Optimizer, learningRate, gradScale float64) {
	r.kernel = cpu.AdamW{
		LearningRate: learningRate, Beta1: r.config.Betas[0], Beta2: r.config.Betas[1], Epsilon: *r.config.Epsilon,
		WeightDecay: *r.config.WeightDecay, Step: o.Updates, GradScale: gradScale,
	}
	r.keep = 1
	if r.config.Decay == DecayOptimus {
		r.kernel.WeightDecay = 0
		r.keep = float32(1 - learningRate**r.config.WeightDecay)
	}
}

func (r *adamW) update(o *Optimizer, p, begin, end int) {
	weight := o.parameters[p].Weight[begin:end]
	r.kernel.Update(weight, o.parameters[p].Grad[begin:end], o.kept(p, 0, begin, end), o.kept(p, 1, begin, end))
	if r.keep != 1 {
		cpu.Scale(weight, r.keep)
	}
}
