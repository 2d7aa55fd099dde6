package xpu

import "math"

// An Update is one step of an optimizer that treats each element separately: a rule and its
// constants. The types below make updates. The arithmetic of all rules is in
// xpu/cpu/gen/optimizer.go, from which the forms for all devices are generated.
//
// In the formulas, p is a weight, m and v are its state, and g is its gradient times GradScale: 1,
// or the factor of norm clipping. Results below 2⁻¹²⁶ in magnitude may become 0.
type Update struct {
	Rule      string
	Constants [UpdateConstants]float32
	States    int     // number of state tensors: 1 for M, 2 for M and V
	Keep      float32 // factor on the weights after the update; 1 leaves them unchanged
	// the result replaces the gradient, which must be of [Float32]
	ReplacesGrad bool
}

// UpdateConstants is the number of constants of an update.
const UpdateConstants = 10

// Moments are a range of weights with its gradients and optimizer state, all of the same length. V
// is absent if the rule has one state tensor. On processors, M and V may be BFloat16: the update is
// computed in float32, the weights change by the unrounded new state, and the state is then rounded
// once.
type Moments struct{ Weight, Grad, M, V Tensor }

// AdamW is a step of AdamW. With t = Step from 1, m̂ = m/(1-β₁ᵗ) and v̂ = v/(1-β₂ᵗ):
//
//	m ← β₁m + (1-β₁)g; v ← β₂v + (1-β₂)g²
//	p ← p·(1 - LearningRate·WeightDecay) - LearningRate·m̂/(√v̂ + Epsilon); p ← p·(1 - DecayAfter)
//
// Loshchilov and Hutter 2019 (arXiv 1711.05101), in the order of torch.optim.AdamW.
type AdamW struct {
	LearningRate, Beta1, Beta2, Epsilon, WeightDecay float64
	Step                                             int64
	GradScale                                        float64
	// fraction of the weights removed after the update; LearningRate·WeightDecay is removed before
	DecayAfter float64
}

// Update returns the step as an update.
func (o AdamW) Update() Update {
	step := float64(o.Step)
	return Update{Rule: "adamw", States: 2, Keep: float32(1 - o.DecayAfter), Constants: [UpdateConstants]float32{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Beta2), float32(1 - o.Beta2),
		float32(1 - o.LearningRate*o.WeightDecay), float32(o.LearningRate / (1 - math.Pow(o.Beta1, step))),
		float32(o.Epsilon), float32(1 / math.Sqrt(1-math.Pow(o.Beta2, step))),
	}}
}

// Lion is a step of Lion (Chen et al. 2023, arXiv 2302.06675):
//
//	p ← p·(1 - LearningRate·WeightDecay) - LearningRate·sign(β₁m + (1-β₁)g); m ← β₂m + (1-β₂)g
type Lion struct {
	LearningRate float64
	Beta1, Beta2 float64
	WeightDecay  float64
	GradScale    float64
}

// Update returns the step as an update.
func (o Lion) Update() Update {
	return Update{Rule: "lion", States: 1, Keep: 1, Constants: [UpdateConstants]float32{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Beta2), float32(1 - o.Beta2),
		// the largest power of two makes every normal number larger than the limits of 1
		float32(1 - o.LearningRate*o.WeightDecay), float32(o.LearningRate), 0x1p127, 1, -1,
	}}
}

// Sophia is a step of Sophia (Liu et al. 2023, arXiv 2305.14342). v is the estimate of the
// Hessian's diagonal, which [AverageSquares] updates:
//
//	m ← β₁m + (1-β₁)g; p ← p·(1 - LearningRate·WeightDecay) - LearningRate·clip(m/(Curvature·v + 1e-15), ±1)
type Sophia struct {
	LearningRate float64
	Beta1        float64
	Curvature    float64 // ρ times the number of targets of a step
	WeightDecay  float64
	GradScale    float64
}

// Update returns the step as an update.
func (o Sophia) Update() Update {
	return Update{Rule: "sophia", States: 2, Keep: 1, Constants: [UpdateConstants]float32{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Curvature), 1e-15,
		float32(1 - o.LearningRate*o.WeightDecay), float32(o.LearningRate), 0, 1, -1,
	}}
}

// AverageSquares changes only the second state tensor: v ← Decay·v + Rest·g².
type AverageSquares struct{ Decay, Rest, GradScale float64 }

// Update returns the step as an update.
func (o AverageSquares) Update() Update {
	return Update{Rule: "averageSquares", States: 2, Keep: 1, Constants: [UpdateConstants]float32{
		float32(o.GradScale), float32(o.Decay), float32(o.Rest),
	}}
}

// ADOPT is a step of ADOPT (Taniguchi et al. 2024, arXiv 2411.02853) after the first one:
//
//	m ← β₁m + (1-β₁)·clip(g/max(√v, Epsilon), ±Clip); p ← p·(1 - LearningRate·WeightDecay) - LearningRate·m
//	v ← β₂v + (1-β₂)g²
type ADOPT struct {
	LearningRate float64
	Beta1, Beta2 float64
	Epsilon      float64
	Clip         float64
	WeightDecay  float64
	GradScale    float64
}

// Update returns the step as an update.
func (o ADOPT) Update() Update {
	return Update{Rule: "adopt", States: 2, Keep: 1, Constants: [UpdateConstants]float32{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Beta2), float32(1 - o.Beta2),
		float32(1 - o.LearningRate*o.WeightDecay), float32(o.LearningRate), float32(o.Epsilon), float32(o.Clip),
		float32(-o.Clip),
	}}
}

// Lamb is the first half of a step of LAMB (You et al. 2020, arXiv 1904.00962). It replaces the
// gradient with the direction of the step, whose length depends on the entire tensor:
//
//	m ← β₁m + (1-β₁)g; v ← β₂v + (1-β₂)g²; gradient ← m̂/(√v̂ + Epsilon) + WeightDecay·p
type Lamb struct {
	Beta1, Beta2 float64
	Epsilon      float64
	WeightDecay  float64
	Step         int64 // the number of this update, from 1, for the bias correction of the moments
	GradScale    float64
}

// Update returns the step as an update.
func (o Lamb) Update() Update {
	step := float64(o.Step)
	return Update{Rule: "lamb", States: 2, Keep: 1, ReplacesGrad: true, Constants: [UpdateConstants]float32{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Beta2), float32(1 - o.Beta2),
		float32(o.WeightDecay), float32(1 / (1 - math.Pow(o.Beta1, step))), float32(o.Epsilon),
		float32(1 / math.Sqrt(1-math.Pow(o.Beta2, step))),
	}}
}

// Muon is the momentum of Muon (Jordan et al. 2024), with μ = Momentum. It replaces the gradient
// with the matrix to orthogonalize:
//
//	m ← μm + (1-μ)g; gradient ← μm + (1-μ)g if Nesterov, else m
type Muon struct {
	Momentum  float64
	Nesterov  bool
	GradScale float64
}

// Update returns the step as an update.
func (o Muon) Update() Update {
	k := [UpdateConstants]float32{float32(o.GradScale), float32(o.Momentum), float32(1 - o.Momentum), 1, 0}
	if o.Nesterov {
		k[3], k[4] = k[1], k[2]
	}
	return Update{Rule: "muon", States: 1, Keep: 1, ReplacesGrad: true, Constants: k}
}

// Move moves weights along their gradients, which [Lamb] or [Muon] has replaced with directions. M
// is not changed:
//
//	p ← p·Keep + gradient·Scale
type Move struct{ Keep, Scale float32 }

// Update returns the step as an update.
func (o Move) Update() Update {
	return Update{Rule: "move", States: 1, Keep: 1, Constants: [UpdateConstants]float32{1, o.Keep, o.Scale}}
}

// ScheduleFreeAdamW is a step of schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682). The
// weights are y, at which the gradient was computed, and m is z:
//
//	v ← β₂v + (1-β₂)g²; u = g/(√v̂ + Epsilon) + WeightDecay·y
//	y ← y + Share·(z - y) + LearningRate·(β₁·(1-Share) - 1)·u; z ← z - LearningRate·u
type ScheduleFreeAdamW struct {
	LearningRate float64
	Beta1, Beta2 float64
	Epsilon      float64
	WeightDecay  float64
	Step         int64   // the number of this update, from 1, for the bias correction of the moment
	Share        float64 // share of z in the new average
	GradScale    float64
}

// Update returns the step as an update.
func (o ScheduleFreeAdamW) Update() Update {
	return Update{Rule: "scheduleFree", States: 2, Keep: 1, Constants: [UpdateConstants]float32{
		float32(o.GradScale), float32(o.Share), float32(o.LearningRate * (o.Beta1*(1-o.Share) - 1)),
		float32(o.Beta2), float32(1 - o.Beta2),
		float32(o.WeightDecay), float32(-o.LearningRate), float32(o.Epsilon),
		float32(1 / math.Sqrt(1-math.Pow(o.Beta2, float64(o.Step)))),
	}}
}
