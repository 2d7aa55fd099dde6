package megatron

import (
	"errors"
	"fmt"
	"math"
)

// A Schedule holds the iteration options from which Megatron derives the requested numbers of
// samples. A change of any of them changes the names of the cache files.
type Schedule struct {
	TrainSamples    int64 // --train-samples; 0 if TrainIters is given
	TrainIters      int64 // --train-iters; if 0, TrainSamples / GlobalBatchSize
	GlobalBatchSize int64 // --global-batch-size

	EvalInterval        int64 // --eval-interval; 0: training is not interrupted for evaluation
	EvalIters           int64 // --eval-iters
	EvalGlobalBatchSize int64 // --eval-global-batch-size; 0: GlobalBatchSize
	StartEvalAtIter     int64 // --start-eval-at-iter; 0: from the start
	FullValidation      bool  // --full-validation: the whole validation set
	SkipTrain           bool  // --skip-train: one evaluation

	PhaseTransitions []int64 // --phase-transition-iterations
	Iteration        int64   // the first iteration of the training, which determines the phase
}

// Samples returns the numbers of train, valid and test samples that Megatron requests
// (get_train_valid_test_num_samples in megatron/training/training.py).
func (s Schedule) Samples() ([3]Size, error) {
	var none [3]Size
	for _, option := range []struct {
		name  string
		value int64
	}{
		{"train samples", s.TrainSamples}, {"train iterations", s.TrainIters}, {"global batch size", s.GlobalBatchSize},
		{"evaluation interval", s.EvalInterval}, {"evaluation iterations", s.EvalIters}, {"evaluation batch size",
			s.EvalGlobalBatchSize},
		{"first evaluation", s.StartEvalAtIter}, {"iteration", s.Iteration},
	} {
		if option.value < 0 {
			return none, fmt.Errorf("%s: %d is negative; use 0 or more", option.name, option.value)
		}
	}
	if s.GlobalBatchSize == 0 {
		return none, errors.New("the global batch size is missing; give it")
	}
	if s.TrainSamples == 0 && s.TrainIters == 0 && !s.SkipTrain {
		return none, errors.New("the length of the training is missing; give its iterations or its samples")
	}
	var over error
	times := func(a, b int64) int64 {
		if a != 0 && b > math.MaxInt64/a {
			over = fmt.Errorf("%d times %d samples exceed the largest sample count", a, b)
			return 0
		}
		return a * b
	}
	iters, train := s.TrainIters, s.TrainSamples
	if train == 0 {
		train = times(iters, s.GlobalBatchSize)
	} else if iters == 0 {
		iters = train / s.GlobalBatchSize
	}

	evalBatch := s.EvalGlobalBatchSize
	if evalBatch == 0 {
		evalBatch = s.GlobalBatchSize
	}
	valid := Size{}
	switch {
	case s.FullValidation:
	case s.SkipTrain:
		valid = SizeOf(times(s.EvalIters, evalBatch))
	case s.EvalInterval == 0:
		valid = SizeOf(0)
	default:
		points := max(0, iters/s.EvalInterval+1-s.StartEvalAtIter/s.EvalInterval)
		valid = SizeOf(times(times(points, s.EvalIters), evalBatch))
	}
	test := SizeOf(times(s.EvalIters, evalBatch))

	if len(s.PhaseTransitions) > 0 {
		now, begin, end := times(s.Iteration, s.GlobalBatchSize), int64(0), train
		for _, iteration := range s.PhaseTransitions {
			if iteration < 0 {
				return none, fmt.Errorf("phase transition: iteration %d is negative; use 0 or more", iteration)
			}
			if at := times(iteration, s.GlobalBatchSize); at <= now {
				begin = max(begin, at)
			} else {
				end = min(end, at)
			}
		}
		if now >= train {
			return none, fmt.Errorf("iteration %d is after the end of the training, so it is in no phase", s.Iteration)
		}
		train = end - begin
	}
	return [3]Size{SizeOf(train), valid, test}, over
}
