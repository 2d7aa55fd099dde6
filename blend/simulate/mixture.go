package simulate

import (
	"math"
)

// Mixture is the share of each source along the range, counted in intervals of steps. Skipped
// positions are included.
type Mixture struct {
	StepsOfInterval int64           `json:"steps_of_interval"` // from the start of an interval to the next start
	StepsCounted    int64           `json:"steps_counted"`     // number of counted steps at the start of each interval
	Intervals       []Interval      `json:"intervals"`
	Sources         []SourceMixture `json:"sources"`
}

// An Interval is a range of steps.
type Interval struct {
	Step     int64     `json:"step"`     // number of the first step, in the plan
	Counts   []int64   `json:"counts"`   // by source: positions
	Expected []float64 `json:"expected"` // by source: positions according to the weights
	Bound    float64   `json:"bound"`    // the order's guarantee for |count − expected|; 0 if it has none
}

// SourceMixture compares the counts of a source with the plan's weights, over all intervals.
type SourceMixture struct {
	Name      string  `json:"name"`
	Planned   float64 `json:"planned_share"` // of the counted positions, according to the weights
	Share     float64 `json:"share"`         // of the counted positions
	Least     float64 `json:"least_share"`   // minimum of the intervals
	Most      float64 `json:"most_share"`    // maximum of the intervals
	Deviation float64 `json:"deviation"`     // maximum of the intervals, in samples
	// the order's guarantee for that interval, in samples; 0 if the order has none
	Bound   float64 `json:"bound"`
	Random  float64 `json:"random"`  // standard deviation of independent draws in that interval, in samples
	Outside int     `json:"outside"` // number of intervals beyond their bound

	// The source's training windows, in stored order, are divided into parts of equal size. The
	// draws of each interval are counted by part.
	Parts [][]int64 `json:"parts"` // by interval and part; null if window numbers are not locations in the source
	// Unevenness is the sum over intervals and parts of (count − expected)²/expected, minus its
	// mean for random draws, in standard deviations. It is about 0 or less if the order is well
	// shuffled, and large if parts of the source cluster. Cells is the number of terms; 0 means too
	// few samples.
	Unevenness float64 `json:"unevenness"`
	Cells      int64   `json:"cells"`
}

const (
	intervalSteps = 1000
	minIntervals  = 10
	maxIntervals  = 200
	countedFactor = 64 // maximum number of counted positions, in units of Options.Samples
	parts         = 16
	leastExpected = 5 // minimum expected count of a part in an interval, for a term of Unevenness
)

// intervals returns the length of an interval in steps, the number of counted steps in each, and
// the number of intervals. An interval has 1,000 steps, fewer in a short range and more in a long
// one, because the chart has a limited width.
func (s *simulation) intervals() (every, counted, n int64) {
	steps := (s.To - s.From + int64(s.BatchSize) - 1) / int64(s.BatchSize)
	every = intervalSteps
	for every > 1 && steps/every < minIntervals {
		switch { // 1000, 500, 200, 100, …
		case every == 5 || every == 50 || every == 500:
			every = every * 2 / 5
		default:
			every /= 2
		}
	}
	n = (steps + every - 1) / every
	if n > maxIntervals {
		every = (steps + maxIntervals - 1) / maxIntervals
		n = (steps + every - 1) / every
	}
	counted = max(1, min(every, intervalSteps, s.Samples*countedFactor/int64(s.BatchSize)/n))
	return every, counted, n
}

func (s *simulation) mixture() (Mixture, error) {
	var m Mixture
	var n int64
	m.StepsOfInterval, m.StepsCounted, n = s.intervals()
	type tally struct {
		training int64
		parts    bool
	}
	sources := make([]tally, len(s.plan.Sources))
	m.Sources = make([]SourceMixture, len(s.plan.Sources))
	for i := range sources {
		src := &s.plan.Sources[i]
		m.Sources[i] = SourceMixture{Name: src.Name, Least: 1}
		sources[i] = tally{src.Training(), s.numbered(i) && src.Training() >= parts}
	}
	total := make([]int64, len(sources))
	planned := make([]float64, len(sources))
	chi := make([]float64, len(sources))
	var bounds []float64 // of the stages
	for _, st := range s.plan.Summary().Stages {
		bounds = append(bounds, st.Bound)
	}
	var positions int64
	batch := int64(s.BatchSize)
	for i := range n {
		from := s.From + i*m.StepsOfInterval*batch
		to := min(s.To, from+m.StepsCounted*batch)
		v := Interval{Step: from / batch, Counts: make([]int64, len(sources))}
		byPart := make([][]int64, len(sources))
		for j, t := range sources {
			if t.parts {
				byPart[j] = make([]int64, parts)
			}
		}
		for block, err := range s.Order.Positions(s.ctx, from, to) {
			if err != nil {
				return m, err
			}
			for k, source := range block.Sources {
				v.Counts[source]++
				if t := &sources[source]; t.parts {
					if w := block.Windows[k]; w < t.training { // else the order numbers windows differently
						byPart[source][partOf(w, t.training)]++
					} else {
						t.parts = false
					}
				}
			}
		}
		expected, bound := s.expected(bounds, from, to)
		v.Expected, v.Bound = expected, bound
		for j, c := range v.Counts {
			out := &m.Sources[j]
			total[j] += c
			planned[j] += expected[j]
			share := float64(c) / float64(to-from)
			out.Least, out.Most = min(out.Least, share), max(out.Most, share)
			deviation := math.Abs(float64(c) - expected[j])
			if deviation >= out.Deviation {
				p := expected[j] / float64(to-from)
				out.Deviation, out.Bound, out.Random = deviation, bound, math.Sqrt(float64(to-from)*p*(1-p))
			}
			if s.traits.Scheduled && deviation > bound+1e-3 { // smaller differences are rounding
				out.Outside++
			}
			if !sources[j].parts {
				continue
			}
			out.Parts = append(out.Parts, byPart[j])
			if float64(c) < leastExpected*parts {
				continue
			}
			for k, got := range byPart[j] {
				first, end := partFrom(int64(k), sources[j].training), partFrom(int64(k)+1, sources[j].training)
				want := float64(c) * float64(end-first) / float64(sources[j].training)
				chi[j] += (float64(got) - want) * (float64(got) - want) / want
			}
			out.Cells += parts
		}
		positions += to - from
		m.Intervals = append(m.Intervals, v)
		s.Progress("counting sources", i+1, n)
	}
	for j := range m.Sources {
		out := &m.Sources[j]
		out.Share, out.Planned = float64(total[j])/float64(positions), planned[j]/float64(positions)
		if !sources[j].parts {
			out.Parts, out.Cells = nil, 0
		}
		if out.Cells > 0 { // a chi-squared of f degrees of freedom has mean f and variance 2f
			free := float64(out.Cells) / parts * (parts - 1)
			out.Unevenness = (chi[j] - free) / math.Sqrt(2*free)
		}
	}
	return m, nil
}

// partOf returns the part of a window, and partFrom the first window of a part.
func partOf(window, training int64) int64 {
	part := int64(float64(window) / float64(training) * parts)
	for part > 0 && window < partFrom(part, training) {
		part--
	}
	for part+1 < parts && window >= partFrom(part+1, training) {
		part++
	}
	return part
}

func partFrom(part, training int64) int64 {
	return training/parts*part + training%parts*part/parts
}

// expected returns the number of samples that the stages' weights assign to each source at
// positions [from, to), and the maximum deviation of the order from it. bounds are the bounds of
// the stages' trees. A count up to a position deviates by at most the tree's bound, so a count
// between two positions deviates by at most twice the bound. bound is 0 for an order without a
// tree.
func (s *simulation) expected(bounds []float64, from, to int64) (counts []float64, bound float64) {
	counts = make([]float64, len(s.plan.Sources))
	first := int64(0)
	for j, st := range s.plan.Stages {
		a, b := max(from, first), min(to, first+st.Samples)
		if a < b {
			var sum float64
			for _, w := range st.Weights {
				sum += float64(w)
			}
			for i, w := range st.Weights {
				counts[i] += float64(b-a) * float64(w) / sum
			}
			bound += bounds[j]
			if a > first {
				bound += bounds[j]
			}
		}
		first += st.Samples
	}
	return counts, bound
}
