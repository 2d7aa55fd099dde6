package optimizer

import (
	"context"

	"mula/xpu"
)

// Lion is Lion: see lion.
const Lion Name = "lion"

var _ = register(Lion, spec{
	defaults: Config{Betas: []float64{0.9, 0.99}, WeightDecay: new(0.0)},
	state:    func(string, []int) []string { return []string{"exp_avg"} },
	rule:     func(config Config, _ int64, _ *Optimizer) (rule, error) { return &lion{config: config}, nil },
})

// lion is [Lion]. With g the gradient, η the learning rate and λ the weight decay:
//
//	p ← p − η·λ·p;   p ← p − η·sign(β₁m + (1−β₁)g);   m ← β₂m + (1−β₂)g
//
// Chen et al. 2023 (arXiv 2302.06675). Reference: lion-pytorch 0.2.5.
type lion struct {
	config Config
	step   xpu.Lion // for a group without settings, except for the decay
}

func (r *lion) begin(_ context.Context, _ *Optimizer, learningRate, gradScale float64) error {
	r.step = xpu.Lion{
		LearningRate: learningRate, Beta1: r.config.Betas[0], Beta2: r.config.Betas[1], GradScale: gradScale,
	}
	return nil
}

func (r *lion) update(s GroupSetting) xpu.Update {
	step := r.step
	step.LearningRate *= s.RateScale
	step.WeightDecay = s.WeightDecay
	return step.Update()
}
