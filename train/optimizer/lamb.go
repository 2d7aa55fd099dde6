package optimizer

import (
	"context"
	"math"

	"mula/xpu"
	"mula/xpu/cpu"
)

// Lamb is LAMB: see lamb.
const Lamb Name = "lamb"

var _ = register(Lamb, spec{
	defaults: Config{Betas: []float64{0.9, 0.999}, Epsilon: new(1e-6), WeightDecay: new(0.01)},
	state:    func(string, []int) []string { return []string{"exp_avg", "exp_avg_sq"} },
	onHost:   func(string, []int) bool { return true },
	whole:    true,
	rule: func(config Config, _ int64, o *Optimizer) (rule, error) {
		return &lamb{config: config, trust: make([]float64, len(o.parameters))}, nil
	},
})

// lamb is [Lamb]. With g the gradient, η the learning rate, λ the weight decay, t the number of
// updates from 1, m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ), and ‖·‖ the Euclidean norm of a parameter, of
// which each expert has its own:
//
//	m ← β₁m + (1−β₁)g;   v ← β₂v + (1−β₂)g²;   u = m̂/(√v̂ + ε) + λp;   p ← p − η·(‖p‖/‖u‖)·u
//
// Where one of the norms is 0, the quotient is 1. You et al. 2020 (arXiv 1904.00962, algorithm 2).
// Reference: timm.optim.Lamb of timm 1.0.31 with always_adapt=True and max_grad_norm=None, as
// clipping is done before.
type lamb struct {
	config Config
	steps  []xpu.Update // of each group
	rate   float64
	trust  []float64 // of each parameter
	norms  []ratio   // sums of squares of u and p, one for each block

	prepareOne func(i int)
}

// begin replaces the gradients by u.
func (r *lamb) begin(_ context.Context, o *Optimizer, learningRate, gradScale float64) error {
	if r.prepareOne == nil {
		r.norms = make([]ratio, len(o.blocks))
		r.prepareOne = func(i int) {
			b := o.blocks[i]
			h := o.host[b.tensor]
			weight, grad := h.weight[b.begin:b.end], h.grad[b.begin:b.end]
			cpu.Update(r.steps[o.group[b.tensor]], weight, grad, o.hostState(b.tensor, 0, b.begin, b.end),
				o.hostState(b.tensor, 1, b.begin, b.end))
			r.norms[i] = ratio{cpu.SumSquares(grad), cpu.SumSquares(weight)}
		}
	}
	r.rate = learningRate
	r.steps = r.steps[:0]
	for _, s := range o.settings {
		r.steps = append(r.steps, xpu.Lamb{
			Beta1: r.config.Betas[0], Beta2: r.config.Betas[1], Epsilon: *r.config.Epsilon, WeightDecay: s.WeightDecay,
			Step: o.Updates, GradScale: gradScale,
		}.Update())
	}
	o.device.Parallel(len(o.blocks), r.prepareOne)
	var sum ratio
	for i, b := range o.blocks {
		sum.update += r.norms[i].update
		sum.weight += r.norms[i].weight
		if b.end < len(o.host[b.tensor].weight) {
			continue
		}
		r.trust[b.tensor] = 1
		if sum.update > 0 && sum.weight > 0 {
			r.trust[b.tensor] = math.Sqrt(sum.weight) / math.Sqrt(sum.update)
		}
		sum = ratio{}
	}
	return nil
}

func (r *lamb) updateHost(o *Optimizer, p, begin, end int) {
	cpu.Axpy(o.host[p].weight[begin:end], float32(-r.rate*o.settings[o.group[p]].RateScale*r.trust[p]),
		o.host[p].grad[begin:end])
}
