package chart

import (
	"math"
	"strconv"

	"mula/internal/quantity"
)

// An Axis maps values to a coordinate of the drawing, on a linear or a logarithmic scale.
type Axis struct {
	Lo, Hi   float64 // the values at the ends
	From, To float64 // their coordinates
	Log      bool
	Ticks    []float64
	Labels   []string
}

// NewAxis chooses about n round ticks for values between lo and hi. If lo equals hi, the axis
// extends beyond both.
func NewAxis(lo, hi, from, to float64, n int, log bool) *Axis {
	const huge, tiny = 1e300, 1e-280 // hi - lo stays finite, and its parts keep their digits
	lo, hi = min(max(lo, -huge), huge), min(max(hi, -huge), huge)
	if !log && max(math.Abs(lo), math.Abs(hi)) < tiny {
		lo, hi = 0, 0
	}
	a := &Axis{Lo: lo, Hi: hi, From: from, To: to, Log: log}
	if log {
		if a.Hi < a.Lo*1.5 {
			a.Lo, a.Hi = a.Lo/1.25, a.Hi*1.25
		}
		a.Ticks = logTicks(a.Lo, a.Hi)
	} else {
		// Differences below the 12th digit are rounding errors. Tick labels could not show them.
		if least := max(math.Abs(lo), math.Abs(hi)) * 1e-12; !(a.Hi-a.Lo > least) {
			pad := max(math.Abs(lo)*0.1, least)
			if lo == 0 && hi == 0 {
				pad = 1
			}
			a.Lo, a.Hi = lo-pad, hi+pad
		}
		a.Ticks = Ticks(a.Lo, a.Hi, n)
	}
	a.Labels = tickLabels(a.Ticks, log)
	return a
}

// NewStepAxis is a linear axis whose ticks are whole numbers.
func NewStepAxis(lo, hi, from, to float64, n int) *Axis {
	if hi <= lo {
		hi = lo + 1
	}
	a := NewAxis(lo, hi, from, to, n, false)
	if len(a.Ticks) > 1 && a.Ticks[1]-a.Ticks[0] < 1 {
		a.Ticks = a.Ticks[:0]
		for v := math.Ceil(lo); v <= hi; v++ {
			a.Ticks = append(a.Ticks, v)
		}
		a.Labels = tickLabels(a.Ticks, false)
	}
	return a
}

// At returns the coordinate of a value.
func (a *Axis) At(v float64) float64 {
	lo, hi := a.Lo, a.Hi
	if a.Log {
		lo, hi, v = math.Log(lo), math.Log(hi), math.Log(v)
	}
	return a.From + (v-lo)/(hi-lo)*(a.To-a.From)
}

// logTicks returns powers of ten, and 2 and 5 times these powers if there would be few ticks.
func logTicks(lo, hi float64) []float64 {
	first, last := math.Floor(math.Log10(lo)), math.Ceil(math.Log10(hi))
	multiples := []float64{1}
	stride := 1.0
	switch decades := last - first; {
	case decades <= 3:
		multiples = []float64{1, 2, 5}
	case decades > 8:
		stride = math.Ceil(decades / 8)
	}
	var ticks []float64
	for e := first; e <= last; e += stride {
		for _, m := range multiples {
			if v := m * math.Pow(10, e); v >= lo*0.999999 && v <= hi*1.000001 {
				ticks = append(ticks, v)
			}
		}
	}
	return ticks
}

// tickLabels writes ticks with enough decimals to distinguish them. Thousands and larger values
// have a letter, very small values an exponent.
func tickLabels(ticks []float64, log bool) []string {
	labels := make([]string, len(ticks))
	if log || len(ticks) < 2 {
		for i, v := range ticks {
			labels[i] = quantity.Short(v, 3)
		}
		return labels
	}
	largest := max(math.Abs(ticks[0]), math.Abs(ticks[len(ticks)-1]))
	unit, suffix := quantity.Magnitude(largest)
	if largest < 1e-3 {
		e := int(math.Floor(math.Log10(largest)))
		unit, suffix = math.Pow(10, float64(e)), "e"+strconv.Itoa(e)
	}
	step := (ticks[1] - ticks[0]) / unit
	decimals := max(0, int(math.Ceil(-math.Log10(step)-1e-9)))
	for i, v := range ticks {
		labels[i] = strconv.FormatFloat(v/unit, 'f', decimals, 64) + suffix
		if v == 0 {
			labels[i] = "0"
		}
	}
	return labels
}

// Ticks returns the multiples in [lo, hi] of 1, 2 or 5 times a power of ten: about n of them at
// most, and at least two.
func Ticks(lo, hi float64, n int) []float64 {
	raw := (hi - lo) / float64(n)
	power := math.Pow(10, math.Floor(math.Log10(raw)))
	steps := []float64{0.5 * power, power, 2 * power, 5 * power, 10 * power}
	coarsest := 1
	for coarsest < len(steps)-1 && raw > steps[coarsest]*1.0000001 {
		coarsest++
	}
	var ticks []float64
	for i := coarsest; i >= 0 && len(ticks) < 2; i-- {
		ticks = multiples(steps[i], lo, hi)
	}
	return ticks
}

// multiples returns the multiples of step in [lo, hi], up to rounding.
func multiples(step, lo, hi float64) []float64 {
	const slack = 1e-9
	var out []float64
	for i := math.Ceil(lo/step - slack); i <= hi/step+slack; i++ {
		out = append(out, i*step+0) // + 0 turns −0 into 0
		if i+1 == i {
			break // the numbers are too large for their distance
		}
	}
	return out
}
