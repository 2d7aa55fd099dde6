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
	Ratio         float64 // ratio of the mixture, before normalization to 1
	MaxRepetition float64 // max_repetition_factor; 1 is OLMo-core's default
}

// SampleSizes returns how many tokens OLMo-core's MixingInstanceSource takes of each source to be
// as close to target tokens as the ratios and repetitions allow. Target 0 means the number of all
// tokens. An explicit target that cannot be reached is an error, as in OLMo-core.
func SampleSizes(sources []SampledSource, target int64) ([]int64, error) {
	if len(sources) == 0 {
		return nil, errors.New("the mixture has no sources; give at least one")
	}
	if target < 0 || target > maxTokens {
		return nil, fmt.Errorf("invalid mixture of %d tokens", target)
	}
	ratios := make([]float64, len(sources))
	var all int64
	for i, s := range sources {
		switch {
		case !(s.Ratio > 0) || math.IsInf(s.Ratio, 0):
			return nil, fmt.Errorf("source %d: invalid ratio %v; it must be above 0", i, s.Ratio)
		case !(s.MaxRepetition >= 1) || math.IsInf(s.MaxRepetition, 0):
			return nil, fmt.Errorf("source %d: invalid repetition %v; it must be at least 1", i, s.MaxRepetition)
		case s.Tokens < 1 || s.Tokens > maxTokens-all:
			return nil, fmt.Errorf("source %d: invalid number of tokens %d", i, s.Tokens)
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
	// The tokens that each source would supply, the repetition needed for that, and the resulting
	// capacity.
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
		return nil, fmt.Errorf("%d tokens are impossible with these ratios and repetitions, only %d are available; "+
			"lower the target or raise a repetition", target, int64(sum))
	}
	return sizes, nil
}

// Sample returns the instances that OLMo-core's SamplingInstanceSource takes of a source with the
// given number of instances: all full repetitions of the source's permutation, then its start. seed
// is the mixture's seed plus the number of the source in it. sampled is the number of tokens, from
// [SampleSizes], divided by the sequence length.
//
// This applies if the sequence length is the maximum sequence length. Otherwise OLMo-core (3.0.0)
// writes the list with 8 bytes per entry and reads it with 4, so every other instance is instance
// 0. Sample does not reproduce that defect.
func Sample(ctx context.Context, instances, seed, sampled int64) ([]uint32, error) {
	o := Order{Instances: instances, Chunk: 1, Shuffle: true, Seed: seed}
	if sampled < 0 || sampled > maxInstances {
		return nil, fmt.Errorf("cannot sample %d instances of %d", sampled, instances)
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
