package moe

import (
	"context"
	"fmt"
	"math"
	"slices"

	"mula/xpu/comm"
)

// A Batch is a number of windows of text. Each row has SequenceLength inputs and SequenceLength
// targets: the same tokens shifted by one.
type Batch struct {
	Tokens         []uint32 // Rows × (SequenceLength+1), row by row
	Rows           int
	SequenceLength int

	// Begin, Rows × SequenceLength, restricts attention to the documents of a row; empty means no
	// restriction. For each input it is the index, within the row, of the first input that it
	// attends to. It must not exceed the input's own index and must not decrease along a row.
	// Rotary positions still count from the start of the row. Rotations are relative, so a document
	// computes the same values as it would alone, up to rounding.
	Begin []int32

	// Counted, Rows × SequenceLength, marks the targets that count; empty means all. The other
	// targets have loss 0 and no gradient. Their tokens are still inputs: routers choose experts
	// for them, and the router losses include them.
	Counted []bool

	// Jitter selects the noise of [Config.RouterJitter]; the zero value means none, as in
	// evaluation.
	Jitter BatchJitter

	// Drop means that experts drop tokens beyond [Config.ExpertCapacity], as in training.
	Drop bool
}

// A BatchJitter selects the noise of a batch.
type BatchJitter struct {
	On    bool
	Seed  uint64 // of the step
	First int64  // number of the first input of the batch in the step, in the order of rows
}

// check returns an error if a model of configuration c cannot process the batch. With expert
// parallelism a batch may have no rows.
func (b Batch) check(c Config, p Parallel) error {
	least := 1
	if p.Mesh.Size(comm.EP) > 1 {
		least = 0
	}
	if b.Rows < least || b.SequenceLength < 1 {
		return fmt.Errorf("batch has %d rows of %d tokens; both must be positive", b.Rows, b.SequenceLength)
	}
	if _, ranks := p.sequenceRanks(); b.SequenceLength%ranks != 0 {
		return fmt.Errorf("%d ranks cannot divide rows of %d tokens equally", ranks, b.SequenceLength)
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
		return fmt.Errorf("batch of %d rows of %d tokens has %d document starts; set one for each token or none",
			b.Rows, b.SequenceLength, n)
	}
	if n := len(b.Counted); n > 0 && n != inputs {
		return fmt.Errorf("batch of %d rows of %d tokens has %d Counted values; set one for each target or none",
			b.Rows, b.SequenceLength, n)
	}
	if first := b.Jitter.First; c.jitters(b) && (first < 0 || first > math.MaxInt32-int64(inputs)) {
		return fmt.Errorf("the noise of a batch of %d inputs that are number %d and later in their step; numbers must "+
			"be below 2^31", inputs, first)
	}
	for i, begin := range b.Begin {
		place, before := i%b.SequenceLength, int32(0)
		if place > 0 {
			before = b.Begin[i-1]
		}
		if begin < before || int(begin) > place {
			return fmt.Errorf("batch row %d, token %d: document start %d; it must be between %d, the document "+
				"start of the previous token, and the token's own index",
				i/b.SequenceLength, place, begin, before)
		}
	}
	return nil
}

// targets returns the number of targets that count.
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

// input returns the t-th input token, and target the token after it, or -1 if that target does not
// count.
func (b Batch) input(t int) uint32 {
	return b.Tokens[t/b.SequenceLength*(b.SequenceLength+1)+t%b.SequenceLength]
}
func (b Batch) target(t int) int32 {
	if len(b.Counted) > 0 && !b.Counted[t] {
		return -1
	}
	return int32(b.Tokens[t/b.SequenceLength*(b.SequenceLength+1)+t%b.SequenceLength+1])
}

// predicted returns the token of row `row` that layer k of multi-token prediction reads at position
// i of the row, and its target: the tokens i+k+1 and i+k+2 of the row. There is no target, -1,
// after the end of the row, if token i+k+1 is in another document than token i, or if a token from
// i+1 to i+k+2 is a target that does not count. The last token of the row replaces tokens after the
// end.
func (b Batch) predicted(row, i, k int) (input uint32, target int32) {
	s := b.SequenceLength
	tokens, last := b.Tokens[row*(s+1):][:s+1], i+k+1
	if last >= s {
		return tokens[s], -1
	}
	if len(b.Begin) > 0 && int(b.Begin[row*s+last]) > i {
		return tokens[last], -1
	}
	if len(b.Counted) > 0 && slices.Contains(b.Counted[row*s+i:row*s+last+1], false) {
		return tokens[last], -1
	}
	return tokens[last], int32(tokens[last+1])
}

// Stats are the measurements of a pass over a batch, complete when the pass returns. The model
// reuses the slices in its next pass; copy them to keep them.
type Stats struct {
	Loss    float64   // sum of the cross entropies of the targets that count, in nats
	Tokens  int       // number of inputs, Rows × SequenceLength
	Targets int       // number of targets that count
	RowLoss []float64 // sum of the cross entropies of each row; nil except in the last pipeline stage
	// load-balancing loss without its coefficient, in the requested form; 0 for a dense model. With
	// AuxSequence and AuxGlobal, every stage returns the loss of its own layers
	Aux float64
	Z   float64 // router z-loss without its coefficient
	// tokens sent to each expert, [layer with experts][expert], of all layers of this rank; nil
	// without such layers, and zeros for groups of layers that the pass has not computed
	ExpertCounts [][]int64
	// mean over tokens of the entropy -Σ p·ln p of each router's distribution, in nats, of the same
	// layers; nil without such layers
	RouterEntropy []float64
	// of the same layers, the experts' dropped choices as a fraction of the choices of all tokens;
	// nil without [Config.ExpertCapacity]
	Dropped []float64

	// For each layer of multi-token prediction, the sum of the cross entropies of its targets, and
	// their number. Only backward passes compute them.
	PredictionLoss    []float64
	PredictionTargets []int64
}

// BackwardOptions are the options of one call of [Model.Backward].
type BackwardOptions struct {
	// Targets is the number of counted targets in the whole step, over all micro-batches and ranks;
	// set 1 if no target counts. The cross entropy is divided by it, so that the gradients of
	// micro-batches sum to the gradient of one large batch. 0 means that this batch is the whole
	// step.
	Targets int64

	// Tokens is the number of inputs of the whole step. 0 means the same as Targets: all targets
	// count.
	//
	// The z-loss and the load-balancing loss are computed on this batch alone and weighted by its
	// share of Tokens. AuxSequence and AuxGlobal are different. With several micro-batches, the
	// step's auxiliary loss is therefore their mean, weighted by size. It differs from the loss of
	// the joined batch, because the load-balancing loss is not linear in the batch. Both published
	// trainings do the same.
	Tokens int64
	Loss   LossOptions

	// StepCounts is required by AuxGlobal, unless the batch is the whole step. It returns the
	// number of tokens of the whole step that chose each expert, over all micro-batches and ranks.
	// own are the choices of this batch. Both have the layers of Stats.ExpertCounts. Each backward
	// pass calls it once, before it computes gradients.
	StepCounts func(ctx context.Context, own [][]int64) ([][]int64, error)

	// First means that the batch is the first of a step, in the selected group of layers. Its
	// gradients replace the contents of the gradients instead of being added to them. That saves
	// the memory traffic of [Model.ZeroGradients], and of reading the zeros.
	First bool

	// SampleTargets draws the targets of the cross entropy from the model's own distribution at
	// each position instead of using the batch's targets. The square of such a gradient, times the
	// number of targets, is the Gauss-Newton-Bartlett estimator of the Hessian's diagonal (Liu et
	// al. 2023, arXiv 2305.14342, algorithm 2). The losses in Stats are then the losses of the
	// drawn targets.
	//
	// Each layer of multi-token prediction has drawn targets of its own, from its own distribution.
	// Their losses have the weight √(λ/D) instead of λ/D. Draws are independent, so the mean of the
	// square of the gradient is then a sum: the curvature of the model's loss, and λ/D times the
	// curvature of the layers' losses.
	//
	// The drawn target of position i depends only on its logits, SampleSeed and FirstTarget+i. Set
	// FirstTarget to the number of inputs in the preceding micro-batches; the step then draws the
	// same targets for every division into micro-batches. Ranks that share the rows have different
	// positions, in the order of the ranks, so their number changes the targets. No target is drawn
	// where the batch's target does not count.
	SampleTargets bool
	SampleSeed    uint64
	FirstTarget   int64

	// Done, unless nil, is called by Backward with 0, 1, … len(Buckets)-1, once the commands that
	// complete a bucket's gradients are enqueued. Work that it starts on them may run while
	// Backward computes the following buckets. To read the gradients in Go, start the device's
	// Transfers in Done; they wait for these commands alone.
	Done func(bucket int)
}
