package train

import (
	"strings"
	"testing"

	"mula/train/optimizer"
)

// What resolve makes of the fields of a schedule, and what does not fit together.
func TestScheduleResolve(t *testing.T) {
	for _, test := range []struct {
		yaml string
		want optimizer.Schedule
		err  string
	}{
		{"{}", optimizer.Schedule{Name: optimizer.Cosine, Peak: 4e-4, Min: 4e-5, Warmup: 20, Decay: 200}, ""},
		{"{name: linear}", optimizer.Schedule{Name: optimizer.Linear, Peak: 4e-4, Warmup: 20, Decay: 200}, ""},
		{"{name: constant}", optimizer.Schedule{Name: optimizer.Constant, Peak: 4e-4, Warmup: 20}, ""},
		{"{name: wsd}", optimizer.Schedule{Name: optimizer.WSD, Peak: 4e-4, Warmup: 20, Decay: 200, Cooldown: 40,
			CooldownForm: optimizer.CooldownOneMinusSqrt}, ""},
		{"{name: wsd, warmup_steps: 190, cooldown: linear}",
			optimizer.Schedule{Name: optimizer.WSD, Peak: 4e-4, Warmup: 190, Decay: 200,
				Cooldown: 10, CooldownForm: optimizer.CooldownLinear}, ""},
		{"{name: wsd, decay_steps: 1000, warmup_from: min, min_learning_rate: 1e-5}",
			optimizer.Schedule{Name: optimizer.WSD, Peak: 4e-4, Min: 1e-5, Start: 1e-5, Warmup: 100, Decay: 1000,
				Cooldown:     200,
				CooldownForm: optimizer.CooldownOneMinusSqrt}, ""},
		{"{warmup_steps: 200}",
			optimizer.Schedule{Name: optimizer.Cosine, Peak: 4e-4, Min: 4e-5, Warmup: 200, Decay: 200}, ""},
		{"{warmup_steps: 201}", optimizer.Schedule{},
			"schedule.warmup_steps is 201, but schedule.decay_steps is 200, so schedule.learning_rate would never " +
				"be reached"},
		{"{name: constant, warmup_steps: 201}", optimizer.Schedule{}, "schedule.warmup_steps is 201, but steps is 200"},
		{"{name: wsd, warmup_steps: 50, cooldown_steps: 151}", optimizer.Schedule{},
			"schedule.cooldown_steps is 151, but schedule.warmup_steps of 50 leaves 150 of schedule.decay_steps"},
		{"{name: wsd, warmup_steps: 200}", optimizer.Schedule{},
			"schedule.warmup_steps is 200, which leaves no steps of schedule.decay_steps for the cooldown"},
	} {
		c, err := ParseConfig([]byte("schedule: "+test.yaml+"\n"), "train.yaml")
		if err != nil {
			t.Errorf("%s: %v", test.yaml, err)
			continue
		}
		err = c.Schedule.Resolve(200)
		if test.err != "" {
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("%s: error %v, want %q", test.yaml, err, test.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", test.yaml, err)
		} else if got := c.Schedule.Schedule(); got != test.want {
			t.Errorf("%s: %+v, want %+v", test.yaml, got, test.want)
		}
	}
}
