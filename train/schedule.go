package train

import "math"

// A Schedule gives the learning rate of every step: a linear warm-up to Peak, then half a cosine down to Min.
//
// With t = step + 1 (steps count from 0), W = Warmup and D = Decay:
//
//	t ≤ W      Start + (Peak − Start)·t/W
//	W < t < D  Min + (Peak − Min)·(1 + cos(π·(t − W)/(D − W)))/2
//	t ≥ D      Min
//
// so step W−1 is the first with the peak and step D−1 the first with the minimum, as in OLMo's CosWithWarmup scheduler.
type Schedule struct {
	Peak, Min float64
	Start     float64 // where the warm-up starts: 0 (OLMoE) or Min (Optimus)
	Warmup    int64   // steps
	Decay     int64   // steps, warm-up included
}

// LearningRate returns the learning rate of a step, which counts from 0.
func (s Schedule) LearningRate(step int64) float64 {
	t := step + 1
	switch {
	case t < s.Warmup:
		return s.Start + (s.Peak-s.Start)*(float64(t)/float64(s.Warmup))
	case t == s.Warmup:
		return s.Peak
	case t >= s.Decay:
		return s.Min
	}
	progress := float64(t-s.Warmup) / float64(s.Decay-s.Warmup)
	return s.Min + (s.Peak-s.Min)*(1+math.Cos(math.Pi*progress))/2
}
