package optimizer

import (
	"context"
	"math"

	"mula/xpu"
)

// ADOPT is ADOPT: see adopt.
const ADOPT Name = "adopt"

var _ = register(ADOPT, spec{
	defaults: Config{Betas: []float64{0.9, 0.9999}, Epsilon: new(1e-6), WeightDecay: new(0.0)},
	state:    func(string, []int) []string { return []string{"exp_avg", "exp_avg_sq"} },
	rule: func(config Config, _ int64, _ *Optimizer) (rule, error) {
		return &adopt{config: config}, nil
	},
})

// adopt is [ADOPT]. With g the gradient, η the learning rate, λ the weight decay and t the number
// of updates from 0:
//
//	t = 0   v ← g²
//	t > 0   p ← p − η·λ·p;   m ← β₁m + (1−β₁)·clip(g/max(√v, ε), ±t^¼);   p ← p − η·m;   v ← β₂v + (1−β₂)g²
//
// The first update does not change the weights. Taniguchi et al. 2024 (arXiv 2411.02853,
// algorithm 2). Reference: torch-adopt 0.1.0, of the authors, with decouple=True.
type adopt struct {
	config Config
	first  bool      // the first update
	step   xpu.ADOPT // for a group without settings, except for the decay
}

func (r *adopt) begin(_ context.Context, o *Optimizer, learningRate, gradScale float64) error {
	r.first = o.Updates == 1
	r.step = xpu.ADOPT{
		LearningRate: learningRate, Beta1: r.config.Betas[0], Beta2: r.config.Betas[1], Epsilon: *r.config.Epsilon,
		Clip: math.Pow(float64(o.Updates-1), 0.25), GradScale: gradScale,
	}
	return nil
}

func (r *adopt) update(s GroupSetting) xpu.Update {
	if r.first {
		return xpu.AverageSquares{Decay: 0, Rest: 1, GradScale: r.step.GradScale}.Update()
	}
	step := r.step
	step.LearningRate *= s.RateScale
	step.WeightDecay = s.WeightDecay
	return step.Update()
}
