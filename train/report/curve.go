package report

import (
	"math"
)

// point is a value of a curve at a step. A curve breaks at a point whose y is NaN.
type point struct{ x, y float64 }

// envelope thins a curve to at most two points in each of n ranges, the lowest and the highest, so
// that all spikes remain.
func envelope(curve []point, n int) []point {
	if len(curve) <= 2*n {
		return curve
	}
	out := make([]point, 0, 2*n)
	for i := range n {
		part := curve[i*len(curve)/n : (i+1)*len(curve)/n]
		low, high := -1, -1
		for j, p := range part {
			if math.IsNaN(p.y) {
				continue
			}
			if low < 0 || p.y < part[low].y {
				low = j
			}
			if high < 0 || p.y > part[high].y {
				high = j
			}
		}
		switch {
		case low < 0:
			out = append(out, point{part[0].x, math.NaN()})
		case low == high:
			out = append(out, part[low])
		default:
			out = append(out, part[min(low, high)], part[max(low, high)])
		}
	}
	return out
}

// means thins a curve to n points, the means of n ranges. It keeps the last point, whose value
// readers look for.
func means(curve []point, n int) []point {
	if len(curve) <= n {
		return curve
	}
	out := make([]point, 0, n)
	last := curve[len(curve)-1]
	curve = curve[:len(curve)-1]
	for i := range n - 1 {
		var x, y float64
		var seen int
		part := curve[i*len(curve)/(n-1) : (i+1)*len(curve)/(n-1)]
		for _, p := range part {
			x += p.x
			if !math.IsNaN(p.y) {
				y += p.y
				seen++
			}
		}
		out = append(out, point{x / float64(len(part)), y / float64(seen)}) // 0/0 is a gap: the range has no value
	}
	return append(out, last)
}

// smooth averages y with the given weights (nil: all 1) over about span steps. The weight of a step
// falls exponentially with its distance, in both directions, so the average does not lag behind a
// steep curve or end early. Steps without a value or weight have the average of the steps around
// them.
func smooth(curve []point, weights []float64, span float64) []point {
	// the ages of an exponential average with this factor are (span-1)/4 in the mean, on each side
	keep := 1 - 4/(span+3)
	type average struct{ sum, total float64 }
	own := func(i int) average {
		w := 1.0
		if weights != nil {
			w = weights[i]
		}
		if math.IsNaN(curve[i].y) || w <= 0 {
			return average{}
		}
		return average{w * curve[i].y, w}
	}
	before := make([]average, len(curve)) // of the steps up to this one
	var a average
	for i := range curve {
		o := own(i)
		a = average{keep*a.sum + o.sum, keep*a.total + o.total}
		before[i] = a
	}
	out := make([]point, len(curve))
	a = average{} // of the steps after this one
	for i := len(curve) - 1; i >= 0; i-- {
		// 0/0 is a gap: no value is near
		out[i] = point{curve[i].x, (before[i].sum + a.sum) / (before[i].total + a.total)}
		o := own(i)
		a = average{keep * (a.sum + o.sum), keep * (a.total + o.total)}
	}
	return out
}

// smoothSpan returns the span for a run of n steps: n/50, or none for a run that is short enough to
// show every step.
func smoothSpan(n int) float64 {
	return math.Round(min(max(float64(n)/50, 1), 1000))
}
