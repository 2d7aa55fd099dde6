package cpu

import (
	"math"

	"mula/xpu"
)

// crossEntropy is an [xpu.CrossEntropy] with the host memory of its tensors.
type crossEntropy struct {
	xpu.CrossEntropy
	Width   int
	Logits  []float32
	Targets []int32
}

// CrossEntropy computes cross entropies of targets and their gradient; see [xpu.Layers].
func (h *Host) CrossEntropy(c xpu.CrossEntropy) {
	xpu.CheckCrossEntropy(c)
	o := operands{crossEntropy: crossEntropy{c, c.Logits.Dim(1), c.Logits.Floats(), c.Targets.Ints()}}
	h.split(c.Logits.Dim(0), o, func(t *task, _, lo, hi int) {
		c := &t.crossEntropy
		for i := lo; i < hi; i++ {
			logits := c.Logits[i*c.Width:][:c.Width]
			if c.Targets[i] < 0 {
				c.Loss[i] = 0
				if c.Scale != 0 {
					clear(logits)
				}
				continue
			}
			right := 0.0
			if !c.Sample {
				right = float64(logits[c.Targets[i]])
			}
			top := Max(logits)
			sum := ExpSum(logits, logits, top)
			if c.Sample {
				target := drawTarget(logits, c.Seed, c.First+uint64(i))
				c.Targets[i] = int32(target)
				right = math.Log(float64(logits[target])) + float64(top)
			}
			c.Loss[i] = math.Log(float64(sum)) + float64(top) - right
			if c.Scale != 0 {
				Scale(logits, float32(c.Scale/float64(sum)))
				logits[c.Targets[i]] -= float32(c.Scale)
			}
		}
	})
}

// drawTarget draws an index with probability proportional to weights, by inverting the cumulative
// distribution: it returns the first index at which the sum of the weights, added in order in
// float64, exceeds a uniform fraction of the total. The fraction is output `number` of the
// generator SplitMix64 (Steele, Lea and Flood 2014) whose state is the finalised seed. If the total
// is NaN, because a weight is, the draw is the last index with a positive weight, or 0.
func drawTarget(weights []float32, seed, number uint64) int {
	whole := 0.0
	for _, x := range weights {
		whole += float64(x)
	}
	left := whole * (float64(xpu.Mix64(xpu.Mix64(seed)+(number+1)*0x9e3779b97f4a7c15)>>11) / (1 << 53))
	sum, last := 0.0, 0
	for i, x := range weights {
		if x > 0 {
			last = i
		}
		if sum += float64(x); sum > left {
			return i
		}
	}
	return last
}

// Jitter multiplies elements by random numbers; see [xpu.Layers].
func (h *Host) Jitter(x xpu.Tensor, j xpu.Jitter) {
	xpu.CheckJitter(x, j)
	o := operands{dst: x.Floats(), ids: j.Numbers.Ints(), width: x.Dim(1), jitter: j}
	h.split(x.Dim(0), o, func(t *task, _, lo, hi int) {
		for i := lo; i < hi; i++ {
			row := t.dst[i*t.width:][:t.width]
			for k := range row {
				row[k] *= t.jitter.Factor(t.ids[i], k)
			}
		}
	})
}
