package megatron

import (
	"strings"
	"testing"
)

func TestSchedule(t *testing.T) {
	for _, c := range []struct {
		name string
		s    Schedule
		want [3]Size
		err  string
	}{
		{"usual", Schedule{TrainIters: 100, GlobalBatchSize: 8, EvalInterval: 30, EvalIters: 10},
			[3]Size{SizeOf(800), SizeOf(320), SizeOf(80)}, ""},
		{"samples", Schedule{TrainSamples: 805, GlobalBatchSize: 8, EvalInterval: 30, EvalIters: 10},
			[3]Size{SizeOf(805), SizeOf(320), SizeOf(80)}, ""},
		{"samples and iterations", Schedule{TrainSamples: 805, TrainIters: 60, GlobalBatchSize: 8, EvalInterval: 30,
			EvalIters: 10}, [3]Size{SizeOf(805), SizeOf(240), SizeOf(80)}, ""},
		{"no evaluation", Schedule{TrainIters: 100, GlobalBatchSize: 8}, [3]Size{SizeOf(800), SizeOf(0), SizeOf(0)},
			""},
		{"no interval", Schedule{TrainIters: 100, GlobalBatchSize: 8, EvalIters: 10}, [3]Size{SizeOf(800), SizeOf(0),
			SizeOf(80)}, ""},
		{"late", Schedule{TrainIters: 100, GlobalBatchSize: 8, EvalInterval: 30, EvalIters: 10, StartEvalAtIter: 65},
			[3]Size{SizeOf(800), SizeOf(160), SizeOf(80)}, ""},
		{"too late", Schedule{TrainIters: 100, GlobalBatchSize: 8, EvalInterval: 30, EvalIters: 10,
			StartEvalAtIter: 650}, [3]Size{SizeOf(800), SizeOf(0), SizeOf(80)}, ""},
		{"full", Schedule{TrainIters: 100, GlobalBatchSize: 8, EvalInterval: 30, EvalIters: 10, FullValidation: true},
			[3]Size{SizeOf(800), {}, SizeOf(80)}, ""},
		{"no training", Schedule{TrainIters: 100, GlobalBatchSize: 8, EvalInterval: 30, EvalIters: 10, SkipTrain: true},
			[3]Size{SizeOf(800), SizeOf(80), SizeOf(80)}, ""},
		{"other batch", Schedule{TrainIters: 100, GlobalBatchSize: 8, EvalInterval: 30, EvalIters: 10,
			EvalGlobalBatchSize: 4}, [3]Size{SizeOf(800), SizeOf(160), SizeOf(40)}, ""},
		{"first phase", Schedule{TrainIters: 22208, GlobalBatchSize: 208, PhaseTransitions: []int64{13794}},
			[3]Size{SizeOf(13794 * 208), SizeOf(0), SizeOf(0)}, ""},
		{"second phase", Schedule{TrainIters: 22208, GlobalBatchSize: 208, PhaseTransitions: []int64{13794},
			Iteration: 13794}, [3]Size{SizeOf((22208 - 13794) * 208), SizeOf(0), SizeOf(0)}, ""},
		{"no batch", Schedule{TrainIters: 100}, [3]Size{}, "global batch size is missing"},
		{"no length", Schedule{GlobalBatchSize: 8}, [3]Size{}, "length of the training is missing"},
		{"negative", Schedule{TrainIters: -1, GlobalBatchSize: 8}, [3]Size{}, "train iterations: -1 is negative"},
		{"negative phase", Schedule{TrainIters: 1, GlobalBatchSize: 8, PhaseTransitions: []int64{-1}}, [3]Size{},
			"iteration -1 is negative"},
		{"past the end", Schedule{TrainIters: 5, GlobalBatchSize: 8, PhaseTransitions: []int64{2}, Iteration: 5},
			[3]Size{}, "after the end"},
		{"too many", Schedule{TrainIters: 1 << 40, GlobalBatchSize: 1 << 40}, [3]Size{},
			"exceed the largest sample count"},
	} {
		got, err := c.s.Samples()
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v; want %q", c.name, err, c.err)
			}
		} else if err != nil || got != c.want {
			t.Errorf("%s: %v, error %v; want %v", c.name, got, err, c.want)
		}
	}
}
