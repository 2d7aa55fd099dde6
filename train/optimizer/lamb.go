package optimizer

import (
	"context"
	"math"

	"mula/train/estimate"
	"mula/xpu"
	"mula/xpu/comm"
)

// Lamb is LAMB: see lamb.
const Lamb Name = "lamb"

var _ = register(Lamb, spec{
	defaults: Config{Betas: []float64{0.9, 0.999}, Epsilon: new(1e-6), WeightDecay: new(0.01)},
	state:    func(string, []int) []string { return []string{"exp_avg", "exp_avg_sq"} },
	whole:    func(string, []int) bool { return true },
	slices: estimate.SliceUpdate{Operation: comm.OpAllReduce,
		// two sums of 8 bytes
		Bytes: func(_ string, _ []int, ranks int) int64 { return 2 * 16 * int64(ranks-1) }},
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
// A norm is computed like [Optimizer.GradientNorm], from the parameter's blocks. Ranks that have
// slices of a parameter ([comm.TP]) add the sums of their slices in ascending order.
// Reference: timm.optim.Lamb of timm 1.0.31 with always_adapt=True and max_grad_norm=None, as
// clipping is done before.
type lamb struct {
	config  Config
	rate    float64
	trust   []float64       // of each parameter
	moments [][]xpu.Moments // of the parameters of each group; nil before the first update
	updates []float64       // sum of squares of u, and of p, for each block
	weights []float64
	slices  []float64 // sums over slices: of u and of p, for each sliced parameter
}

// begin replaces the gradients with u.
func (r *lamb) begin(ctx context.Context, o *Optimizer, learningRate, gradScale float64) error {
	if r.moments == nil {
		r.moments = make([][]xpu.Moments, len(o.settings))
		for _, u := range o.tensors {
			g := o.group[u.parameter]
			r.moments[g] = append(r.moments[g], u.moments...)
		}
		r.updates, r.weights = make([]float64, len(o.blocks)), make([]float64, len(o.blocks))
	}
	r.rate = learningRate
	for i, s := range o.settings {
		o.device.Update(xpu.Lamb{
			Beta1: r.config.Betas[0], Beta2: r.config.Betas[1], Epsilon: *r.config.Epsilon, WeightDecay: s.WeightDecay,
			Step: o.Updates, GradScale: gradScale,
		}.Update(), r.moments[i], nil, nil)
	}
	o.device.SumSquares(o.gradients, r.updates)
	o.device.SumSquares(o.weights, r.weights)
	if err := o.device.Wait(ctx); err != nil {
		return err
	}
	sums := func(u tensorUpdate) (update, weight float64) {
		for i := u.first; i < u.end; i++ {
			update += r.updates[i]
			weight += r.weights[i]
		}
		return update, weight
	}
	r.slices = r.slices[:0]
	for _, u := range o.tensors {
		if o.parameters[u.parameter].Slice.Ranks > 0 {
			update, weight := sums(u)
			r.slices = append(r.slices, update, weight)
		}
	}
	if len(r.slices) > 0 {
		if err := comm.AllReduce(ctx, o.sharding.mesh.Group(comm.TP), r.slices); err != nil {
			return err
		}
	}
	complete := r.slices
	for _, u := range o.tensors {
		update, weight := sums(u)
		if o.parameters[u.parameter].Slice.Ranks > 0 {
			update, weight, complete = complete[0], complete[1], complete[2:]
		}
		r.trust[u.parameter] = 1
		if update > 0 && weight > 0 {
			r.trust[u.parameter] = math.Sqrt(weight) / math.Sqrt(update)
		}
	}
	return nil
}

func (r *lamb) move(o *Optimizer, p int) xpu.Move {
	return xpu.Move{Keep: 1, Scale: float32(-r.rate * o.settings[o.group[p]].RateScale * r.trust[p])}
}
