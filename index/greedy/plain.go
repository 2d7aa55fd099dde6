package greedy

import "math"

// gone is the count of a dataset that has left an exhaustive blend. Its error is below all others,
// since no error is below -2^51.
const gone = 1e300

// A problem is the input of a blend. The state of a blend before step t is t and its counts.
type problem struct {
	weights []float64
	limits  []float64 // the count at which a dataset leaves; nil if none does
	fused   bool
	apart   bool  // if fused, dataset 0 is not fused
	steps   int64 // samples in a piece; 0 means chunkSteps, or fewer when there are several threads and few samples
}

func newProblem(weights []float64, sizes []int64, fused bool) *problem {
	p := &problem{weights: weights, fused: fused, apart: fused && sizes == nil}
	if sizes != nil {
		p.limits = make([]float64, len(sizes))
		for d, size := range sizes {
			p.limits[d] = float64(size)
		}
	}
	return p
}

// errorOf returns the error of a dataset of weight w and count c at x = max(t, 1). It never
// decreases when x grows, and never grows when c does: products, differences and the fused form of
// both are monotonic in real numbers, and so is rounding.
func errorOf(w, x, c float64, fused bool) float64 {
	if fused {
		return math.FMA(w, x, -c)
	}
	return float64(w*x) - c // converted, so that no compiler fuses it
}

// stepX is the x of step t.
func stepX(t int64) float64 { return float64(max(t, 1)) }

// plain runs the blend from step t, with counts c, for len(dataset) steps, exactly by the rule. The
// rest of the package is tested against it.
func (p *problem) plain(c []float64, t int64, dataset []int16, sample []int64) {
	for k := range dataset {
		x := stepX(t + int64(k))
		best, at := math.Inf(-1), 0
		for d, w := range p.weights {
			if e := errorOf(w, x, c[d], p.fused && !(p.apart && d == 0)); e > best {
				best, at = e, d
			}
		}
		dataset[k], sample[k] = int16(at), int64(c[at])
		p.take(c, at)
	}
}

// take counts a sample of dataset d.
func (p *problem) take(c []float64, d int) {
	c[d]++
	if p.limits != nil && c[d] == p.limits[d] {
		c[d] = gone
	}
}
