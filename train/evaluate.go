package train

import (
	"context"
	"errors"
	"fmt"
	"math"

	"mula/blend"
	"mula/moe"
)

// EvaluateOptions are the options of [Evaluate].
type EvaluateOptions struct {
	Samples   int // validation windows of each source, spread evenly over its split; 0 = all
	BatchSize int // windows at once in memory; 0 = 8
	Progress  func(done, total int64)
}

// Evaluate computes the loss of a model on the held-out windows of a plan. A source that holds none out is left out; it is an error if none
// does.
func Evaluate(ctx context.Context, m *moe.Model, data *blend.Data, o EvaluateOptions) (Evaluation, error) {
	if o.Samples < 0 || o.BatchSize < 0 {
		return Evaluation{}, fmt.Errorf("evaluation of %d samples in batches of %d: neither may be negative", o.Samples, o.BatchSize)
	}
	if o.BatchSize == 0 {
		o.BatchSize = 8
	}
	if v := m.Config().VocabSize; data.Tokenizer != nil && data.Tokenizer.Vocabulary > v {
		return Evaluation{}, fmt.Errorf("the model has a vocabulary of %d, the plan's tokenizer has %d ids: they do not belong together", v, data.Tokenizer.Vocabulary)
	}
	counts := make([]int64, len(data.Sources)) // windows to evaluate of each source
	var done, total int64
	for i, s := range data.Sources {
		counts[i] = s.Validation
		if o.Samples > 0 {
			counts[i] = min(counts[i], int64(o.Samples))
		}
		total += counts[i]
	}
	if total == 0 {
		return Evaluation{}, errors.New("the plan holds nothing out for validation; set validation in blend.yaml and seal it again")
	}
	o.BatchSize = int(min(int64(o.BatchSize), total))
	e := Evaluation{SourceLoss: map[string]float64{}, SourceTargets: map[string]int64{}}
	var loss float64
	var targets int64
	width := data.SequenceLength + 1
	tokens := make([]uint32, 0, o.BatchSize*width)
	for i, s := range data.Sources {
		if counts[i] == 0 {
			continue
		}
		var sourceLoss float64
		forward := func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			stats, err := m.Forward(moe.Batch{Tokens: tokens, Rows: len(tokens) / width, SequenceLength: data.SequenceLength})
			if err != nil {
				return err
			}
			for _, l := range stats.RowLoss {
				sourceLoss += l
			}
			done += int64(len(stats.RowLoss))
			tokens = tokens[:0]
			if o.Progress != nil {
				o.Progress(done, total)
			}
			return nil
		}
		// Window ⌊j·V/n⌋ is the j-th of n that are spread over V.
		var window, j int64
		for sample := range data.Validation(i) {
			if j < counts[i] && window == spread(j, s.Validation, counts[i]) {
				tokens = tokens[:len(tokens)+width]
				if err := data.Tokens(tokens[len(tokens)-width:], sample); err != nil {
					return Evaluation{}, err
				}
				if j++; len(tokens) == o.BatchSize*width {
					if err := forward(); err != nil {
						return Evaluation{}, err
					}
				}
			}
			window++
		}
		if len(tokens) > 0 {
			if err := forward(); err != nil {
				return Evaluation{}, err
			}
		}
		n := counts[i] * int64(data.SequenceLength)
		if math.IsNaN(sourceLoss) || math.IsInf(sourceLoss, 0) {
			return Evaluation{}, fmt.Errorf("%w: validation loss of source %q is %v", ErrNotFinite, s.Name, sourceLoss)
		}
		e.SourceLoss[s.Name], e.SourceTargets[s.Name] = sourceLoss/float64(n), n
		loss += sourceLoss
		targets += n
	}
	e.Loss = loss / float64(targets)
	return e, nil
}

// spread is ⌊j·n/count⌋ without overflow, for j < count ≤ n.
func spread(j, n, count int64) int64 { return j*(n/count) + j*(n%count)/count }
