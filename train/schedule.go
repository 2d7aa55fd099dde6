package train

import "math"

// A Schedule gives the learning rate of every step: a linear warm-up to Peak, and what its name
// says.
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
// so step W−1 is the first with the peak and step D−1 the first with the minimum, as in OLMo's
// CosWithWarmup scheduler. The schedules of transformers (get_scheduler) have the same functions of
// t = step: their first step has a learning rate of 0 and does nothing, and their last one is not
// at the minimum yet.
//
// Cosine is that of Loshchilov and Hutter 2017 (arXiv 1608.03983). Warm-up, stable, decay is of Hu
// et al. 2024 (arXiv 2404.06395), its forms of decay of Hägele et al. 2024 (arXiv 2405.18392).
type Schedule struct {
	Name         ScheduleName // "" means Cosine
	Peak, Min    float64
	Start        float64 // learning rate at the start of the warm-up: 0 (OLMoE) or Min (Optimus)
	Warmup       int64   // steps
	Decay        int64   // steps, warm-up included; not used by Constant
	Cooldown     int64   // the last steps of Decay, in which WSD decays
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

// agrees reports whether the first so many steps have the same learning rates, bit for bit, under
// another schedule, where that follows from the form of the two: they are the same, or both are
// WSD, with the same way to the same peak, and have not begun to fall.
func (s Schedule) agrees(other Schedule, steps int64) bool {
	return s == other || s.Name == WSD && other.Name == WSD && s.Peak == other.Peak && s.Start == other.Start &&
		s.Warmup == other.Warmup &&
		steps <= min(s.stable(), other.stable())
}

// stable is the number of steps before WSD begins to fall.
func (s Schedule) stable() int64 { return s.Decay - s.Cooldown }
