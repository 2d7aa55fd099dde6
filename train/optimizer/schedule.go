package optimizer

import "math"

// A Schedule computes the learning rate of every step: a linear warm-up to Peak, then the curve of
// its name.
//
// With t = step + 1 (steps count from 0), W = Warmup, D = Decay, C = Cooldown and d(u) = Min +
// (Peak − Min)·u:
//
//	all        t ≤ W          Start + (Peak − Start)·t/W
//	Constant   W < t          Peak
//	Cosine     W < t < D      d((1 + cos(π·(t − W)/(D − W)))/2)
//	Linear     W < t < D      d(1 − (t − W)/(D − W))
//	WSD        W < t ≤ D − C  Peak
//	           D − C < t < D  d(1 − √((t − D + C)/C)), or with CooldownLinear d(1 − (t − D + C)/C)
//	but        t ≥ D, W < t   Min, unless it is Constant
//
// Step W−1 is the first step at the peak, and step D−1 the first step at the minimum, as in OLMo's
// CosWithWarmup scheduler. The schedules of transformers (get_scheduler) have the same functions
// with t = step: the learning rate of their first step is 0, and their last step is above the
// minimum.
//
// Cosine is from Loshchilov and Hutter 2017 (arXiv 1608.03983). WSD (warm-up, stable, decay) is
// from Hu et al. 2024 (arXiv 2404.06395), and its decay curves are from Hägele et al. 2024 (arXiv
// 2405.18392).
type Schedule struct {
	Name         ScheduleName // "" means Cosine
	Peak, Min    float64
	Start        float64 // learning rate at the start of the warm-up: 0 (OLMoE) or Min (Optimus)
	Warmup       int64   // steps
	Decay        int64   // steps, warm-up included; not used by Constant
	Cooldown     int64   // number of steps at the end of Decay in which WSD decays
	CooldownForm CooldownForm
}

// LearningRate returns the learning rate of a step. Steps count from 0.
func (s Schedule) LearningRate(step int64) float64 {
	t := step + 1
	switch {
	case t < s.Warmup:
		return s.Start + (s.Peak-s.Start)*(float64(t)/float64(s.Warmup))
	case t == s.Warmup || s.Name == Constant || s.Name == WSD && t <= s.Decay-s.Cooldown:
		return s.Peak
	case t >= s.Decay:
		return s.Min
	}
	begin := s.Warmup
	if s.Name == WSD {
		begin = s.Decay - s.Cooldown
	}
	progress := float64(t-begin) / float64(s.Decay-begin)
	switch {
	case s.Name == WSD && s.CooldownForm != CooldownLinear:
		return s.Min + (s.Peak-s.Min)*(1-math.Sqrt(progress))
	case s.Name == WSD || s.Name == Linear:
		return s.Min + (s.Peak-s.Min)*(1-progress)
	}
	return s.Min + (s.Peak-s.Min)*(1+math.Cos(math.Pi*progress))/2
}

// Agrees reports whether the first steps steps have bit-identical learning rates with another
// schedule: the schedules are equal, or both are WSD with the same warm-up and peak and do not
// decay yet.
func (s Schedule) Agrees(other Schedule, steps int64) bool {
	return s == other || s.Name == WSD && other.Name == WSD && s.Peak == other.Peak && s.Start == other.Start &&
		s.Warmup == other.Warmup &&
		steps <= min(s.Stable(), other.Stable())
}

// Stable returns the number of steps before WSD decays.
func (s Schedule) Stable() int64 { return s.Decay - s.Cooldown }
