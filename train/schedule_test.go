package train

import (
	"math"
	"testing"
)

func TestScheduleLearningRate(t *testing.T) {
	olmoe := Schedule{Peak: 4e-4, Min: 4e-5, Start: 0, Warmup: 4, Decay: 12}
	optimus := Schedule{Peak: 4e-4, Min: 4e-5, Start: 4e-5, Warmup: 4, Decay: 12}
	for _, test := range []struct {
		name     string
		schedule Schedule
		step     int64
		want     float64
	}{
		{"first step of a warm-up from zero", olmoe, 0, 1e-4},
		{"warm-up is linear", olmoe, 1, 2e-4},
		{"warm-up ends at the peak", olmoe, 3, 4e-4},
		{"first step of a warm-up from the minimum", optimus, 0, 4e-5 + 3.6e-4/4},
		{"which ends at the peak, too", optimus, 3, 4e-4},
		{"quarter of the cosine", olmoe, 5, 4e-5 + 3.6e-4*(1+math.Sqrt2/2)/2},
		{"half of the cosine", olmoe, 7, (4e-4 + 4e-5) / 2},
		{"last step", olmoe, 11, 4e-5},
		{"beyond the end", olmoe, 1000, 4e-5},
		{"no warm-up", Schedule{Peak: 1, Min: 0, Decay: 2}, 0, 0.5},
		{"only warm-up", Schedule{Peak: 1, Min: 0.5, Warmup: 2, Decay: 2}, 1, 1},
		{"warm-up longer than the decay", Schedule{Peak: 1, Min: 0.5, Warmup: 4, Decay: 2}, 2, 0.75},
	} {
		if got := test.schedule.LearningRate(test.step); math.Abs(got-test.want) > 1e-15 {
			t.Errorf("%s: step %d has learning rate %v, want %v", test.name, test.step, got, test.want)
		}
	}
}

// The schedule of OLMo (olmo/optim.py, CosWithWarmup), computed there with its own operations for steps counted from 1.
func TestScheduleOLMo(t *testing.T) {
	s := Schedule{Peak: 3e-4, Min: 3e-5, Warmup: 20, Decay: 200}
	for step := int64(1); step <= 220; step++ {
		var want float64
		switch {
		case step < 20:
			want = 3e-4 * float64(step) / 20
		case step >= 200:
			want = 3e-5
		default:
			want = 3e-5 + (3e-4-3e-5)*(1+math.Cos(math.Pi*float64(step-20)/180))/2
		}
		if got := s.LearningRate(step - 1); math.Abs(got-want) > 1e-18 {
			t.Errorf("step %d: %v, want %v", step, got, want)
		}
	}
}
