package train

import (
	"context"
	"math"

	"mula/moe"
	"mula/xpu/cpu"
)

// adopt is [ADOPT]. With g the gradient, η the learning rate, λ the weight decay and t the number
// of updates from 0:
//
//	t = 0   v ← g²
//	t > 0   p ← p − η·λ·p;   m ← β₁m + (1−β₁)·clip(g/max(√v, ε), ±t^¼);   p ← p − η·m;   v ← β₂v + (1−β₂)g²
//
// The first update does not change the weights. Taniguchi et al. 2024 (arXiv 2411.02853,
// algorithm 2). Reference: torch-adopt 0.1.0, of the authors, with decouple=True.
type adopt struct {
	config OptimizerConfig
	kernel []cpu.ADOPT // of each group
}

func newADOPT(config OptimizerConfig) *adopt { return &adopt{config: config} }

func (*adopt) state(*moe.Parameter) []string { return []string{"exp_avg", "exp_avg_sq"} }

func (r *adopt) begin(_ context.Context, o *Optimizer, learningRate, gradScale float64) error {
	r.kernel = r.kernel[:0]
	for _, s := range o.settings {
		r.kernel = append(r.kernel, cpu.ADOPT{
			LearningRate: learningRate * s.rateScale, Beta1: r.config.Betas[0], Beta2: r.config.Betas[1],
			Epsilon:     *r.config.Epsilon,
			WeightDecay: s.weightDecay, Clip: math.Pow(float64(o.Updates-1), 0.25), GradScale: gradScale,
		})
	}
	return nil
}

func (r *adopt) update(o *Optimizer, p, begin, end int) {
	grad, m, v := o.parameters[p].Grad[begin:end], o.kept(p, 0, begin, end), o.kept(p, 1, begin, end)
	if o.Updates == 1 {
		cpu.AverageSquares(v, 0, 1, r.kernel[0].GradScale, grad)
		return
	}
	r.kernel[o.group[p]].Update(o.parameters[p].Weight[begin:end], grad, m, v)
}
