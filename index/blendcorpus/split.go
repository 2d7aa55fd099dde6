package blendcorpus

import (
	"fmt"
	"math"
	"strings"

	"mula/index/python"
)

// parseSplit reads a split string. With corpora it is three whole numbers, and a split whose number
// is not above 0 is left out; of flat blends it is up to three numbers separated by commas or
// slashes. Fractions are divided by their sum from left to right.
func parseSplit(text string, flat bool) (fractions [3]float64, present [3]bool, err error) {
	separator := ","
	if flat && !strings.Contains(text, ",") {
		separator = "/"
	}
	words := strings.Split(text, separator)
	if !flat && len(words) != 3 {
		return fractions, present, fmt.Errorf("split %q has %d parts; want three whole numbers with commas between "+
			"them, as %q", text, len(words), DefaultSplit)
	}
	if len(words) > 3 {
		words = words[:3] // what follows is not looked at
	}
	var sum float64
	for i, word := range words {
		v, ok := python.ParseFloat(word)
		if !ok || math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
			return fractions, present, fmt.Errorf("split %q: %q is not a number of 0 or more", text, word)
		}
		if !flat && strings.ContainsAny(word, ".eE") {
			return fractions, present, fmt.Errorf("split %q: %q is not a whole number (the program stops there); "+
				"scale the parts up, as in %q", text, word, DefaultSplit)
		}
		fractions[i] = v
		present[i] = flat || v > 0
		sum += v
	}
	if !(sum > 0) || math.IsInf(sum, 0) {
		return fractions, present, fmt.Errorf("split %q sums to %s, so there is nothing to divide; write it like %q",
			text, python.Float(sum), DefaultSplit)
	}
	for i := range fractions {
		fractions[i] /= sum
	}
	return fractions, present, nil
}
