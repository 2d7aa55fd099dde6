package megatron

import (
	"fmt"
	"math"
	"regexp"

	"mula/index/numpy"
	"mula/index/python"
)

// numbers matches the numbers of a split string like Megatron.
var numbers = regexp.MustCompile(`[.0-9]+`)

// parseSplit parses a split string: the fractions of train, valid and test, normalized.
func parseSplit(text string) ([3]float64, error) {
	var v [3]float64
	found := numbers.FindAllString(text, -1)
	if len(found) > len(v) {
		return v, fmt.Errorf("split %q has %d numbers, and %q is the fourth; give at most three, for train, valid "+
			"and test (signs and exponents are ignored)",
			text, len(found), found[3])
	}
	for i, word := range found {
		number, ok := python.ParseFloat(word)
		if !ok {
			return v, fmt.Errorf("split %q: invalid number %q; write it like 969,30,1", text, word)
		}
		v[i] = number
	}
	sum := numpy.Sum(v[:])
	if !(sum > 0) || math.IsInf(sum, 0) {
		return v, fmt.Errorf("split %q sums to %s, so no split has samples; write it like 969,30,1", text,
			python.Float(sum))
	}
	copy(v[:], numpy.Normalize(v[:]))
	return v, nil
}

// A stretch is one split's range of every file, as fractions of its sequences; present is false for
// a skipped split.
type stretch struct {
	left, right float64
	present     bool
}

// splitMatrix computes the cumulative sums of the fractions. The last edge need not be 1.
func splitMatrix(v [3]float64) [3]stretch {
	var m [3]stretch
	left := 0.0
	for i := range v {
		right := left + v[i]
		m[i] = stretch{left: left, right: right, present: right > left}
		left = right
	}
	return m
}

// matrixValue returns the split matrix as in descriptions: pairs or null. The first edge is an int
// in Megatron, all others are floats.
func matrixValue(m [3]stretch) python.Value {
	list := make(python.List, len(m))
	for i, s := range m {
		switch {
		case !s.present:
			list[i] = python.Null{}
		case i == 0:
			list[i] = python.List{python.Int(0), python.Number(s.right)}
		default:
			list[i] = python.List{python.Number(s.left), python.Number(s.right)}
		}
	}
	return list
}

// documents returns the range of sequences, in a file of ns, that belong to the stretch.
func (s stretch) documents(ns int64) (first, end int64) {
	return python.RoundHalfEven(s.left * float64(ns)), python.RoundHalfEven(s.right * float64(ns))
}
