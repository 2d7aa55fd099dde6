package numpy

import (
	"math"
	"strconv"
	"strings"
)

// The defaults of numpy.set_printoptions.
const (
	printPrecision = 8    // digits after the point
	printLimit     = 1000 // longer vectors are shortened …
	printEdge      = 3    // … to this many elements at either end
	printColumns   = 74   // of a line's 75, one column is reserved for the closing bracket
)

// ArrayString returns numpy's str of a one-dimensional float64 array with the default print
// options, as in numpy 1.14 and newer. BlendCorpus hashes it.
func ArrayString(a []float64) string {
	if len(a) == 0 {
		return "[]"
	}
	shown, gap := a, -1
	if len(a) > printLimit {
		shown = append(append([]float64(nil), a[:printEdge]...), a[len(a)-printEdge:]...)
		gap = printEdge
	}
	words := arrayWords(shown)
	var text strings.Builder
	line := " " // the first line's blank becomes the bracket
	add := func(word string) {
		if len(line)+len(word) > printColumns && len(line) > 1 {
			text.WriteString(strings.TrimRight(line, " "))
			text.WriteByte('\n')
			line = " "
		}
		line += word
	}
	for i, word := range words {
		if i == gap {
			add("...")
			line += " "
		}
		add(word)
		if i < len(words)-1 {
			line += " "
		}
	}
	text.WriteString(line)
	return "[" + text.String()[1:] + "]"
}

// arrayWords formats the printed elements, all to the same width.
func arrayWords(shown []float64) []string {
	var finite []float64
	largest, smallest := 0.0, math.Inf(1)
	for _, v := range shown {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			continue
		}
		finite = append(finite, v)
		if v != 0 {
			largest, smallest = max(largest, math.Abs(v)), min(smallest, math.Abs(v))
		}
	}
	scientific := largest > 0 && (largest >= 1e8 || smallest < 1e-4 || largest/smallest > 1000)

	// Widths: before the point, after it, and the exponent's digits.
	var whole, fraction, exponent int
	for _, v := range finite {
		mantissa, power, _ := strings.Cut(shortest(v, scientific), "e")
		before, after, _ := strings.Cut(mantissa, ".")
		whole, fraction, exponent = max(whole, len(before)), max(fraction, len(after)), max(exponent, len(power)-1)
	}
	width := whole + 1 + fraction
	if scientific {
		width += 2 + exponent
	}
	if len(finite) == 0 {
		width = 1
	}
	words := make([]string, len(shown))
	for i, v := range shown {
		switch {
		case math.IsNaN(v):
			words[i] = "nan"
		case math.IsInf(v, 1):
			words[i] = "inf"
		case math.IsInf(v, -1):
			words[i] = "-inf"
		case scientific:
			words[i] = padExponent(strconv.FormatFloat(v, 'e', fraction, 64), exponent)
		default:
			words[i] = shortest(v, false)
			_, after, _ := strings.Cut(words[i], ".")
			words[i] += strings.Repeat(" ", fraction-len(after))
		}
		width = max(width, len(words[i]))
	}
	for i, word := range words {
		words[i] = strings.Repeat(" ", width-len(word)) + word
	}
	return words
}

// shortest returns the shortest decimal that parses to v. If that has more than printPrecision
// digits after the point, it returns v rounded to printPrecision digits, half to even, without
// trailing zeros. The result always has a point.
func shortest(v float64, scientific bool) string {
	form := byte('f')
	if scientific {
		form = 'e'
	}
	text := strconv.FormatFloat(v, form, -1, 64)
	mantissa, power, _ := strings.Cut(text, "e")
	if _, after, _ := strings.Cut(mantissa, "."); len(after) > printPrecision {
		mantissa, power, _ = strings.Cut(strconv.FormatFloat(v, form, printPrecision, 64), "e")
	}
	if strings.Contains(mantissa, ".") {
		mantissa = strings.TrimRight(mantissa, "0")
	} else {
		mantissa += "."
	}
	if scientific {
		return mantissa + "e" + power
	}
	return mantissa
}

// padExponent inserts a point into a scientific number that has none, and zeros before the
// exponent's digits.
func padExponent(text string, digits int) string {
	mantissa, power, _ := strings.Cut(text, "e")
	if !strings.Contains(mantissa, ".") {
		mantissa += "."
	}
	return mantissa + "e" + power[:1] + strings.Repeat("0", digits-(len(power)-1)) + power[1:]
}
