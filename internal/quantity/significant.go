package quantity

import (
	"math"
	"strconv"
	"strings"
)

// Magnitude returns the unit of an axis that extends to v, and the letter of the unit: SI prefixes,
// with B for 10⁹ as is usual for tokens and parameters.
func Magnitude(v float64) (unit float64, suffix string) {
	switch {
	case v >= 1e15:
		return 1, "" // Short writes it with an exponent or in full
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

// Short writes a number with at most digits significant digits.
func Short(v float64, digits int) string {
	s := Exact(v, digits)
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

// Exact writes a number with exactly digits significant digits, also if the last digits are 0.
func Exact(v float64, digits int) string {
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
	unit, suffix := Magnitude(a)
	decimals := max(0, digits-1-int(math.Floor(math.Log10(a/unit))))
	return strconv.FormatFloat(v/unit, 'f', decimals, 64) + suffix
}
