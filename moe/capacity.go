package moe

import (
	"context"
	"fmt"
	"math"

	"mula/xpu/comm"
)

// The capacity of experts (https://arxiv.org/abs/2101.03961, section 2.2): in training, an expert
// of a layer computes at most
//
//	C = ⌈S·K/E·ExpertCapacity⌉
//
// tokens of each sequence of S inputs, the first that chose it. It drops the others: they get
// nothing from this expert. The weights of their other experts do not change. So a token never
// depends on later ones, and the layout does not matter. The losses of the router and its
// statistics are about the choices before the drops, as in Megatron core.
//
// A dispatch computes the experts of a model with a capacity, also on one rank: it can have fewer
// rows than choices.

// validateCapacity returns an error if the model cannot have the capacity.
func (c Config) validateCapacity(bad func(field, format string, args ...any) error) error {
	const field = "expert_capacity_factor"
	switch factor := c.ExpertCapacity; {
	case !(factor >= 0) || math.IsInf(factor, 0):
		return bad(field, "is %g; it must be a number above 0, or 0 for no limit", factor)
	case factor > 0 && !c.moe():
		return bad(field, "is %g; it must be 0, because a dense model has no experts", factor)
	}
	return nil
}

// capacity returns the number of tokens of a sequence of the given length that an expert computes.
func (c Config) capacity(length int) int {
	most := math.Ceil(float64(length*c.ExpertsPerToken) / float64(c.Experts) * c.ExpertCapacity)
	return int(min(most, float64(length)))
}

// dispatches reports whether a dispatch computes the experts, which the given number of ranks
// share.
func (c Config) dispatches(ranks int) bool { return ranks > 1 || c.ExpertCapacity > 0 }

// drop returns which of the chosen experts [T, K] of the current flight's tokens drop the token, or
// nil if none can. number is the index of the layer among the layers with experts. Ranks that share
// rows exchange their counts.
func (m *Model) drop(ctx context.Context, chosen []int32, number int) ([]bool, error) {
	w, c := &m.ws, &m.cfg
	if c.ExpertCapacity == 0 {
		return nil, nil
	}
	w.lost[number] = 0
	if !w.batch.Drop || len(chosen) == 0 {
		return nil, nil
	}
	perRow, cells := w.shape.s*c.ExpertsPerToken, w.shape.rows*c.Experts
	rank, ranks := m.parallel.sequenceRanks()
	counts := room(&w.rowCounts, ranks*cells) // of each rank that shares the rows
	clear(counts)
	own := counts[rank*cells:][:cells]
	if ranks > 1 {
		for i, expert := range chosen {
			own[i/perRow*c.Experts+int(expert)]++
		}
		bounds := make([]int, ranks+1)
		for r := range bounds {
			bounds[r] = r * cells
		}
		if err := comm.AllGather(ctx, m.parallel.Sequence, counts, bounds); err != nil {
			return nil, fmt.Errorf("exchanging the tokens of experts with the ranks of the same sequences: %w", err)
		}
		clear(own)
		for i, n := range counts[:rank*cells] { // of earlier inputs of the rows
			own[i%cells] += n
		}
	}
	limit, lost := int64(c.capacity(w.shape.s*ranks)), 0
	dropped := room(&w.dropped, len(chosen))
	for i, expert := range chosen {
		count := &own[i/perRow*c.Experts+int(expert)]
		if dropped[i] = *count >= limit; dropped[i] {
			lost++
		}
		*count++
	}
	w.lost[number] = float64(lost) / float64(len(chosen))
	return dropped, nil
}
