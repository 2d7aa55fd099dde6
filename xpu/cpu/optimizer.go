package cpu

import (
	"math"

	"mula/xpu"
)

// The updates below run on one goroutine, element by element, and use the best kernel set of the
// machine. All slices of a call must have the same length, or it panics; they must not overlap. The
// gradient is first multiplied by GradScale: 1, or the factor of norm clipping. Results below
// 2^-126 in magnitude become 0.

// updateConstants are the constants of an update, in the order in which the assembly reads them.
type updateConstants [10]float32

// update runs a kernel on vectors of any length. b is nil for kernels that do not use it.
func update(which updateKernel, w, grad, a, b []float32, k *updateConstants) {
	n := len(w) &^ 15
	second := b
	if b == nil {
		second = a
	}
	if n > 0 {
		updateSixteens(which, w[:n], grad[:n], a[:n], second[:n], k)
	}
	if n == len(w) {
		return
	}
	var x [4][16]float32
	copy(x[0][:], w[n:])
	copy(x[1][:], grad[n:])
	copy(x[2][:], a[n:])
	copy(x[3][:], second[n:])
	updateSixteens(which, x[0][:], x[1][:], x[2][:], x[3][:], k)
	copy(w[n:], x[0][:])
	copy(grad[n:], x[1][:])
	copy(a[n:], x[2][:])
	if b != nil {
		copy(b[n:], x[3][:])
	}
}

// An updateKernel is the number of an update in xpu/cpu/gen/optimizer.go.
type updateKernel int

// atMost returns the smaller of x and bound, or NaN if x is NaN.
func atMost(x, bound float32) float32 {
	if x > bound {
		return bound
	}
	return x
}

// atLeast returns the larger of x and bound, or NaN if x is NaN.
func atLeast(x, bound float32) float32 {
	if x < bound {
		return bound
	}
	return x
}

// squareRoot returns the root of x, rounded once.
func squareRoot(x float32) float32 { return float32(math.Sqrt(float64(x))) }

// normal returns x, or 0 if x is denormal.
func normal(x float32) float32 {
	if x > -0x1p-126 && x < 0x1p-126 {
		return 0
	}
	return x
}

// adamwConstants returns the constants of the kernel for an AdamW update, which computes
//
//	g = GradScale·grad
//	m = β1·m + (1-β1)·g
//	v = β2·v + (1-β2)·g²
//	w = (1-LearningRate·WeightDecay)·w - LearningRate/(1-β1^Step)·m / (√v/√(1-β2^Step) + ε)
func adamwConstants(o xpu.AdamW) updateConstants {
	step := float64(o.Step)
	return updateConstants{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Beta2), float32(1 - o.Beta2),
		float32(1 - o.LearningRate*o.WeightDecay), float32(o.LearningRate / (1 - math.Pow(o.Beta1, step))),
		float32(o.Epsilon), float32(1 / math.Sqrt(1-math.Pow(o.Beta2, step))),
	}
}

// Lion holds the constants of one step of Lion (Chen et al. 2023, arXiv 2302.06675).
type Lion struct {
	LearningRate float64
	Beta1, Beta2 float64
	WeightDecay  float64
	GradScale    float64
}

// Update performs the step on weights w with gradient grad and momentum m:
//
//	g = GradScale·grad
//	w = (1-LearningRate·WeightDecay)·w - LearningRate·sign(β1·m + (1-β1)·g)
//	m = β2·m + (1-β2)·g
func (o Lion) Update(w, grad, m []float32) {
	sameLength(len(w), len(grad), len(m))
	update(lionUpdate, w, grad, m, nil, &updateConstants{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Beta2), float32(1 - o.Beta2),
		float32(1 - o.LearningRate*o.WeightDecay), float32(o.LearningRate), 0x1p127, 1, -1,
	})
}

// Sophia holds the constants of one step of Sophia (Liu et al. 2023, arXiv 2305.14342).
type Sophia struct {
	LearningRate float64
	Beta1        float64
	Curvature    float64 // multiplies h: ρ times the number of targets of a step
	WeightDecay  float64
	GradScale    float64
}

// Update performs the step on weights w with gradient grad; m is the momentum and h the estimate of
// the Hessian's diagonal, which [AverageSquares] updates:
//
//	g = GradScale·grad
//	m = β1·m + (1-β1)·g
//	w = (1-LearningRate·WeightDecay)·w - LearningRate·clip(m/(Curvature·h + 1e-15), ±1)
func (o Sophia) Update(w, grad, m, h []float32) {
	sameLength(len(w), len(grad), len(m), len(h))
	update(sophiaUpdate, w, grad, m, h, &updateConstants{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Curvature), 1e-15,
		float32(1 - o.LearningRate*o.WeightDecay), float32(o.LearningRate), 0, 1, -1,
	})
}

// AverageSquares sets v[i] = decay·v[i] + rest·(scale·grad[i])².
func AverageSquares(v []float32, decay, rest, scale float64, grad []float32) {
	sameLength(len(v), len(grad))
	update(averageSquaresUpdate, v, grad, v, nil, &updateConstants{float32(scale), float32(decay), float32(rest)})
}

// ADOPT holds the constants of a step of ADOPT (Taniguchi et al. 2024, arXiv 2411.02853) other than
// the first step.
type ADOPT struct {
	LearningRate float64
	Beta1, Beta2 float64
	Epsilon      float64
	Clip         float64
	WeightDecay  float64
	GradScale    float64
}

// Update performs the step on weights w with gradient grad; m and v are their first and second
// moments:
//
//	g = GradScale·grad
//	m = β1·m + (1-β1)·clip(g/max(√v, ε), ±Clip)
//	w = (1-LearningRate·WeightDecay)·w - LearningRate·m
//	v = β2·v + (1-β2)·g²
func (o ADOPT) Update(w, grad, m, v []float32) {
	sameLength(len(w), len(grad), len(m), len(v))
	update(adoptUpdate, w, grad, m, v, &updateConstants{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Beta2), float32(1 - o.Beta2),
		float32(1 - o.LearningRate*o.WeightDecay), float32(o.LearningRate), float32(o.Epsilon), float32(o.Clip),
		float32(-o.Clip),
	})
}

// Lamb holds the constants of the first half of a step of LAMB (You et al. 2020, arXiv 1904.00962).
type Lamb struct {
	Beta1, Beta2 float64
	Epsilon      float64
	WeightDecay  float64
	Step         int64 // the number of this update, from 1, for the bias correction of the moments
	GradScale    float64
}

// Update updates the moments m and v of weights w, and replaces the gradient with the direction of
// the step; its length depends on the entire tensor:
//
//	g = GradScale·grad
//	m = β1·m + (1-β1)·g
//	v = β2·v + (1-β2)·g²
//	grad = m/(1-β1^Step) / (√v/√(1-β2^Step) + ε) + WeightDecay·w
func (o Lamb) Update(w, grad, m, v []float32) {
	sameLength(len(w), len(grad), len(m), len(v))
	step := float64(o.Step)
	update(lambUpdate, w, grad, m, v, &updateConstants{
		float32(o.GradScale), float32(o.Beta1), float32(1 - o.Beta1), float32(o.Beta2), float32(1 - o.Beta2),
		float32(o.WeightDecay), float32(1 / (1 - math.Pow(o.Beta1, step))), float32(o.Epsilon),
		float32(1 / math.Sqrt(1-math.Pow(o.Beta2, step))),
	})
}

// Muon holds the constants of the momentum of Muon (Jordan et al. 2024).
type Muon struct {
	Momentum  float64 // μ
	Nesterov  bool
	GradScale float64
}

// Update updates the momentum m, and replaces the gradient with the matrix to orthogonalize:
//
//	g = GradScale·grad
//	m = μ·m + (1-μ)·g
//	grad = μ·m + (1-μ)·g if Nesterov, else m
func (o Muon) Update(grad, m []float32) {
	sameLength(len(grad), len(m))
	k := updateConstants{float32(o.GradScale), float32(o.Momentum), float32(1 - o.Momentum), 1, 0}
	if o.Nesterov {
		k[3], k[4] = k[1], k[2]
	}
	update(muonUpdate, grad, grad, m, nil, &k)
}

// ScheduleFreeAdamW holds the constants of one step of schedule-free AdamW (Defazio et al. 2024,
// arXiv 2405.15682).
type ScheduleFreeAdamW struct {
	LearningRate float64
	Beta1, Beta2 float64
	Epsilon      float64
	WeightDecay  float64
	Step         int64   // the number of this update, from 1, for the bias correction of the moment
	Share        float64 // share of z in the new average
	GradScale    float64
}

// Update performs the step on weights y, at which the gradient was computed, and z; v is the second
// moment:
//
//	g = GradScale·grad
//	v = β2·v + (1-β2)·g²
//	u = g/(√v/√(1-β2^Step) + ε) + WeightDecay·y
//	y = y + Share·(z - y) + LearningRate·(β1·(1-Share) - 1)·u
//	z = z - LearningRate·u
func (o ScheduleFreeAdamW) Update(y, grad, z, v []float32) {
	sameLength(len(y), len(grad), len(z), len(v))
	update(scheduleFreeUpdate, y, grad, z, v, &updateConstants{
		float32(o.GradScale), float32(o.Share), float32(o.LearningRate * (o.Beta1*(1-o.Share) - 1)), float32(o.Beta2),
		float32(1 - o.Beta2),
		float32(o.WeightDecay), float32(-o.LearningRate), float32(o.Epsilon),
		float32(1 / math.Sqrt(1-math.Pow(o.Beta2, float64(o.Step)))),
	})
}
