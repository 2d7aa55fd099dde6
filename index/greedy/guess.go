package greedy

import "math"

// guess sets s to the probable state of a blend before step t: counts such that all errors are
// below one level, after t samples. Groups at that level supply the missing samples, in descending
// order of error. Correctness does not depend on the guess.
func (g *groups) guess(s *state, t int64) {
	clear(s.turn)
	x := stepX(t)
	fill := func(level float64) float64 {
		var sum float64
		for i := range g.n {
			c := min(max(math.Ceil(float64(g.weights[i]*x)-level), 0), g.limits[i])
			s.c[i] = c
			sum += c * float64(g.size(i))
		}
		return sum
	}
	steps := float64(t)
	low, high := -1.0, 2.0 // fill(low) > steps >= fill(high)
	for width := 1.0; fill(high) > steps && width < 1e18; width *= 2 {
		low, high = high, high+width
	}
	for width := 1.0; fill(low) <= steps && width < 1e18; width *= 2 {
		low, high = low-width, low
	}
	for range 40 {
		middle := (low + high) / 2
		sum := fill(middle)
		if sum > steps {
			low = middle
		} else {
			high = middle
		}
		if sum <= steps && steps-sum < 4 {
			break
		}
	}
	sum := fill(high)
	for i := range g.n {
		if s.c[i] == g.limits[i] {
			s.c[i] = gone
		}
	}
	for ; sum < steps; sum++ {
		i, _ := g.pick(s, x)
		g.take(s, i)
	}
}

// steady reports whether errors stay near 0, as they do when weights sum to 1. Only then are
// guesses good and groups safe.
func (p *problem) steady() bool {
	var sum float64
	for _, w := range p.weights {
		sum += w
	}
	return math.Abs(sum-1) < 1e-3
}
