package megatron

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode"

	"mula/index/numpy"
	"mula/index/python"
)

// maxDatasets is the maximum number of datasets in a blend: Megatron numbers them with 16 bits and
// rejects 32,767.
const maxDatasets = 32766

// A Blend lists token files by prefix, which is the path without .bin and .idx, and their weights.
// Weights need not sum to 1. Without weights (nil), files are blended in proportion to their
// samples.
type Blend struct {
	Prefixes []string
	Weights  []float64
}

// ParseBlend reads the words of --data-path, or of the file that --data-args-path names, like
// Megatron's get_blend_from_list: pairs of weight and prefix, or prefixes only. Weights are parsed
// like Python's float, so 1_0, inf and nan are weights.
//
// An odd number of words is always a list of prefixes. An even number of words whose first weights
// are numbers and whose later weights are not is an error; Megatron silently treats all its words
// as prefixes.
func ParseBlend(words []string) (Blend, error) {
	if len(words) == 0 {
		return Blend{}, errors.New("the list of token files is empty; give prefixes (paths without .bin and .idx), " +
			"or pairs of weight and prefix")
	}
	weights, err := pairWeights(words)
	if err != nil {
		return Blend{}, err
	}
	b := Blend{Weights: weights}
	for i, word := range words {
		if weights == nil || i%2 == 1 {
			prefix := strip(word)
			if prefix == "" {
				return Blend{}, fmt.Errorf("word %d of the list of token files is blank; write a prefix there", i+1)
			}
			b.Prefixes = append(b.Prefixes, prefix)
		}
	}
	return b, nil
}

// pairWeights returns the weights of a list of pairs, nil if the list has only prefixes.
func pairWeights(words []string) ([]float64, error) {
	if len(words)%2 == 1 {
		return nil, nil
	}
	weights := make([]float64, 0, len(words)/2)
	other := -1 // the first word that should be a weight but is not
	for i := 0; i < len(words); i += 2 {
		w, ok := python.ParseFloat(words[i])
		switch {
		case ok && other >= 0:
			return nil, fmt.Errorf("word %d of the list of token files, %q, is a weight, but word %d, %q, is not; "+
				"give every prefix a weight, or no prefix (Megatron fails an assertion)",
				i+1, words[i], other+1, words[other])
		case ok:
			weights = append(weights, w)
		case other < 0:
			other = i
		}
	}
	switch {
	case other < 0:
		return weights, nil
	case len(weights) == 0:
		return nil, nil
	}
	return nil, fmt.Errorf("word %d of the list of token files, %q, is not a weight, although word 1, %q, is; give "+
		"every prefix a weight, or no prefix (Megatron would silently treat all %d words as prefixes, including the "+
		"weights, and look for a file %s.idx)",
		other+1, words[other], words[0], len(words), strip(words[0]))
}

// strip implements Python's str.strip.
func strip(s string) string {
	return strings.TrimFunc(s, func(r rune) bool { return unicode.IsSpace(r) || 0x1c <= r && r <= 0x1f })
}

// empty reports whether there are neither prefixes nor weights.
func (b Blend) empty() bool { return len(b.Prefixes) == 0 && len(b.Weights) == 0 }

// check returns an error for a blend that no release of Megatron can build. where names the blend
// in messages.
func (b Blend) check(p Profile, where string) error {
	switch {
	case len(b.Prefixes) == 0:
		return fmt.Errorf("%s: no prefixes; give at least one", where)
	case b.Weights != nil && len(b.Weights) != len(b.Prefixes):
		return fmt.Errorf("%s: %d weights for %d prefixes; give every prefix a weight", where, len(b.Weights),
			len(b.Prefixes))
	case len(b.Prefixes) > maxDatasets:
		return fmt.Errorf("%s: %d token files, but Megatron numbers them with 16 bits and blends at most %d; merge "+
			"some of them", where, len(b.Prefixes), maxDatasets)
	case p.bareNames && b.Weights == nil && len(b.Prefixes) > 1:
		return fmt.Errorf("%s: Megatron core %s needs a weight before each of several prefixes; lists without "+
			"weights are supported from 0.7", where, p.tags)
	}
	for i, prefix := range b.Prefixes {
		if prefix == "" {
			return fmt.Errorf("%s: prefix %d is empty", where, i+1)
		}
	}
	if b.Weights == nil {
		return nil
	}
	for i, w := range b.Weights {
		switch {
		case math.IsNaN(w) || math.IsInf(w, 0):
			return fmt.Errorf("%s: the weight of %s is %s; use a finite number", where, b.Prefixes[i],
				python.Float(w))
		case w < 0:
			return fmt.Errorf("%s: the weight of %s is %s; use a number of 0 or more", where, b.Prefixes[i],
				python.Float(w))
		}
	}
	if sum := numpy.Sum(b.Weights); sum == 0 || math.IsInf(sum, 0) {
		return fmt.Errorf("%s: the weights sum to %s; use weights with a positive, finite sum", where,
			python.Float(sum))
	}
	for i, w := range b.normalized() {
		if w == 0 && p.positive {
			return fmt.Errorf("%s: the weight of %s is %s, or negligible compared to the other weights; remove the "+
				"file (Megatron fails an assertion)",
				where, b.Prefixes[i], python.Float(b.Weights[i]))
		}
	}
	return nil
}

// normalized returns the weights divided by their sum, both computed like numpy.
func (b Blend) normalized() []float64 {
	if b.Weights == nil {
		return nil
	}
	return numpy.Normalize(b.Weights)
}

// A share has the numbers that the blend of one split requests: the number of samples of each
// dataset, and the length of the blend.
type share struct {
	samples []int64
	size    int64
}

// shares divides n samples by normalized weights. Core 0.10 and older round once and blend all
// built samples. Later releases round for the blend and again for the surplus. All products are
// float64.
func (c *Config) shares(weights []float64, n int64) (share, error) {
	s := share{samples: make([]int64, len(weights))}
	surplus := c.Surplus
	if c.Profile.fixedSurplus {
		surplus = DefaultSurplus
	}
	for i, w := range weights {
		var built, drawn float64
		if c.Profile.oneCeil {
			built = math.Ceil(float64(float64(n)*w) * 1.005)
			drawn = built
		} else {
			part := math.Ceil(float64(n) * w)
			drawn = part // times (1 + 0), rounded up: the same integer
			built = math.Ceil(part * (1 + surplus))
		}
		// More than 2^53 samples can only be a mistake, and agreement with Megatron would need
		// Python's big integers.
		if !(built >= 0 && built < 1<<53 && drawn >= 0 && drawn < 1<<53) {
			return share{}, fmt.Errorf("%d samples times the weight %s cannot be counted exactly; request fewer "+
				"samples", n,
				python.Float(w))
		}
		s.samples[i] = int64(built)
		s.size += int64(drawn)
	}
	return s, nil
}
