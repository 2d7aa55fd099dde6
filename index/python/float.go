package python

import (
	"math"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Float returns Python's repr of a float, which json.dumps also writes except for NaN and the
// infinities. It is the shortest decimal that parses to v, in fixed notation with a decimal point
// if its decimal exponent is in [-4, 16), otherwise as d.ddde±XX with at least two exponent digits.
// Non-finite values are nan, inf and -inf.
func Float(v float64) string {
	switch {
	case math.IsNaN(v):
		return "nan"
	case math.IsInf(v, 1):
		return "inf"
	case math.IsInf(v, -1):
		return "-inf"
	}
	digits := strconv.FormatFloat(v, 'e', -1, 64)
	mark := strings.LastIndexByte(digits, 'e')
	if e, err := strconv.Atoi(digits[mark+1:]); err == nil && (e < -4 || e >= 16) {
		return digits
	}
	text := strconv.FormatFloat(v, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}

// RoundHalfEven returns Python's int(round(v)): the nearest integer, and the even integer for ties.
// v must fit an int64.
func RoundHalfEven(v float64) int64 { return int64(math.RoundToEven(v)) }

// ParseFloat implements Python's float(s): it accepts blanks around the number, single underscores
// between digits, inf, infinity and nan in any case, and the decimal digits of all scripts. A
// number beyond the float64 range is an infinity. ParseFloat reports whether s is such a number.
func ParseFloat(s string) (float64, bool) {
	s = strings.TrimSpace(s)
	plain := make([]byte, 0, len(s))
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch d, ok := decimal(r); {
		case r < utf8.RuneSelf:
			plain = append(plain, byte(r))
		case ok:
			plain = append(plain, '0'+d)
		default:
			return 0, false
		}
		i += n
	}
	rest, negative := plain, false
	if len(rest) > 0 && (rest[0] == '+' || rest[0] == '-') {
		negative, rest = rest[0] == '-', rest[1:]
	}
	switch strings.ToLower(string(rest)) {
	case "inf", "infinity":
		if negative {
			return math.Inf(-1), true
		}
		return math.Inf(1), true
	case "nan":
		if negative {
			return math.Copysign(math.NaN(), -1), true
		}
		return math.NaN(), true
	}
	number, ok := withoutUnderscores(rest)
	if !ok || !decimalNumber(number) {
		return 0, false
	}
	// the syntax is valid; out of range is ±Inf or 0, as in Python
	v, _ := strconv.ParseFloat(string(number), 64)
	if negative {
		v = -v
	}
	return v, true
}

// decimal returns the value of a decimal digit of any script. Unicode stores the ten digits of a
// script consecutively and in order, so every range of the category Nd consists of runs from 0 to
// 9.
func decimal(r rune) (byte, bool) {
	for _, in := range unicode.Nd.R16 {
		if lo, hi := rune(in.Lo), rune(in.Hi); lo <= r && r <= hi {
			return byte((r - lo) % 10), true
		}
	}
	for _, in := range unicode.Nd.R32 {
		if lo, hi := rune(in.Lo), rune(in.Hi); lo <= r && r <= hi {
			return byte((r - lo) % 10), true
		}
	}
	return 0, false
}

// withoutUnderscores removes underscores, which must be between two digits.
func withoutUnderscores(s []byte) ([]byte, bool) {
	out := make([]byte, 0, len(s))
	for i, c := range s {
		if c != '_' {
			out = append(out, c)
		} else if i == 0 || i == len(s)-1 || !digit(s[i-1]) || !digit(s[i+1]) {
			return nil, false
		}
	}
	return out, true
}

func digit(c byte) bool { return '0' <= c && c <= '9' }

// decimalNumber reports whether s has the form digits[.digits][e[sign]digits], where the digits
// before or after the point may be missing.
func decimalNumber(s []byte) bool {
	digits := func() int {
		n := 0
		for n < len(s) && digit(s[n]) {
			n++
		}
		s = s[n:]
		return n
	}
	n := digits()
	if len(s) > 0 && s[0] == '.' {
		s = s[1:]
		n += digits()
	}
	if n == 0 {
		return false
	}
	if len(s) > 0 && (s[0] == 'e' || s[0] == 'E') {
		s = s[1:]
		if len(s) > 0 && (s[0] == '+' || s[0] == '-') {
			s = s[1:]
		}
		if digits() == 0 {
			return false
		}
	}
	return len(s) == 0
}
