package olmo

import (
	"context"
	"errors"
	"fmt"
	"math"

	"mula/index/numpy"
)

// SampledSource is one source of OLMo-core's MixingInstanceSource.
type SampledSource struct {
	Tokens        int64   // of the source
	Ratio         float64 // of the mixture, before they are made to add up to 1
	MaxRepetition float64 // max_repetition_factor; 1 is OLMo-core's default
}

// SampleSizes is how many tokens OLMo-core's MixingInstanceSource takes of each source to come as
// close to target tokens as the ratios and repetitions allow; target 0 is as many as there are in
// all. An explicit target that cannot be met is an error, as there.
func SampleSizes(sources []SampledSource, target int64) ([]int64, error) {
	if len(sources) == 0 {
		return nil, errors.New("a mixture of no sources")
	}
	if target < 0 || target > maxTokens {
		return nil, fmt.Errorf("a mixture of %d tokens", target)
	}
	ratios := make([]float64, len(sources))
	var all int64
	for i, s := range sources {
		switch {
		case !(s.Ratio > 0) || math.IsInf(s.Ratio, 0):
			return nil, fmt.Errorf("source %d: a ratio of %v; it must be above 0", i, s.Ratio)
		case !(s.MaxRepetition >= 1) || math.IsInf(s.MaxRepetition, 0):
			return nil, fmt.Errorf("source %d: a repetition of %v; it must be at least 1", i, s.MaxRepetition)
		case s.Tokens < 1 || s.Tokens > maxTokens-all:
			return nil, fmt.Errorf("source %d has %d tokens", i, s.Tokens)
		}
		ratios[i] = s.Ratio
		all += s.Tokens
	}
	wanted := float64(target)
	if target == 0 {
		wanted = float64(all)
	}
	if sum := numpy.Sum(ratios); !allClose(sum, 1) {
		for i := range ratios {
			ratios[i] /= sum
		}
	}
	// What each source would give, how often it would have to be repeated for that, and what then
	// is there.
	ideal, room := make([]float64, len(sources)), make([]float64, len(sources))
	factor := 1.0
	for i, s := range sources {
		ideal[i] = wanted * ratios[i]
		size := float64(s.Tokens)
		room[i] = size * min(s.MaxRepetition, max(ideal[i]/size, 1))
		factor = min(factor, room[i]/ideal[i])
	}
	sizes, sampled := make([]int64, len(sources)), make([]float64, len(sources))
	for i := range sources {
		sampled[i] = ideal[i] * factor
		sizes[i] = int64(sampled[i])
		if float64(sizes[i]) > room[i] {
			return nil, fmt.Errorf("source %d: %d of %v tokens after rounding; OLMo-core fails here too", i, sizes[i],
				room[i])
		}
	}
	if sum := numpy.Sum(sampled); target != 0 && !allClose(wanted, sum) {
		return nil, fmt.Errorf("%d tokens cannot be had with these ratios and repetitions, only %d; lower the "+
			"target or raise a repetition", target, int64(sum))
	}
	return sizes, nil
}

// Sample is which instances OLMo-core's SamplingInstanceSource takes of a source with so many: the
// source's permutation as often as it fits as a whole, then its beginning. seed is the mixture's
// plus the number of the source in it; sampled is the number of tokens, from [SampleSizes], divided
// by the sequence length.
//
// This holds where the sequence length is the maximum sequence length. Otherwise OLMo-core (3.0.0)
// writes the list with 8 bytes an entry, reads it with 4, and so takes instance 0 every other time;
// nothing here reproduces that.
func Sample(ctx context.Context, instances, seed, sampled int64) ([]uint32, error) {
	o := Order{Instances: instances, Chunk: 1, Shuffle: true, Seed: seed}
	if sampled < 0 || sampled > maxInstances {
		return nil, fmt.Errorf("%d instances of %d", sampled, instances)
	}
	indices, release, err := o.indices(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer release()
	out := make([]uint32, sampled)
	for done := 0; done < len(out); {
		done += copy(out[done:], indices)
	}
	return out, nil
}
