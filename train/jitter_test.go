package train

import (
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/train/estimate"
)

// jittered is a model with noise in training.
const jittered = "model: {preset: mula-nano, num_hidden_layers: 2, router_jitter_noise: 0.2}\n" +
	"aux_loss: {form: global}\nsteps: 4\nevaluate: {every: 4, samples: 5}\n"

// The noise of routers does not depend on micro-batches and layouts: losses are one rank's up to
// rounding. A resumed run has the bits of an uninterrupted one, and evaluation has no noise.
func TestRouterJitter(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	config := func(l LayoutConfig, more string) Config { return ranksConfig(t, plan, l, jittered+more) }
	one := config(LayoutConfig{}, "")
	want := mustRunRanks(t, one, Options{})
	quiet := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, strings.Replace(jittered,
		", router_jitter_noise: 0.2", "", 1)), Options{})
	if d := apart(t, want.lines, quiet.lines, "loss"); d < 1e-5 {
		t.Errorf("with noise, losses differ by %v from losses without", d)
	}
	layouts := []LayoutConfig{{DP: 2, EP: 2}, {DP: 2, EP: 1, TP: 2, Optimizer: estimate.SO}, {DP: 2, EP: 1, CP: 2},
		{DP: 1, EP: 2, PP: 2}, {DP: 1, EP: 1, PP: 2, VirtualStages: 1}}
	for _, l := range layouts[:longtest.Rounds(1, len(layouts))] {
		got := mustRunRanks(t, config(l, "recompute: layers\n"), Options{})
		for name, most := range map[string]float64{"loss": 1e-6, "grad_norm": 1e-5, "aux_loss": 1e-5} {
			if d := apart(t, want.lines, got.lines, name); d > most {
				t.Errorf("%+v: %s differs from one rank's by %v, at most %v is allowed", l, name, d, most)
			}
		}
	}
	single := mustRunRanks(t, config(LayoutConfig{}, "micro_batch_size: 1\n"), Options{})
	if d := apart(t, want.lines, single.lines, "loss"); d > 1e-6 {
		t.Errorf("with other micro-batches, the loss differs by %v", d)
	}
	stopped := config(LayoutConfig{}, "")
	mustRun(t, stopped, stopAfter(2))
	if resumed := mustRun(t, stopped, Options{}); resumed.Weights != want.Weights {
		t.Error("a resumed run has other weights")
	}
	sameRun(t, "a resumed run", one.Output, stopped.Output)

	// the same weights have one validation loss, with and without noise in training
	evaluated := func(noise string) float64 {
		c := ranksConfig(t, plan, LayoutConfig{}, strings.NewReplacer("0.2", noise, "steps: 4", "steps: 1",
			"every: 4", "every: 1").Replace(jittered)+
			"schedule: {name: constant, learning_rate: 1.0e-30, warmup_steps: 0}\n")
		mustRun(t, c, Options{})
		for _, line := range metricsOf(t, c.Output) {
			if loss, ok := number(line, "eval.loss"); ok {
				return loss
			}
		}
		t.Fatal("no evaluation")
		return 0
	}
	if a, b := evaluated("0.2"), evaluated("0"); a != b {
		t.Errorf("validation losses %v with noise in training and %v without", a, b)
	}
	for config, want := range map[string]string{
		"model: {preset: auroragpt-7b, router_jitter_noise: 0.1}\n": "model.router_jitter_noise",
		"model: {preset: mula-nano, router_jitter_noise: 1.1}\n":    "model.router_jitter_noise",
	} {
		c := testConfig(t, plan, config)
		if _, err := Run(t.Context(), c, Options{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %s", config, err, want)
		}
	}
}
