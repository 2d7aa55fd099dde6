package optimizer

import (
	"context"
	"math"

	"mula/internal/strictyaml"
	"mula/xpu"
)

// ScheduleFreeAdamW is schedule-free AdamW: see scheduleFreeAdamW.
const ScheduleFreeAdamW Name = "schedule_free_adamw"

var _ = register(ScheduleFreeAdamW, spec{
	defaults: Config{
		Betas: []float64{0.9, 0.999}, Epsilon: new(1e-8), WeightDecay: new(0.0), R: new(0.0), WeightLRPower: new(2.0),
	},
	state:    func(string, []int) []string { return []string{"z", "exp_avg_sq"} },
	averages: true,
	check: func(c Config, s ScheduleConfig) (errs []error) {
		if b := c.Betas; len(b) == 2 && b[0] == 0 {
			errs = append(errs, strictyaml.Invalid("optimizer.betas",
				"is %s; the first number must be above 0, because %s "+
					"divides by it",
				ListText(b), ScheduleFreeAdamW))
		}
		if s.Name != Constant {
			errs = append(errs, strictyaml.Invalid("schedule.name",
				"is %q, but %s averages the weights instead of lowering the learning rate; set it to "+
					"%s", s.Name,
				ScheduleFreeAdamW, Constant))
		}
		return errs
	},
	rule: func(config Config, _ int64, _ *Optimizer) (rule, error) {
		return &scheduleFreeAdamW{config: config, lrMax: -1, fromTrainToAvg: float32(1 - 1/config.Betas[0])}, nil
	},
})

// scheduleFreeAdamW is [ScheduleFreeAdamW]. With g the gradient at y, η the learning rate, η̄ the
// largest one so far, λ the weight decay, t the number of updates from 1, and v̂ = v/(1−β₂ᵗ):
//
//	v ← β₂v + (1−β₂)g²;   u = g/(√v̂ + ε) + λy;   w = tʳ·η̄^weight_lr_power;   c = w/Σw
//	y ← y + c(z − y) + η(β₁(1−c) − 1)u;   z ← z − ηu
//	x = y + (1 − 1/β₁)(z − y)
//
// η̄ and c are computed for a group whose learning rate is not scaled: a constant factor cancels in
// c.
//
// Gradients are computed at y, which is in the model's weights during training. z starts with the
// initial weights. The average x is used for evaluation and saved as the model. Checkpoints also
// have y and z, because y computed from x would differ in its last bits.
//
// Defazio et al. 2024 (arXiv 2405.15682). Reference: schedulefree.AdamWScheduleFree of schedulefree
// 1.4.1, whose warm-up is the one of [Schedule].
type scheduleFreeAdamW struct {
	config         Config
	step           xpu.ScheduleFreeAdamW // for a group without settings, except for the decay
	lrMax          float64               // η̄
	weightSum      float64               // Σw
	fromTrainToAvg float32
}

// scalars have the names of the reference's param_groups.
func (r *scheduleFreeAdamW) scalars() map[string]*float64 {
	return map[string]*float64{"lr_max": &r.lrMax, "weight_sum": &r.weightSum}
}

func (r *scheduleFreeAdamW) begin(_ context.Context, o *Optimizer, learningRate, gradScale float64) error {
	if o.Updates == 1 {
		for _, d := range o.updates {
			for _, m := range d.moments {
				o.device.Copy(m.M, m.Weight)
			}
		}
	}
	r.lrMax = max(r.lrMax, learningRate)
	weight := math.Pow(float64(o.Updates), *r.config.R) * math.Pow(r.lrMax, *r.config.WeightLRPower)
	r.weightSum += weight
	var share float64
	if r.weightSum != 0 {
		share = weight / r.weightSum
	}
	r.step = xpu.ScheduleFreeAdamW{
		LearningRate: learningRate, Beta1: r.config.Betas[0], Beta2: r.config.Betas[1], Epsilon: *r.config.Epsilon,
		Step: o.Updates, Share: share, GradScale: gradScale,
	}
	return nil
}

func (r *scheduleFreeAdamW) update(s GroupSetting) xpu.Update {
	step := r.step
	step.LearningRate *= s.RateScale
	step.WeightDecay = s.WeightDecay
	return step.Update()
}

func (r *scheduleFreeAdamW) average(o *Optimizer, weights, state []float32) {
	if o.Updates == 0 {
		return // z is not initialized yet
	}
	for i, z := range state {
		weights[i] += float32(r.fromTrainToAvg * (z - weights[i]))
	}
}
