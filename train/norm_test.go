package train

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"mula/train/checkpoint"
	"mula/train/estimate"
)

// With layout.norm: reduce, schemes and stages change no bit, and norms and update ratios agree
// with the values of gather within rounding.
func TestReduceNorms(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	run := func(l LayoutConfig, norm Norms) (Result, []map[string]any) {
		c := ranksConfig(t, plan, l, "steps: 3\nevaluate: {every: 0}\nlog: {update_ratio_every: 2}\n")
		c.Layout.Norm = norm
		r := mustRun(t, c, Options{})
		var steps []map[string]any
		for _, line := range metricsOf(t, c.Output) {
			if line["grad_norm"] != nil {
				steps = append(steps, line)
			}
		}
		return r, steps
	}
	_, want := run(LayoutConfig{DP: 2, EP: 2}, gatherNorms)
	var weights string
	for _, l := range []LayoutConfig{{DP: 2, EP: 2}, {DP: 2, EP: 2, Optimizer: estimate.SO}, {DP: 2, PP: 2, EP: 2}} {
		r, steps := run(l, reduceNorms)
		if weights == "" {
			weights = r.Weights
		}
		if r.Weights != weights || len(steps) != 3 {
			t.Errorf("%+v: weights %.16s…, with the first layout %.16s…; %d steps", l, r.Weights, weights, len(steps))
		}
		differs := func(a, b any) bool {
			x, _ := a.(json.Number).Float64()
			y, _ := b.(json.Number).Float64()
			return !(math.Abs(x/y-1) < 1e-5)
		}
		for i, m := range steps {
			if differs(m["grad_norm"], want[i]["grad_norm"]) {
				t.Errorf("%+v, step %d: norm %v, with gather %v", l, i, m["grad_norm"], want[i]["grad_norm"])
			}
			got, _ := m["update_ratio"].(map[string]any)
			ratios, _ := want[i]["update_ratio"].(map[string]any)
			if len(got) != len(ratios) || i == 0 && len(got) == 0 {
				t.Errorf("%+v, step %d: ratios of %d groups, with gather %d", l, i, len(got), len(ratios))
			}
			for group, ratio := range ratios {
				if differs(got[group], ratio) {
					t.Errorf("%+v, step %d: ratio of %s %v, with gather %v", l, i, group, got[group], ratio)
				}
			}
		}
		saved, _, err := checkpoint.Find(t.Context(), r.Checkpoint)
		if err != nil || !strings.HasSuffix(saved.State.Arithmetic, ", exact norms") {
			t.Errorf("the arithmetic is %q: %v", saved.State.Arithmetic, err)
		}
	}
}
