package olmo

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"mula/index/numpy"
)

// MixtureSource is one source of OLMo-core's SourceMixtureDatasetConfig.
type MixtureSource struct {
	Name  string
	Ratio float64 // target_ratio, of the mixture's tokens

	// fraction of the source that may be taken once; 1 is OLMo-core's default
	MaxSourceFraction  float64
	MaxRepetitionRatio float64 // how often that fraction may be repeated; 1 is OLMo-core's default

	Tokens []int64 // of each of its files
}

// Part is the portion that a mixture takes of a file: its first tokens, a multiple of the sequence
// length, possibly zero. A repeated file has several parts.
type Part struct {
	Source, File int // indices in the arguments of [Mix]
	Tokens       int64
}

// allClose reports numpy.allclose(a, b) for two numbers.
func allClose(a, b float64) bool { return math.Abs(a-b) <= 1e-8+float64(1e-5*math.Abs(b)) }

// maxTokens is the limit up to which token counts are exact as floats, in which OLMo-core computes.
// It exceeds all existing text.
const maxTokens = 1 << 53

// passes bounds how often a mixture may repeat a source; every pass has an entry for each file.
const passes = 10_000

// Mix divides requested tokens, in steps of globalBatch tokens, over sources and files like
// OLMo-core's SourceMixtureDatasetConfig. The parts are in the order of the resulting data set
// (NumpyFSLDatasetMixture). An empty mixture is an error, as in OLMo-core.
//
// The shares of the files are computed in floating point like OLMo-core's. The instances lost by
// rounding are distributed evenly over the files with remaining capacity, and then one each by
// largest remainder (Hamilton's method). Instances that still do not fit are dropped, as in
// OLMo-core.
func Mix(sources []MixtureSource, requested, globalBatch, sequenceLength int64) ([]Part, error) {
	if err := checkMixture(sources, requested, globalBatch, sequenceLength); err != nil {
		return nil, err
	}
	type entry struct {
		// tokens requested and existing; instances assigned and still possible
		tokens, most, instances, room int64
		remainder                     float64
	}
	var parts []Part
	var entries []entry
	for i, s := range sources {
		var all int64
		for _, n := range s.Tokens {
			all += n
		}
		needed := int64(float64(requested) * s.Ratio)
		available := int64(float64(float64(all)*s.MaxSourceFraction) * s.MaxRepetitionRatio)
		if available < needed || all == 0 {
			return nil, fmt.Errorf("source %s: %d tokens are needed for its ratio of %v, but at most %d may be "+
				"taken; lower its ratio or the requested tokens, or raise its repetition",
				s.Name, needed, s.Ratio, available)
		}
		take := float64(needed) / float64(all)
		if take > passes {
			return nil, fmt.Errorf("source %s would be repeated %.0f times; lower its ratio or the requested tokens",
				s.Name, take)
		}
		for left, once := take, take <= 1; left > 0 || once; once = false {
			pass := min(1, left)
			left -= pass
			for f, n := range s.Tokens {
				parts = append(parts, Part{Source: i, File: f})
				entries = append(entries, entry{tokens: int64(math.Ceil(float64(n) * pass)), most: n})
			}
		}
	}

	steps := int64(math.Ceil(float64(requested) / float64(globalBatch)))
	missing := steps * (globalBatch / sequenceLength)
	for i := range entries {
		e := &entries[i]
		most := e.most / sequenceLength
		e.instances = min(e.tokens/sequenceLength, most)
		e.room = most - e.instances
		if e.room > 0 {
			e.remainder = float64(e.tokens%sequenceLength) / float64(sequenceLength)
		}
		missing -= e.instances
	}
	var eligible []int
	for i, e := range entries {
		if e.room > 0 {
			eligible = append(eligible, i)
		}
	}
	if missing > 0 && len(eligible) > 0 {
		share := missing / int64(len(eligible))
		for _, i := range eligible {
			n := min(share, entries[i].room)
			entries[i].instances += n
			entries[i].room -= n
			missing -= n
		}
		eligible = slices.DeleteFunc(eligible, func(i int) bool { return entries[i].room == 0 })
		// descending; of equal remainders the later entry is first
		slices.SortFunc(eligible, func(a, b int) int {
			switch ra, rb := entries[a].remainder, entries[b].remainder; {
			case ra > rb:
				return -1
			case ra < rb:
				return 1
			}
			return b - a
		})
		for _, i := range eligible[:min(missing, int64(len(eligible)))] {
			entries[i].instances++
		}
	}
	var all int64
	for i, e := range entries {
		parts[i].Tokens = e.instances * sequenceLength
		all += e.instances
	}
	if all == 0 {
		return nil, fmt.Errorf("every file has less than %d tokens, the sequence length; use longer files or a "+
			"shorter sequence length",
			sequenceLength)
	}
	return parts, nil
}

func checkMixture(sources []MixtureSource, requested, globalBatch, sequenceLength int64) error {
	if len(sources) == 0 {
		return errors.New("the mixture has no sources; give at least one")
	}
	if requested < 1 || requested > maxTokens {
		return fmt.Errorf("invalid mixture of %d tokens", requested)
	}
	if sequenceLength < 1 || globalBatch < 1 || globalBatch%sequenceLength != 0 {
		return fmt.Errorf("a global batch of %d tokens is not a multiple of the sequence length, %d", globalBatch,
			sequenceLength)
	}
	ratios := make([]float64, len(sources))
	names := make(map[string]bool)
	for i, s := range sources {
		switch {
		case names[s.Name]:
			return fmt.Errorf("two sources have the name %s, which OLMo-core would confuse; rename one", s.Name)
		case !(s.Ratio > 0 && s.Ratio <= 1):
			return fmt.Errorf("source %s: invalid ratio %v; it must be above 0 and at most 1", s.Name, s.Ratio)
		case !(s.MaxSourceFraction > 0 && s.MaxSourceFraction <= 1):
			return fmt.Errorf("source %s: invalid maximum fraction %v; it must be above 0 and at most 1", s.Name,
				s.MaxSourceFraction)
		case !(s.MaxRepetitionRatio >= 1 && s.MaxRepetitionRatio <= passes):
			return fmt.Errorf("source %s: invalid repetition %v; it must be at least 1 and at most %d", s.Name,
				s.MaxRepetitionRatio, passes)
		case len(s.Tokens) == 0:
			return fmt.Errorf("source %s has no files", s.Name)
		}
		names[s.Name] = true
		ratios[i] = s.Ratio
		var all int64
		for _, n := range s.Tokens {
			if n < 0 || n > maxTokens-all {
				return fmt.Errorf("source %s: invalid file of %d tokens", s.Name, n)
			}
			all += n
		}
	}
	if sum := numpy.Sum(ratios); !allClose(sum, 1) {
		return fmt.Errorf("the ratios add up to %v; they must add up to 1", sum)
	}
	return nil
}
