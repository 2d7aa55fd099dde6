package optimizer

import (
	"context"

	"mula/internal/strictyaml"
	"mula/xpu"
)

// AdamW is the default optimizer: see adamW.
const AdamW Name = "adamw"

var _ = register(AdamW, spec{
	// the published runs have these betas
	defaults: Config{Betas: []float64{0.9, 0.95}, Epsilon: new(1e-8), WeightDecay: new(0.1),
		Decay: DecayTorch, Moments: xpu.Float32.String()},
	check: checkMoments,
	state: func(string, []int) []string { return []string{"exp_avg", "exp_avg_sq"} },
	rule:  func(config Config, _ int64, _ *Optimizer) (rule, error) { return newAdamW(config), nil },
})

// mostBeta is the largest β with moments of bfloat16. A number of 8 significant bits changes only
// by more than half a unit in its last place, which is up to 2⁻⁸ of it. Without gradients a moment
// shrinks by 1−β of it in an update, so with a β above 1−2⁻⁹ it would never become smaller.
const mostBeta = 0.99

// checkMoments finds settings with which moments of bfloat16 do not follow the gradients.
func checkMoments(c Config, _ ScheduleConfig) []error {
	if c.moments() == xpu.Float32 {
		return nil
	}
	for _, beta := range c.Betas {
		if beta > mostBeta {
			return []error{strictyaml.Invalid("optimizer.moments", "is %q, but optimizer.betas is %s; a moment of 8 "+
				"significant bits does not follow its gradients with a beta above %g; lower the betas, or use %s",
				c.Moments, ListText(c.Betas), mostBeta, xpu.Float32)}
		}
	}
	return nil
}

// adamW is [AdamW]. It runs on the device: see [xpu.AdamW].
//
// With g the gradient, η the learning rate, λ the weight decay, both of the parameter's group, t
// the number of updates from 1, m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ):
//
//	m ← β₁m + (1−β₁)g;   v ← β₂v + (1−β₂)g²
//	DecayTorch      p ← p − η·λ·p;             p ← p − η·m̂/(√v̂ + ε)
//	DecayOptimus    p ← p − η·m̂/(√v̂ + ε);      p ← p − η·λ·p
//
// Loshchilov and Hutter 2019 (arXiv 1711.05101). Reference: torch.optim.AdamW of torch 2.15.0.
type adamW struct {
	config Config
	step   xpu.AdamW // for a group without settings, except for the decay
}

func newAdamW(config Config) *adamW { return &adamW{config: config} }

func (r *adamW) begin(_ context.Context, o *Optimizer, learningRate, gradScale float64) error {
	r.step = xpu.AdamW{
		LearningRate: learningRate, Beta1: r.config.Betas[0], Beta2: r.config.Betas[1], Epsilon: *r.config.Epsilon,
		Step: o.Updates, GradScale: gradScale,
	}
	return nil
}

func (r *adamW) update(s GroupSetting) xpu.Update {
	step := r.step
	step.LearningRate *= s.RateScale
	if r.config.Decay == DecayOptimus {
		step.DecayAfter = step.LearningRate * s.WeightDecay
	} else {
		step.WeightDecay = s.WeightDecay
	}
	return step.Update()
}
