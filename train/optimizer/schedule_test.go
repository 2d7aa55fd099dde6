package optimizer

import (
	"encoding/json"
	"math"
	"os"
	"testing"

	"pgregory.net/rapid"
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

// The schedule of OLMo (olmo/optim.py, CosWithWarmup), computed there with its own operations for
// steps counted from 1.
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

// The schedules of transformers, where step t is our step t−1: theirs has a first step at a
// learning rate of 0.
func TestScheduleTransformers(t *testing.T) {
	data, err := os.ReadFile("testdata/schedules.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases []struct {
			Transformers string
			Schedule     Schedule
			Rates        []float64
		}
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	names := map[ScheduleName]int{}
	for _, c := range golden.Cases {
		names[c.Schedule.Name]++
		for step, want := range c.Rates[1:] {
			if got := c.Schedule.LearningRate(int64(step)); math.Abs(got-want) > 1e-18 {
				t.Errorf("%+v: step %d has learning rate %v, %s of transformers %v", c.Schedule, step, got,
					c.Transformers, want)
			}
		}
	}
	if names[Cosine] < 4 || names[Linear] < 4 || names[WSD] < 6 || names[Constant] < 2 {
		t.Errorf("cases %v", names)
	}
}

// After the end, and with a cooldown from the end of the warm-up.
func TestScheduleEdges(t *testing.T) {
	for _, test := range []struct {
		name     string
		schedule Schedule
		step     int64
		want     float64
	}{
		{"constant, far away", Schedule{Name: Constant, Peak: 2}, 1 << 50, 2},
		{"linear, beyond the end", Schedule{Name: Linear, Peak: 2, Min: 0.5, Decay: 4}, 9, 0.5},
		{"wsd, beyond the end", Schedule{Name: WSD, Peak: 2, Min: 0.5, Decay: 4, Cooldown: 2}, 4, 0.5},
		{"wsd without a stable part", Schedule{Name: WSD, Peak: 2, Warmup: 2, Decay: 6, Cooldown: 4}, 2, 1},
		{"its last step of the warm-up", Schedule{Name: WSD, Peak: 2, Warmup: 2, Decay: 6, Cooldown: 4}, 1, 2},
		{"its last step", Schedule{Name: WSD, Peak: 2, Warmup: 2, Decay: 6, Cooldown: 4}, 5, 0},
		{"a cooldown of one step", Schedule{Name: WSD, Peak: 2, Min: 0.5, Decay: 4, Cooldown: 1}, 2, 2},
		{"whose step has the minimum", Schedule{Name: WSD, Peak: 2, Min: 0.5, Decay: 4, Cooldown: 1}, 3, 0.5},
	} {
		if got := test.schedule.LearningRate(test.step); got != test.want {
			t.Errorf("%s: step %d has learning rate %v, want %v", test.name, test.step, got, test.want)
		}
	}
}

// Schedules that agree on these steps have the same learning rates there. WSD agrees with a longer
// WSD up to its decay.
func TestScheduleAgrees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) Schedule {
			s := Schedule{Name: rapid.SampledFrom([]ScheduleName{WSD, WSD, Constant, Cosine, Linear}).Draw(t, name),
				Peak: 1, Warmup: rapid.Int64Range(0, 2).Draw(t, "warm-up")}
			s.Min = rapid.SampledFrom([]float64{0, 0.25, 1}).Draw(t, "minimum")
			s.Start = rapid.SampledFrom([]float64{0, s.Min}).Draw(t, "start")
			if s.Name != Constant {
				s.Decay = s.Warmup + rapid.Int64Range(1, 12).Draw(t, "decay")
			}
			if s.Name == WSD {
				s.Cooldown = rapid.Int64Range(1, s.Decay-s.Warmup).Draw(t, "cooldown")
				s.CooldownForm = rapid.SampledFrom([]CooldownForm{CooldownOneMinusSqrt, CooldownLinear}).Draw(t, "form")
			}
			return s
		}
		a, b, steps := draw("one"), draw("other"), rapid.Int64Range(0, 20).Draw(t, "steps")
		if a.Agrees(b, steps) {
			for step := range steps {
				if x, y := a.LearningRate(step), b.LearningRate(step); x != y {
					t.Fatalf("%+v and %+v agree on %d steps, but step %d has %v and %v", a, b, steps, step, x, y)
				}
			}
		}
		longer := a
		longer.Decay += 5
		if want := a.Name == WSD && steps <= a.Decay-a.Cooldown; a.Agrees(longer, steps) != want ||
			!a.Agrees(a, steps) {
			t.Fatalf("%+v on %d steps: agrees with itself made longer: %v; with itself: %v", a, steps, !want,
				a.Agrees(a, steps))
		}
	})
}
