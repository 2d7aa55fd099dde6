package report

import (
	"math"
	"strconv"
	"strings"

	"mula/internal/page"
)

// An axis maps values to a coordinate of the drawing, on a linear or a logarithmic scale.
type axis struct {
	lo, hi   float64 // the values at the ends
	from, to float64 // their coordinates
	log      bool
	ticks    []float64
	labels   []string
}

// newAxis chooses about n round ticks for values between lo and hi. If lo equals hi, the axis
// extends beyond both.
func newAxis(lo, hi, from, to float64, n int, log bool) *axis {
	const huge, tiny = 1e300, 1e-280 // hi - lo stays finite, and its parts keep their digits
	lo, hi = min(max(lo, -huge), huge), min(max(hi, -huge), huge)
	if !log && max(math.Abs(lo), math.Abs(hi)) < tiny {
		lo, hi = 0, 0
	}
	a := &axis{lo: lo, hi: hi, from: from, to: to, log: log}
	if log {
		if a.hi < a.lo*1.5 {
			a.lo, a.hi = a.lo/1.25, a.hi*1.25
		}
		a.ticks = logTicks(a.lo, a.hi)
	} else {
		// Differences below the 12th digit are rounding errors. Tick labels could not show them.
		if least := max(math.Abs(lo), math.Abs(hi)) * 1e-12; !(a.hi-a.lo > least) {
			pad := max(math.Abs(lo)*0.1, least)
			if lo == 0 && hi == 0 {
				pad = 1
			}
			a.lo, a.hi = lo-pad, hi+pad
		}
		a.ticks = page.Ticks(a.lo, a.hi, n)
	}
	a.labels = tickLabels(a.ticks, log)
	return a
}

// newStepAxis is a linear axis whose ticks are whole numbers.
func newStepAxis(lo, hi, from, to float64, n int) *axis {
	if hi <= lo {
		hi = lo + 1
	}
	a := newAxis(lo, hi, from, to, n, false)
	if len(a.ticks) > 1 && a.ticks[1]-a.ticks[0] < 1 {
		a.ticks = a.ticks[:0]
		for v := math.Ceil(lo); v <= hi; v++ {
			a.ticks = append(a.ticks, v)
		}
		a.labels = tickLabels(a.ticks, false)
	}
	return a
}

func (a *axis) at(v float64) float64 {
	lo, hi := a.lo, a.hi
	if a.log {
		lo, hi, v = math.Log(lo), math.Log(hi), math.Log(v)
	}
	return a.from + (v-lo)/(hi-lo)*(a.to-a.from)
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
			labels[i] = short(v, 3)
		}
		return labels
	}
	largest := max(math.Abs(ticks[0]), math.Abs(ticks[len(ticks)-1]))
	unit, suffix := magnitude(largest)
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

// magnitude returns the unit of an axis that extends to v, and the letter of the unit: SI prefixes,
// with B for 10⁹ as is usual for tokens and parameters.
func magnitude(v float64) (unit float64, suffix string) {
	switch {
	case v >= 1e15:
		return 1, "" // short writes it with an exponent or in full
	case v >= 1e12:
		return 1e12, "T"
	case v >= 1e9:
		return 1e9, "B"
	case v >= 1e6:
		return 1e6, "M"
	case v >= 1e4:
		return 1e3, "k"
	}
	return 1, ""
}

// short writes a number with at most digits significant digits.
func short(v float64, digits int) string {
	s := exact(v, digits)
	end := strings.IndexAny(s, "ekMBT")
	if end < 0 {
		end = len(s)
	}
	number := s[:end]
	if strings.Contains(number, ".") {
		number = strings.TrimRight(strings.TrimRight(number, "0"), ".")
	}
	return number + s[end:]
}

// exact writes a number with exactly digits significant digits, also if the last digits are 0.
func exact(v float64, digits int) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case v == 0:
		return "0"
	}
	a := math.Abs(v)
	if a < 1e-3 || a >= 1e15 {
		mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(v, 'e', digits-1, 64), "e")
		e, _ := strconv.Atoi(exponent)
		return mantissa + "e" + strconv.Itoa(e)
	}
	unit, suffix := magnitude(a)
	decimals := max(0, digits-1-int(math.Floor(math.Log10(a/unit))))
	return strconv.FormatFloat(v/unit, 'f', decimals, 64) + suffix
}
