package train

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/train/estimate"
	"mula/train/optimizer"
	"mula/train/rundir"
)

const groupsYAML = `optimizer:
  groups:
    - {match: [norms, biases, embedding], weight_decay: 0}
    - {match: [router], learning_rate_scale: 0}
    - {match: ["model.layers.*.mlp.experts.*.down_proj.weight"], weight_decay: 0.5, learning_rate_scale: 0.5}
`

// What is wrong with groups is said with file, line and what is right.
func TestGroupsErrors(t *testing.T) {
	for groups, want := range map[string]string{
		"[{match: [embeddings], weight_decay: 0}]": `train.yaml:3: optimizer.groups[0].match[0] is "embeddings", which is neither a class nor a pattern of parameter names; did you mean "embedding"?`,
		"[{match: [norms]}, {match: [moments]}]":   `optimizer.groups[1].match[0] is "moments", which is neither a class nor a pattern`,
		"[{match: [zzzzzzzz]}]": "known are embedding, head, norms, biases, attention, " +
			"router, experts, feed_forward, matrices",
		`[{match: ["model.layers.0.mlp.router.weight"]}]`: `is "model.layers.0.mlp.router.weight", which matches no parameter of the model; did you mean "model.layers.*.mlp.gate.weight"?`,
		`[{match: ["model.layers.7.mlp.gate.weight"]}]`:   `is "model.layers.7.mlp.gate.weight", which matches no parameter of the model; did you mean "model.layers.*.mlp.gate.weight"?`,
		`[{match: ["*.bias"]}]`:                           `is "*.bias", which matches no parameter of the model`,
		`[{match: ["[a.b"]}]`:                             `is "[a.b", which is not a valid pattern`,
		`[{match: ["*"]}, {match: [norms]}]`:              `optimizer.groups[1].match[0] is "norms", but earlier groups contain all parameters that it matches; move this group before them`,
		"[{match: []}]": "optimizer.groups[0] has no match; list classes " +
			"(embedding, head,",
		"[{weight_decay: 0}]":                  "optimizer.groups[0] has no match",
		"[{match: [norms], weight_decay: -1}]": "optimizer.groups[0].weight_decay is -1; must be 0 or more",
		"[{match: [norms], learning_rate_scale: -0.5}]": "optimizer.groups[0].learning_rate_scale is -0.5; must " +
			"be 0 or more",
		"[{match: [norms], learning_rate_scale: .inf}]": "optimizer.groups[0].learning_rate_scale is .inf; it " +
			"must be a finite number",
		"[{match: [norms], learning_rate: 0.1}]": `train.yaml:3: unknown field "learning_rate"`,
		"{match: [norms]}":                       "train.yaml:3",
	} {
		_, err := ParseConfig([]byte("model: {preset: mula-nano}\noptimizer:\n  groups: "+groups+"\n"), "train.yaml")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", groups, err, want)
		}
	}
	// Classes without parameters are no mistake: the same groups go with a dense model.
	if _, err := ParseConfig([]byte("model: {preset: mula-1b}\noptimizer: {groups: [{match: [norms, biases, "+
		"experts, router], weight_decay: 0}]}\n"), "train.yaml"); err != nil {
		t.Error(err)
	}
}

// In a run, weights of a group without learning rate stay what they were, those without decay do
// not shrink, and a group that changes no setting changes no bit. The summary counts every weight
// once.
func TestGroupsRun(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	var summary Summary
	run := func(more string) runOutcome {
		return mustRunRanks(t, testConfig(t, plan, crashConfig+"steps: 4\nevaluate: {every: 0}\n"+more),
			Options{Report: func(s Summary) { summary = s }})
	}
	plain := run("optimizer: {}\n")
	if summary.Groups != nil {
		t.Errorf("groups %v", summary.Groups)
	}
	same := run("optimizer: {groups: [{match: [norms, router], weight_decay: 0.1, learning_rate_scale: 1}, {match: " +
		"[\"*.q_proj.weight\"]}]}\n")
	if same.Weights != plain.Weights {
		t.Errorf("groups with the settings of the optimizer give the weights %.16s…, none %.16s…", same.Weights,
			plain.Weights)
	}
	if empty := run("optimizer: {groups: []}\n"); empty.Weights != plain.Weights {
		t.Error("an empty list of groups changes the weights")
	}
	got := run(groupsYAML)
	var all int64
	for _, g := range summary.Groups {
		all += g.Parameters
	}
	if want := []string{"router"}; len(summary.Groups) != 4 || !slices.Equal(summary.Groups[1].Match, want) ||
		all != summary.Parameters || summary.Groups[3].Match != nil {
		t.Errorf("groups %+v of %d parameters", summary.Groups, summary.Parameters)
	}
	c := testConfig(t, plan, crashConfig)
	began, err := moe.New(c.Model.Config, device(t, 1))
	if err != nil {
		t.Fatal(err)
	}
	began.Init(0)
	for _, p := range began.Parameters() {
		frozen := strings.HasSuffix(p.Name, ".mlp.gate.weight")
		if slices.Equal(got.weights[p.Name], p.Weight.Floats()) != frozen {
			t.Errorf("%s: unchanged is %v", p.Name, !frozen)
		}
		if slices.Equal(got.weights[p.Name], plain.weights[p.Name]) {
			t.Errorf("%s has the weights of a run without groups", p.Name)
		}
	}
}

// With groups, the three schemes and stages of a pipeline give the same bits, and other dp and ep
// the same within rounding.
func TestGroupsLayouts(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = "steps: 5\nevaluate: {every: 0}\n"
	one := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, groupsYAML+more), Options{})
	for _, axes := range [][2]int{{4, 1}, {2, 2}, {1, 4}, {1, 1}} {
		first := ""
		for _, scheme := range schemes {
			for pp := 1; pp <= 2; pp++ {
				l := LayoutConfig{DP: axes[0], EP: axes[1], PP: pp, Optimizer: scheme}
				if scheme != estimate.EPSO && (axes != [2]int{2, 2} || pp == 2) || l.DP*l.EP == 1 && pp == 1 {
					continue
				}
				got := mustRunRanks(t, ranksConfig(t, plan, l, groupsYAML+more), Options{})
				if first == "" {
					first = got.Weights
				}
				if got.Weights != first || l.DP*l.EP == 1 && got.Weights != one.Weights {
					t.Errorf("%s: weights %.16s…, want %.16s…", l, got.Weights, first)
				}
				if d := apart(t, one.lines, got.lines, "loss"); d > 1e-6 {
					t.Errorf("%s: losses differ from the losses of one rank by %v", l, d)
				}
			}
		}
	}
}

// A run with groups resumes without a difference, in another layout, too. With other groups it is
// refused, as with another learning rate.
func TestGroupsResume(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, name := range []optimizer.Name{optimizer.AdamW, optimizer.Muon} {
		more := crashConfig + strings.Replace(groupsYAML, "optimizer:", fmt.Sprintf("optimizer:\n  name: %s", name),
			1) + "evaluate: {every: 0}\ncheckpoint: {every: 0}\n"
		want := mustRun(t, testConfig(t, plan, more+"layout: {expert_dp: 2}\n"), Options{})
		c := testConfig(t, plan, more+"layout: {expert_dp: 2}\n")
		mustRun(t, c, stopAfter(3))
		written, err := LoadConfig(c.Output + "/" + rundir.ConfigFile)
		if err != nil || len(written.Optimizer.Groups) != 3 || *written.Optimizer.Groups[2].WeightDecay != 0.5 ||
			written.Optimizer.Groups[2].Match[0] != c.Optimizer.Groups[2].Match[0] {
			t.Errorf("%s in the run directory has the groups %+v, %v", rundir.ConfigFile, written.Optimizer.Groups, err)
		}
		for text, change := range map[string]func(o *optimizer.Config){
			"optimizer.groups was [{": func(o *optimizer.Config) { o.Groups = nil },
			`and is now [{"match":["norms","biases","embedding"],"weight_decay":0}]`: func(o *optimizer.Config) { o.Groups = o.Groups[:1] },
		} {
			other := c
			change(&other.Optimizer)
			if _, err := Run(context.Background(), other, Options{}); err == nil ||
				!strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v", text, err)
			}
		}
		if got := mustRun(t, c, Options{}); got.Weights != want.Weights || got.Resumed == "" {
			t.Errorf("%s: weights %.16s… after a stop, %.16s… without", name, got.Weights, want.Weights)
		}
	}
	// A checkpoint without groups does not resume with groups.
	c := testConfig(t, plan, crashConfig)
	mustRun(t, c, stopAfter(3))
	c.Optimizer.Groups = []optimizer.ParameterGroup{{Match: []string{"norms"}, WeightDecay: new(0.0)}}
	if _, err := Run(context.Background(), c, Options{}); err == nil ||
		!strings.Contains(err.Error(), "optimizer.groups was not set and is now [{") {
		t.Error(err)
	}
}
