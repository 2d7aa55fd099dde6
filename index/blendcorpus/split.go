package blendcorpus

import (
	"fmt"
	"math"
	"strings"

	"mula/index/python"
)

// parseSplit parses a split string. With corpora, it is three integers, and a split whose number is
// not above 0 is skipped. For flat blends, it is up to three numbers separated by commas or
// slashes. Fractions are divided by their left-to-right sum.
func parseSplit(text string, flat bool) (fractions [3]float64, present [3]bool, err error) {
	separator := ","
	if flat && !strings.Contains(text, ",") {
		separator = "/"
	}
	words := strings.Split(text, separator)
	if !flat && len(words) != 3 {
		return fractions, present, fmt.Errorf("split %q has %d parts; give three integers separated by commas, like "+
			"%q", text, len(words), defaultSplit)
	}
	if len(words) > 3 {
		words = words[:3] // the rest is ignored
	}
	var sum float64
	for i, word := range words {
		v, ok := python.ParseFloat(word)
		if !ok || math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
			return fractions, present, fmt.Errorf("split %q: invalid number %q; use numbers of 0 or more", text, word)
		}
		if !flat && strings.ContainsAny(word, ".eE") {
			return fractions, present, fmt.Errorf("split %q: %q is not an integer, and the program stops there; "+
				"scale the parts up, like %q", text, word, defaultSplit)
		}
		fractions[i] = v
		present[i] = flat || v > 0
		sum += v
	}
	if !(sum > 0) || math.IsInf(sum, 0) {
		return fractions, present, fmt.Errorf("split %q sums to %s, so no split has samples; write it like %q",
			text, python.Float(sum), defaultSplit)
	}
	for i := range fractions {
		fractions[i] /= sum
	}
	return fractions, present, nil
}
