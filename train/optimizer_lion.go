package train

import (
	"context"

	"mula/moe"
	"mula/xpu"
)

// lion is [Lion]. With g the gradient, η the learning rate and λ the weight decay:
//
//	p ← p − η·λ·p;   p ← p − η·sign(β₁m + (1−β₁)g);   m ← β₂m + (1−β₂)g
//
// Chen et al. 2023 (arXiv 2302.06675). Reference: lion-pytorch 0.2.5.
type lion struct {
	config OptimizerConfig
	step   xpu.Lion // for a group without settings, except for the decay
}

func newLion(config OptimizerConfig) *lion { return &lion{config: config} }

func (*lion) state(*moe.Parameter) []string { return []string{"exp_avg"} }

func (r *lion) begin(_ context.Context, _ *Optimizer, learningRate, gradScale float64) error {
	r.step = xpu.Lion{
		LearningRate: learningRate, Beta1: r.config.Betas[0], Beta2: r.config.Betas[1], GradScale: gradScale,
	}
	return nil
}

func (*lion) onDevice(*moe.Parameter) bool { return true }

func (r *lion) update(s groupSetting) xpu.Update {
	step := r.step
	step.LearningRate *= s.rateScale
	step.WeightDecay = s.weightDecay
	return step.Update()
}
