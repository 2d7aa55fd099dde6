package train

import (
	"math"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/cpu"
)

// blockSize is the number of elements that are updated, or whose squares are summed, as one piece of work. The blocks of a tensor start
// at its first element, so they are the same for every number of threads, and so are all results.
const blockSize = 1 << 16

type block struct {
	tensor     int
	begin, end int
}

// AdamW is the optimizer of Loshchilov and Hutter (arXiv 1711.05101), in float32, over all parameters as one group.
//
// With g the gradient, η the learning rate, λ the weight decay, t the number of updates from 1, m̂ = m/(1−β₁ᵗ) and v̂ = v/(1−β₂ᵗ):
//
//	m ← β₁m + (1−β₁)g;   v ← β₂v + (1−β₂)g²
//	DecayTorch      p ← p − η·λ·p;             p ← p − η·m̂/(√v̂ + ε)
//	DecayOptimus    p ← p − η·m̂/(√v̂ + ε);      p ← p − η·λ·p
type AdamW struct {
	Updates int64       // updates done, t
	ExpAvg  [][]float32 // m, one slice for each parameter
	ExpSq   [][]float32 // v

	config     OptimizerConfig
	device     xpu.Device
	parameters []*moe.Parameter
	blocks     []block
	partial    []float64 // sums of squares, one for each block
}

// NewAdamW returns an optimizer for the parameters with moments of zero.
func NewAdamW(config OptimizerConfig, device xpu.Device, parameters []*moe.Parameter) *AdamW {
	o := &AdamW{config: config, device: device, parameters: parameters}
	for i, p := range parameters {
		n := len(p.Weight)
		o.ExpAvg = append(o.ExpAvg, make([]float32, n))
		o.ExpSq = append(o.ExpSq, make([]float32, n))
		for begin := 0; begin < n; begin += blockSize {
			o.blocks = append(o.blocks, block{i, begin, min(begin+blockSize, n)})
		}
	}
	o.partial = make([]float64, len(o.blocks))
	return o
}

// GradientNorm returns the Euclidean norm of all gradients as one vector: squares are summed in float64 within each block, and the blocks
// in their order. It is not finite exactly when some gradient is not: the squares of finite float32 values cannot overflow a float64.
func (o *AdamW) GradientNorm() float64 {
	o.device.Parallel(len(o.blocks), func(i int) {
		b := o.blocks[i]
		o.partial[i] = cpu.SumSquares(o.parameters[b.tensor].Grad[b.begin:b.end])
	})
	var sum float64
	for _, s := range o.partial {
		sum += s
	}
	return math.Sqrt(sum)
}

// clipFactor returns what gradients of the given norm are multiplied with so that their norm is at most limit: limit/(norm + 1e-6), at
// most 1, as torch.nn.utils.clip_grad_norm_ has it. A limit of 0 means that nothing is clipped.
func clipFactor(norm, limit float64) float64 {
	if limit == 0 {
		return 1
	}
	return min(1, limit/(norm+1e-6))
}

// Step multiplies the gradients with scale, which clipping may have made smaller than 1, and updates all weights.
func (o *AdamW) Step(learningRate, scale float64) {
	o.Updates++
	kernel := cpu.AdamW{
		LearningRate: learningRate, Beta1: o.config.Betas[0], Beta2: o.config.Betas[1], Epsilon: o.config.Epsilon,
		WeightDecay: o.config.WeightDecay, Step: o.Updates, GradScale: scale,
	}
	keep := float32(1)
	if o.config.Decay == DecayOptimus {
		kernel.WeightDecay = 0
		keep = float32(1 - learningRate*o.config.WeightDecay)
	}
	o.device.Parallel(len(o.blocks), func(i int) {
		b := o.blocks[i]
		p := o.parameters[b.tensor]
		weight := p.Weight[b.begin:b.end]
		kernel.Update(weight, p.Grad[b.begin:b.end], o.ExpAvg[b.tensor][b.begin:b.end], o.ExpSq[b.tensor][b.begin:b.end])
		if keep != 1 {
			cpu.Scale(weight, keep)
		}
	})
}
