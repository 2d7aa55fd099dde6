package moe

import (
	"fmt"
	"math"
	"strings"

	"mula/xpu"
)

// A Dispatch is a way to take the hidden states of tokens to the ranks that hold their experts, and
// the results back.
type Dispatch string

// The ways of dispatch. Both give the same bits.
const (
	// AllToAll sends a token's hidden state to the ranks that hold one of its experts, at most once
	// to each, and gets one row back from each.
	AllToAll Dispatch = "alltoall"

	// AllGather gives all hidden states to all ranks, and adds up what each makes of them by a
	// reduce-scatter. It moves more bytes, as many whatever the routing is.
	AllGather Dispatch = "allgather"
)

// Dispatches lists the ways to dispatch tokens.
func Dispatches() []string { return []string{string(AllToAll), string(AllGather)} }

// Parallel says which part of a model a rank holds. Rank r of the n that share the experts has the
// experts [r·E/n, (r+1)·E/n) of its layers, and all else of them. Stage s of a pipeline of n has
// the layers [s·L/n, (s+1)·L/n), the first also the embedding, the last the final norm and the
// head; see [Model.StageForward].
//
// All ranks of Experts call Forward and Backward of their models at the same time, each with its
// own batch, which may have no rows. Nothing else may use Experts meanwhile, also not what
// [BackwardOptions.Done] starts. When a call fails on one rank, the others wait in theirs until
// their context ends or that rank closes its group: none of them can go on.
type Parallel struct {
	Experts  *xpu.Comm // the ranks that share the experts; nil, or a group of one, is the whole model
	Dispatch Dispatch  // empty means AllToAll

	// UniformRouting sends every token where balance wants it, for benchmarks: choice j of token t
	// is expert (t·K+j) mod E, with the weight that the router gives it.
	UniformRouting bool

	Stage, Stages int // this rank's stage of the pipeline, from 0, and their number; 0 means 1: no pipeline
}

// ranks is the number of ranks that share the experts, and rank is this one's number among them.
func (p Parallel) ranks() int {
	if p.Experts == nil {
		return 1
	}
	return p.Experts.Size()
}

func (p Parallel) rank() int {
	if p.Experts == nil {
		return 0
	}
	return p.Experts.Rank()
}

func (p Parallel) validate(c Config) error {
	if p.Dispatch != "" && p.Dispatch != AllToAll && p.Dispatch != AllGather {
		return fmt.Errorf("dispatch %q is unknown; known are %q and %q", p.Dispatch, AllToAll, AllGather)
	}
	n := p.ranks()
	stages := max(1, p.Stages)
	switch {
	case p.Stages < 0 || p.Stage < 0 || p.Stage >= stages:
		return fmt.Errorf("stage %d of %d is none; stages are counted from 0", p.Stage, p.Stages)
	case stages > c.Layers:
		return fmt.Errorf("%d stages are more than the %d of num_hidden_layers", stages, c.Layers)
	case stages > 1 && c.TieEmbeddings:
		return fmt.Errorf("with tie_word_embeddings the embedding is needed by the first and the last of %d stages; "+
			"use 1, or untie them", stages)
	}
	switch {
	case n == 1:
	case !c.moe():
		return fmt.Errorf("%d ranks are to share experts, and model_type %q has none; use 1", n, c.Architecture)
	case c.Experts%n != 0:
		var sizes []string
		for i := 1; i <= c.Experts; i++ {
			if c.Experts%i == 0 {
				sizes = append(sizes, fmt.Sprint(i))
			}
		}
		return fmt.Errorf("%d ranks cannot share num_experts %d evenly; possible are %s", n, c.Experts,
			strings.Join(sizes, ", "))
	}
	return nil
}

// A stage is the part of the layers that a rank holds.
type stage struct {
	from, layers int
	first, last  bool // it holds the embedding; it holds the final norm and the head
}

func stageOf(c Config, number, stages int) stage {
	stages = max(1, stages)
	from, to := number*c.Layers/stages, (number+1)*c.Layers/stages
	return stage{from, to - from, number == 0, number == stages-1}
}

// whole refuses to do something with a model of which other ranks hold parts.
func (m *Model) whole(doing string) error {
	if n := m.parallel.ranks(); n > 1 {
		return fmt.Errorf("%s: this rank holds 1/%d of the experts; it needs a whole model, which Open reads from a "+
			"checkpoint", doing, n)
	}
	if n := m.parallel.Stages; n > 1 {
		return fmt.Errorf("%s: this rank holds stage %d of %d; it needs a whole model, which Open reads from a "+
			"checkpoint", doing, m.parallel.Stage, n)
	}
	return nil
}

// ExpectedCopies is the number of other ranks that a token's hidden state goes to in a layer, on
// average over tokens whose sets of K experts are equally likely: with [AllToAll]
//
//	(n-1)·(1 - C(E-E/n, K)/C(E, K))
//
// and with [AllGather] n-1, whatever is chosen.
func (c Config) ExpectedCopies(d Dispatch, ranks int) float64 {
	none := 1.0 // probability that all K experts are elsewhere
	if d != AllGather && c.moe() {
		for j := range c.ExpertsPerToken {
			none *= max(0, float64(c.Experts-c.Experts/ranks-j)) / float64(c.Experts-j)
		}
	} else {
		none = 0
	}
	return float64(ranks-1) * (1 - none)
}

// UniformCopies is the number of tokens, of the given number of one rank's, whose hidden states go
// to rank `to` of so many with [Parallel.UniformRouting].
func (c Config) UniformCopies(d Dispatch, ranks, to, tokens int) int64 {
	if d == AllGather {
		return int64(tokens)
	}
	copies, held := int64(0), c.Experts/ranks
	for t := range tokens {
		for j := range c.ExpertsPerToken {
			if (t*c.ExpertsPerToken+j)%c.Experts/held == to {
				copies++
				break
			}
		}
	}
	return copies
}

// DispatchBytes is what a rank sends to the others that share the experts, as [xpu.Comm.Traffic]
// counts it.
type DispatchBytes struct {
	Pass    int64 // at the beginning of every pass
	Forward int64 // in the forward pass of a layer
	// when the experts of a layer are computed again: those of all but the last that has gone
	// through the forward pass
	Recompute int64
	Backward  int64 // in the backward pass of a layer
}

// DispatchBytes says what a rank of so many sends if, in a layer, the hidden states of its own
// tokens go to other ranks `sent` times, and those of others' tokens come to it `got` times. A rank
// of T tokens sends (n-1)·T with [AllGather], whatever is chosen, and about T·ExpectedCopies with
// [AllToAll]. A number takes 4 bytes:
//
//	Forward    sent·(H + 2K) + got·H      hidden states, experts and weights; outputs
//	Recompute  sent·H                     hidden states
//	Backward   sent·H + got·(H + K)       gradients of outputs; of hidden states and weights
//
// and on top go the numbers of tokens, n-1 numbers for each Forward with AllToAll, for each Pass
// with AllGather.
func (c Config) DispatchBytes(d Dispatch, ranks int, sent, got int64) DispatchBytes {
	h, k, counts := int64(c.HiddenSize), int64(c.ExpertsPerToken), 4*int64(ranks-1)
	b := DispatchBytes{Forward: 4 * (sent*(h+2*k) + got*h), Recompute: 4 * sent * h, Backward: 4 * (sent*h + got*(h+k))}
	if d == AllGather {
		b.Pass = counts
	} else {
		b.Forward += counts
	}
	return b
}

// dispatchMemory is the number of bytes of a dispatch's buffers, and with [AllGather] of those in
// which its group adds up ([xpu.SumMemory]), for balanced routing.
func (c Config) dispatchMemory(p Pass) int64 {
	ranks, e, h, k, ffn := int64(p.ExpertRanks), int64(c.Experts), int64(c.HiddenSize), int64(c.ExpertsPerToken),
		int64(c.IntermediateSize)
	tokens := int64(p.Rows) * int64(p.SequenceLength)
	rows, got := tokens*k, tokens*ranks
	layers := int64(stageOf(c, p.Stage, p.Stages).layers) * int64(max(1, p.InFlight))
	kept := layers
	if p.Recompute.experts() {
		kept = 1
	}
	layer := 2 * rows // tokenOf, weight
	var numbers, sums int64
	if p.Dispatch == AllGather {
		sums = xpu.SumMemory(p.ExpertRanks, int(tokens*(h+k)), 4)
	} else {
		got = int64(math.Ceil(float64(tokens) * c.ExpectedCopies(p.Dispatch,
			p.ExpertRanks) * float64(ranks) / float64(ranks-1)))
		layer += tokens * ranks    // place
		numbers += got * (h + 3*k) // sentRows, sentChoices
	}
	layer += got * k                                       // rowOf
	numbers += got*(h+3*k) + rows*(2*h+2*ffn+1) + tokens*k // choices, back; those of the rows; tokenWeights
	numbers += layers*layer + kept*(got*h+rows*2*ffn)
	return 4*numbers + sums + layers*(4*(e/ranks)+8*2*(ranks+1))
}
