package train

import (
	"context"

	"mula/moe"
	"mula/xpu/cpu"
)

// lion is [Lion]. With g the gradient, η the learning rate and λ the weight decay:
//
//	p ← p − η·λ·p;   p ← p − η·sign(β₁m + (1−β₁)g);   m ← β₂m + (1−β₂)g
//
// Chen et al. 2023 (arXiv 2302.06675). Reference: lion-pytorch 0.2.5.
type lion struct {
	config OptimizerConfig
	kernel []cpu.Lion // of each group
}

func newLion(config OptimizerConfig) *lion { return &lion{config: config} }

func (*lion) state(*moe.Parameter) []string { return []string{"exp_avg"} }

func (r *lion) begin(_ context.Context, o *Optimizer, learningRate, gradScale float64) error {
	r.kernel = r.kernel[:0]
	for _, s := range o.settings {
		r.kernel = append(r.kernel, cpu.Lion{
			LearningRate: learningRate * s.rateScale, Beta1: r.config.Betas[0], Beta2: r.config.Betas[1],
			WeightDecay: s.weightDecay, GradScale: gradScale,
		})
	}
	return nil
}

func (r *lion) update(o *Optimizer, p, begin, end int) {
	r.kernel[o.group[p]].Update(o.parameters[p].Weight[begin:end], o.parameters[p].Grad[begin:end],
		o.kept(p, 0, begin, end))
}
