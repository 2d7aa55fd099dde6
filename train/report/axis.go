package report

import (
	"math"
	"strconv"
	"strings"

	"mula/internal/page"
)

// An axis maps values to a coordinate of the drawing, linearly or by logarithm.
type axis struct {
	lo, hi   float64 // the values at the ends
	from, to float64 // their coordinates
	log      bool
	ticks    []float64
	labels   []string
}

// newAxis chooses round ticks, about n of them, for values between lo and hi. An axis without
// extent is given some.
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
		// Differences below the 12th digit are rounding, and no ticks could tell them apart.
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

// logTicks are powers of ten, with their doubles and quintuples where there would be few.
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

// tickLabels writes ticks with as many decimals as tell them apart; thousands and more with a
// letter, very small ones with an exponent.
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

// magnitude is the unit in which an axis that reaches v counts, and its letter (SI, with B for 10⁹
// as tokens and parameters are counted).
func magnitude(v float64) (unit float64, suffix string) {
	switch {
	case v >= 1e15:
		return 1, "" // written with an exponent by short, or in full
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

// short writes a number with at most so many significant digits.
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

// exact writes a number with so many significant digits, so that the last one shows how far it is
// known.
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
