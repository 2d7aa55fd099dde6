package train

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/train/estimate"
	"mula/train/group"
	"mula/xpu/comm"
)

// limited is a model whose experts have a capacity in training.
const limited = "model: {preset: mula-nano, num_hidden_layers: 2, expert_capacity_factor: 0.8}\n" +
	"aux_loss: {form: global}\nsteps: 4\nevaluate: {every: 4, samples: 5}\n"

// Dropped choices do not depend on micro-batches and layouts: losses are one rank's up to rounding.
// A resumed run has the bits of an uninterrupted one.
func TestCapacity(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	config := func(l LayoutConfig, more string) Config { return ranksConfig(t, plan, l, limited+more) }
	one := config(LayoutConfig{}, "")
	want := mustRunRanks(t, one, Options{})
	unlimited := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, strings.Replace(limited,
		", expert_capacity_factor: 0.8", "", 1)), Options{})
	if d := apart(t, want.lines, unlimited.lines, "loss"); d < 1e-5 {
		t.Errorf("with drops, losses differ by %v from losses without", d)
	}
	compare := func(what string, got runOutcome) {
		t.Helper()
		for name, most := range map[string]float64{"loss": 1e-6, "grad_norm": 1e-5, "aux_loss": 1e-5} {
			if d := apart(t, want.lines, got.lines, name); d > most {
				t.Errorf("%s: %s differs from one rank's by %v, at most %v is allowed", what, name, d, most)
			}
		}
		if a, b := dropped(t, want), dropped(t, got); len(a) != 4*2 || len(b) != len(a) {
			t.Errorf("%s: dropped choices %v, want %v", what, b, a)
		} else {
			for i := range a {
				if math.Abs(a[i]-b[i]) > 1e-12 || a[i] < 0.01 || a[i] > 0.9 {
					t.Errorf("%s: dropped choices %v, want %v", what, b, a)
				}
			}
		}
	}
	layouts := []LayoutConfig{{DP: 2, EP: 2}, {DP: 2, EP: 1, TP: 2, Optimizer: estimate.SO}, {DP: 2, EP: 1, CP: 2},
		{DP: 1, EP: 2, PP: 2}, {DP: 1, EP: 1, PP: 2, VirtualStages: 1}}
	for _, l := range layouts[:longtest.Rounds(1, len(layouts))] {
		compare(fmt.Sprintf("%+v", l), mustRunRanks(t, config(l, "recompute: layers\n"), Options{}))
	}
	compare("other micro-batches", mustRunRanks(t, config(LayoutConfig{}, "micro_batch_size: 1\n"), Options{}))
	stopped := config(LayoutConfig{}, "")
	mustRun(t, stopped, stopAfter(2))
	if resumed := mustRun(t, stopped, Options{}); resumed.Weights != want.Weights {
		t.Error("a resumed run has other weights")
	}
	sameRun(t, "a resumed run", one.Output, stopped.Output)
	for config, want := range map[string]string{
		"model: {preset: auroragpt-7b, expert_capacity_factor: 1}\n": "model.expert_capacity_factor",
		"model: {preset: mula-nano, expert_capacity_factor: -1}\n":   "model.expert_capacity_factor",
		"model: {preset: mula-nano, expert_capacity_factor: .inf}\n": "model.expert_capacity_factor",
	} {
		c, err := ParseConfig([]byte("plan: "+plan+"\noutput: "+t.TempDir()+"/run\nsteps: 2\n"+
			"schedule: {learning_rate: 0.001}\n"+config), "train.yaml")
		if err == nil {
			_, err = Run(t.Context(), c, Options{})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %s", config, err, want)
		}
	}
}

// dropped returns the dropped choices in the lines of the steps.
func dropped(t *testing.T, o runOutcome) (list []float64) {
	t.Helper()
	for _, line := range o.lines {
		values, _ := line["dropped_choices"].([]any)
		for _, v := range values {
			x, err := v.(json.Number).Float64()
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, x)
		}
	}
	return list
}

// Ranks that share sequences exchange the bytes of the estimate. The memory of a rank is the
// estimate's, without drops.
func TestCapacityCosts(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	path := makePlan(t, t.TempDir(), "plan.json", "")
	plan := mustPlan(t, path)
	for _, l := range []LayoutConfig{{DP: 2, EP: 1, CP: 2}, {DP: 2, EP: 1, CP: 2, PP: 2},
		{DP: 2, EP: 1, TP: 2, CP: 2}} {
		for _, form := range []moe.AuxForm{moe.AuxHF, moe.AuxGlobal} {
			c := ranksConfig(t, path, l, limited+"micro_batch_size: 1\n")
			c.AuxLoss.Form, c.Evaluate.Every = form, new(int64(0))
			var mu sync.Mutex
			sent := int64(0)
			mustRun(t, c, Options{ended: func(r *group.Group) {
				mu.Lock()
				defer mu.Unlock()
				sent += r.Sequence.Traffic()[comm.OpAllGather].Bytes()
			}})
			in, err := c.EstimateInput(plan, simulatedMachine())
			if err != nil {
				t.Fatal(err)
			}
			r, err := estimate.Compute(in)
			if err != nil {
				t.Fatal(err)
			}
			found := false
			for _, e := range r.Traffic { // of a stage; both have as many layers
				if e.Purpose == estimate.ForSequences && e.Operation == comm.OpAllGather {
					sent -= c.Steps * e.Total * int64(c.Layout.Ranks()/e.Ranks)
					found = true
				}
			}
			if sent != 0 || !found {
				t.Errorf("%+v, %s: %d bytes more than the estimate", l, form, sent)
			}
		}
	}
	for i, l := range []LayoutConfig{{DP: 1, EP: 1}, {DP: 1, EP: 2}, {DP: 2, EP: 1, CP: 2}, {DP: 1, EP: 1, PP: 2}} {
		for j, recompute := range moe.Recomputes() {
			c := ranksConfig(t, path, l, fmt.Sprintf("steps: 2\nrecompute: %s\n", recompute))
			c.Model.ExpertCapacity, c.Layout.UniformRouting = 1, true
			c.Layout.Dispatch = []moe.Dispatch{moe.AllToAll, moe.AllGather}[(i+j)%2]
			measureMemory(t, c)
		}
	}
}
