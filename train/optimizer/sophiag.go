package optimizer

import (
	"context"

	"mula/xpu"
)

// SophiaG is Sophia-G: see sophiaG.
const SophiaG Name = "sophiag"

var _ = register(SophiaG, spec{
	defaults: Config{
		Betas: []float64{0.965, 0.99}, Rho: new(0.04), HessianEvery: new(int64(10)), WeightDecay: new(0.1),
	},
	state: func(string, []int) []string { return []string{"exp_avg", "hessian"} },
	rule: func(config Config, targets int64, _ *Optimizer) (rule, error) {
		return &sophiaG{config: config, targets: targets, every: *config.HessianEvery}, nil
	},
})

// sophiaG is [SophiaG]. With g the gradient, η the learning rate, λ the weight decay and B the
// number of targets of a full step:
//
//	p ← p − η·λ·p;   m ← β₁m + (1−β₁)g;   p ← p − η·clip(m/(ρ·B·h + 1e-15), ±1)
//
// After every hessian_every-th update, with ĝ the gradient of the mean cross entropy over B̂
// targets that were drawn from the model's own distribution (the Gauss-Newton-Bartlett estimator):
//
//	h ← β₂h + (1−β₂)·(B̂/B)·ĝ²
//
// B̂ is B unless positions were skipped. Both gradients are clipped, as the authors'
// train_sophiag.py does. Until the first estimate h is 0, so that weights move by η in the
// direction of m.
//
// Liu et al. 2023 (arXiv 2305.14342). Reference: sophia-opt 0.2.2, which packages the authors'
// code.
type sophiaG struct {
	config  Config
	targets int64 // B
	every   int64
	step    xpu.Sophia // for a group without settings, except for the decay
}

func (r *sophiaG) begin(_ context.Context, _ *Optimizer, learningRate, gradScale float64) error {
	r.step = xpu.Sophia{
		LearningRate: learningRate, Beta1: r.config.Betas[0], Curvature: *r.config.Rho * float64(r.targets),
		GradScale: gradScale,
	}
	return nil
}

func (r *sophiaG) update(s GroupSetting) xpu.Update {
	step := r.step
	step.LearningRate *= s.RateScale
	step.WeightDecay = s.WeightDecay
	return step.Update()
}

// updateHessian updates the Hessian's estimate from gradients over a number of drawn targets.
func (r *sophiaG) updateHessian(o *Optimizer, gradScale float64, targets int64) {
	u := xpu.AverageSquares{
		Decay: r.config.Betas[1], Rest: (1 - r.config.Betas[1]) * (float64(targets) / float64(r.targets)),
		GradScale: gradScale,
	}.Update()
	for _, d := range o.updates {
		o.device.Update(u, d.moments, nil, nil)
	}
}
