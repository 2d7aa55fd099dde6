package train

import (
	"context"

	"mula/moe"
	"mula/xpu/cpu"
)

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
	config  OptimizerConfig
	targets int64 // B
	every   int64
	kernel  []cpu.Sophia // of each group

	// Of the current estimate.
	gradScale, weight float64
	curvatureOne      func(i int)
}

func newSophiaG(config OptimizerConfig, targets int64) *sophiaG {
	return &sophiaG{config: config, targets: targets, every: *config.HessianEvery}
}

func (*sophiaG) state(*moe.Parameter) []string { return []string{"exp_avg", "hessian"} }

func (r *sophiaG) begin(_ context.Context, o *Optimizer, learningRate, gradScale float64) error {
	r.kernel = r.kernel[:0]
	for _, s := range o.settings {
		r.kernel = append(r.kernel, cpu.Sophia{
			LearningRate: learningRate * s.rateScale, Beta1: r.config.Betas[0],
			Curvature: *r.config.Rho * float64(r.targets), WeightDecay: s.weightDecay,
			GradScale: gradScale,
		})
	}
	return nil
}

func (r *sophiaG) update(o *Optimizer, p, begin, end int) {
	r.kernel[o.group[p]].Update(o.parameters[p].Weight[begin:end], o.parameters[p].Grad[begin:end],
		o.kept(p, 0, begin, end), o.kept(p, 1, begin, end))
}

func (r *sophiaG) updateHessian(ctx context.Context, o *Optimizer, gradScale float64, targets int64) error {
	if r.curvatureOne == nil {
		r.curvatureOne = func(i int) {
			b := o.blocks[i]
			cpu.AverageSquares(o.kept(b.tensor, 1, b.begin, b.end), r.config.Betas[1], r.weight, r.gradScale,
				o.parameters[b.tensor].Grad[b.begin:b.end])
		}
	}
	r.gradScale, r.weight = gradScale, (1-r.config.Betas[1])*(float64(targets)/float64(r.targets))
	if err := o.device.ToHost(ctx, o.grads...); err != nil {
		return err
	}
	o.device.Parallel(len(o.blocks), r.curvatureOne)
	return nil
}
