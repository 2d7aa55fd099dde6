package moe

import "fmt"

// A Batch is a number of windows of text: each row has SequenceLength inputs and, shifted by one,
// as many targets.
type Batch struct {
	Tokens         []uint32 // Rows × (SequenceLength+1), row by row
	Rows           int
	SequenceLength int

	// Begin, unless empty, keeps attention within the documents of a row: for each input the place
	// in its row of the first input that it attends to, Rows × SequenceLength. It is at most the
	// input's own, and never falls within a row. Rotary positions are those of the row all the
	// same; as rotations are relative, a document computes what it would alone, up to rounding.
	Begin []int32

	// Counted, unless empty, says which targets count, Rows × SequenceLength. The loss of the
	// others is 0, and nothing is learned from them. As inputs all tokens are alike: routers choose
	// experts for each, and their losses are over all.
	Counted []bool
}

// check refuses a batch that a model of configuration c cannot take. With other ranks a batch may
// have no rows.
func (b Batch) check(c Config, p Parallel) error {
	least := 1
	if p.ranks() > 1 {
		least = 0
	}
	if b.Rows < least || b.SequenceLength < 1 {
		return fmt.Errorf("batch has %d rows of %d tokens; both must be positive", b.Rows, b.SequenceLength)
	}
	if b.SequenceLength > c.MaxPositions {
		return fmt.Errorf("sequence length %d is beyond the model's max_position_embeddings %d", b.SequenceLength,
			c.MaxPositions)
	}
	width := b.SequenceLength + 1
	if len(b.Tokens)%width != 0 || len(b.Tokens)/width != b.Rows {
		return fmt.Errorf("batch of %d rows holds %d tokens, want %d a row", b.Rows, len(b.Tokens), width)
	}
	for i, id := range b.Tokens {
		if int64(id) >= int64(c.VocabSize) {
			return fmt.Errorf("batch row %d, token %d: id %d is beyond the model's vocabulary of %d", i/width, i%width,
				id, c.VocabSize)
		}
	}
	inputs := b.Rows * b.SequenceLength
	if n := len(b.Begin); n > 0 && n != inputs {
		return fmt.Errorf("batch of %d rows of %d tokens says of %d where their documents begin; it must be all or none", b.Rows, b.SequenceLength, n)
	}
	if n := len(b.Counted); n > 0 && n != inputs {
		return fmt.Errorf("batch of %d rows of %d tokens says of %d targets whether they count; it must be all or none",
			b.Rows, b.SequenceLength, n)
	}
	for i, begin := range b.Begin {
		place, before := i%b.SequenceLength, int32(0)
		if place > 0 {
			before = b.Begin[i-1]
		}
		if begin < before || int(begin) > place {
			return fmt.Errorf("batch row %d, token %d: its document begins at %d; that must be between %d, where "+
				"that of the token before does, and its own place",
				i/b.SequenceLength, place, begin, before)
		}
	}
	return nil
}

// targets is the number of targets that count.
func (b Batch) targets() int {
	if len(b.Counted) == 0 {
		return b.Rows * b.SequenceLength
	}
	n := 0
	for _, counted := range b.Counted {
		if counted {
			n++
		}
	}
	return n
}

// input is the t-th token that the model reads, and target the one that follows it, or -1 if that
// does not count.
func (b Batch) input(t int) uint32 {
	return b.Tokens[t/b.SequenceLength*(b.SequenceLength+1)+t%b.SequenceLength]
}
func (b Batch) target(t int) int32 {
	if len(b.Counted) > 0 && !b.Counted[t] {
		return -1
	}
	return int32(b.Tokens[t/b.SequenceLength*(b.SequenceLength+1)+t%b.SequenceLength+1])
}

// Stats is what a pass over a batch measured, complete when the pass returns. Its slices are the
// model's and hold until its next pass: copy what is to stay.
type Stats struct {
	Loss         float64   // sum of the cross entropies of the targets that count, in nats
	Tokens       int       // number of inputs, Rows × SequenceLength
	Targets      int       // number of targets that count
	RowLoss      []float64 // sum of the cross entropies of each row
	Aux          float64   // load-balancing loss without its coefficient, in the form asked for; 0 for a dense model
	Z            float64   // router z-loss without its coefficient
	ExpertCounts [][]int64 // tokens sent to each expert, [layer][expert]; nil for a dense model
	// of each layer, the mean over tokens of -Σ p·ln p of the router's distribution, in nats; nil
	// for a dense model
	RouterEntropy []float64
}

// BackwardOptions are the choices of one call of [Model.Backward].
type BackwardOptions struct {
	// Targets is the number of targets that count of the whole step, over all micro-batches and
	// ranks, 1 if there is none; the cross-entropy is divided by it, so that the gradients of
	// micro-batches add up to those of one large batch. 0 means that this batch is the whole step.
	Targets int64

	// Tokens is the number of inputs of the whole step. 0 means as many as Targets: all targets
	// count.
	//
	// The load-balancing and z-losses are computed on this batch alone and weighted by its share of
	// Tokens: with several micro-batches the step's auxiliary loss is the mean of theirs, weighted
	// by size. That is not the loss of the joined batch, because the load-balancing loss is not
	// linear in the batch; both published trainings do the same.
	Tokens int64
	Loss   LossOptions

	// SampleTargets draws the targets of the cross entropy from the model's own distribution at
	// each position, in place of the batch's: the square of such a gradient, times the number of
	// targets, is the Gauss-Newton-Bartlett estimator of the Hessian's diagonal (Liu et al. 2023,
	// arXiv 2305.14342, algorithm 2). The losses in Stats are then those of the drawn targets.
	//
	// The target of position i of the batch follows from the logits there, SampleSeed and
	// FirstTarget+i alone. With FirstTarget the number of inputs in the micro-batches before this
	// one, the step draws the same targets however it is cut. Where the batch's target does not
	// count, none is drawn.
	SampleTargets bool
	SampleSeed    uint64
	FirstTarget   int64

	// Done, unless nil, is called from within Backward as soon as the commands are given that
	// complete what this pass adds to the gradients of a bucket: with 0, 1, … len(Buckets)-1. What
	// it does with them may go on while Backward works on those that follow; who reads them in Go
	// calls ToHost of the device before, which waits for these commands.
	Done func(bucket int)
}
