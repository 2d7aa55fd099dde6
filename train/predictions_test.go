package train

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/moe"
	"mula/train/estimate"
)

// predicting is a model with a layer of multi-token prediction.
const predicting = "model: {preset: mula-nano, model_type: deepseek_v3, num_hidden_layers: 2, dense_layers: '0', " +
	"dense_intermediate_size: 48, shared_expert_intermediate_size: 32, norm_topk_prob: true, q_lora_rank: 16, " +
	"kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8, rope_interleave: true, " +
	"num_nextn_predict_layers: 1}\naux_loss: {form: sequence}\nsteps: 4\nevaluate: {every: 0}\n"

// predictingStages is a model for several stages, with two layers of multi-token prediction.
const predictingStages = "model: {preset: mula-nano, model_type: deepseek_v3, num_hidden_layers: 5, " +
	"dense_layers: '0', dense_intermediate_size: 48, shared_expert_intermediate_size: 32, norm_topk_prob: true, " +
	"q_lora_rank: 16, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8, " +
	"rope_interleave: true, num_nextn_predict_layers: 2}\n"

// predictionLosses returns the loss of the layer of multi-token prediction in each step of a run.
func predictionLosses(t *testing.T, c Config) (all []float64) {
	t.Helper()
	for _, line := range metricsOf(t, c.Output) {
		if list, ok := line["prediction_loss"].([]any); ok && len(list) == 1 {
			loss, err := list[0].(json.Number).Float64()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, loss)
		}
	}
	return all
}

// A layer of multi-token prediction learns, without a change of the other losses' meaning. Layouts
// have the losses of one rank up to rounding, schemes change no bit, and a run that is stopped and
// resumes in another layout has the bits of an uninterrupted run on the last layout.
func TestPredictions(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	config := func(l LayoutConfig) Config { return ranksConfig(t, plan, l, predicting) }
	one := config(LayoutConfig{})
	want := mustRunRanks(t, one, Options{})
	losses := predictionLosses(t, one)
	if n := len(losses); n != 4 || losses[3] >= losses[0] || losses[0] < 5 || losses[0] > 8 {
		t.Fatalf("losses of multi-token prediction %v", losses)
	}
	layouts := []LayoutConfig{{DP: 1, EP: 2}, {DP: 2, EP: 2, TP: 2, Optimizer: estimate.SO}, {DP: 2, EP: 1, CP: 2},
		{DP: 2, EP: 2, TP: 2}, {DP: 2, EP: 2, TP: 2, Optimizer: estimate.Unsharded}, {DP: 4, EP: 1}}
	same := map[LayoutConfig]string{}
	for _, l := range layouts[:longtest.Rounds(1, len(layouts))] {
		c := config(l)
		got := mustRunRanks(t, c, Options{})
		for name, most := range map[string]float64{"loss": 1e-6, "grad_norm": 1e-5, "aux_loss": 1e-5} {
			if d := apart(t, want.lines, got.lines, name); d > most {
				t.Errorf("%+v: %s differs from one rank's by %v, at most %v is allowed", l, name, d, most)
			}
		}
		for step, loss := range predictionLosses(t, c) {
			if d := loss/losses[step] - 1; d > 1e-6 || d < -1e-6 {
				t.Errorf("%+v: step %d: loss of multi-token prediction %v, want %v", l, step, loss, losses[step])
			}
		}
		l.Optimizer = ""
		if weights, ok := same[l]; ok && weights != got.Weights {
			t.Errorf("%+v: weights differ with the scheme", l)
		}
		same[l] = got.Weights
	}
	stopped := config(LayoutConfig{})
	mustRun(t, stopped, stopAfter(2))
	resumed := mustRun(t, stopped, Options{})
	sameRun(t, "a resumed run", one.Output, stopped.Output)
	if resumed.Weights != want.Weights {
		t.Error("a resumed run has other weights")
	}
}

// Checkpoints move between layouts, precisions and optimizers with all moments, and export has the
// layers under their published names.
func TestPredictionCheckpoints(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for name, test := range map[string]struct {
		more     string
		from, to LayoutConfig
	}{
		"fp32": {"", LayoutConfig{DP: 1, EP: 2}, LayoutConfig{DP: 2, EP: 1, TP: 2}},
		"bf16": {"precision: bf16_mixed\n", LayoutConfig{DP: 1, EP: 2, PP: 2}, LayoutConfig{DP: 2, EP: 1, TP: 2}},
		"compact": {"precision: bf16_compact\nactivations: bf16\n", LayoutConfig{DP: 1, EP: 2},
			LayoutConfig{DP: 2, EP: 1, TP: 2, PP: 2}},
		"muon":      {"optimizer: {name: muon}\n", LayoutConfig{DP: 1, EP: 2, PP: 2}, LayoutConfig{DP: 2, EP: 1}},
		"recompute": {"recompute: layers\nmicro_batch_size: 1\n", LayoutConfig{}, LayoutConfig{DP: 1, EP: 2, PP: 2}},
	} {
		more := test.more
		c := ranksConfig(t, plan, test.from, predicting+more)
		mustRunRanks(t, c, stopAfter(2))
		before := metricsOf(t, c.Output)
		c.Layout = ranksConfig(t, plan, test.to, predicting+more).Layout
		mustRunRanks(t, c, Options{})
		whole := ranksConfig(t, plan, test.to, predicting+more)
		mustRunRanks(t, whole, Options{})
		most := 1e-6
		if strings.HasPrefix(more, "precision") {
			most = 1e-2
		}
		a, b := predictionLosses(t, c), predictionLosses(t, whole)
		if len(before) == 0 || len(a) != 4 || len(b) != 4 {
			t.Fatalf("%s: losses %v and %v", name, a, b)
		}
		for step := range a {
			if d := a[step]/b[step] - 1; d > most || d < -most {
				t.Errorf("%s: step %d: loss %v after a change of the layout, %v without", name, step, a[step], b[step])
			}
		}
	}
}

// The stages of a pipeline change no bit of weights and losses, with layers of multi-token
// prediction, all levels of recomputation, precisions, documents, fewer micro-batches than stages,
// and ranks that share experts, sequences or matrices. A run that is stopped resumes with other
// stages without a difference. A device with memory of its own changes no bit either.
func TestPredictionsOfStages(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", unevenSkips)
	const often = "steps: 6\nevaluate: {every: 3, samples: 5}\nmicro_batch_size: 1\n"
	tests := []struct {
		more    string
		layouts []LayoutConfig // the first one has no stages
		resumes LayoutConfig   // after some steps of the last layout
	}{
		{"", []LayoutConfig{{DP: 1, EP: 1}, {DP: 1, EP: 1, PP: 2, VirtualStages: 2}},
			LayoutConfig{DP: 1, EP: 1, PP: 3}},
		{"recompute: layers\n", []LayoutConfig{{DP: 1, EP: 2}, {DP: 1, EP: 2, PP: 2}, {DP: 1, EP: 2, PP: 3},
			{DP: 1, EP: 2, PP: 2, VirtualStages: 2}, {DP: 1, EP: 2, PP: 5, Optimizer: estimate.SO}},
			LayoutConfig{DP: 1, EP: 2, PP: 2}},
		{"precision: bf16_mixed\nrecompute: experts\n", []LayoutConfig{{DP: 2, EP: 1, TP: 2},
			{DP: 2, EP: 1, TP: 2, PP: 2}}, LayoutConfig{DP: 2, EP: 1, TP: 2}},
		{"precision: bf16_compact\nactivations: bf16\n", []LayoutConfig{{DP: 2, EP: 1}, {DP: 2, EP: 1, PP: 2}},
			LayoutConfig{DP: 2, EP: 1, PP: 3}},
		{"optimizer: {name: sophiag, hessian_every: 2}\n", []LayoutConfig{{DP: 2, EP: 1}, {DP: 2, EP: 1, PP: 2}},
			LayoutConfig{DP: 2, EP: 1, PP: 3}},
		{"attention: documents\nprecision: bf16\n", []LayoutConfig{{DP: 2, EP: 1, CP: 2},
			{DP: 2, EP: 1, CP: 2, PP: 2, VirtualStages: 2}}, LayoutConfig{DP: 2, EP: 1, CP: 2}},
		{"aux_loss: {form: global}\nattention: documents\n", []LayoutConfig{{DP: 2, EP: 2},
			{DP: 2, EP: 2, PP: 2}, {DP: 2, EP: 2, PP: 2, VirtualStages: 2, Optimizer: estimate.Unsharded}},
			LayoutConfig{DP: 2, EP: 2, PP: 3}},
	}
	for _, test := range tests[:longtest.ShortRounds(1, longtest.Rounds(3, len(tests)))] {
		model := predictingStages + often + test.more
		if !strings.Contains(test.more, "aux_loss") {
			model += "aux_loss: {form: sequence}\n"
		}
		want := mustRunRanks(t, ranksConfig(t, plan, test.layouts[0], model), Options{})
		same := func(what string, got runOutcome) {
			t.Helper()
			// stages add the losses of their own layers first
			if d := apart(t, want.lines, got.lines, "aux_loss"); d > 1e-12 {
				t.Errorf("%s: aux_loss differs by %v", what, d)
			}
			for i, line := range got.lines {
				if _, ok := line["aux_loss"]; ok {
					line["aux_loss"] = want.lines[i]["aux_loss"]
				}
			}
			sameBits(t, what, want, got)
		}
		for _, l := range test.layouts[1:] {
			what := fmt.Sprintf("%q, %+v", test.more, l)
			c := ranksConfig(t, plan, l, model)
			same(what, mustRunRanks(t, c, Options{}))
			longest := test.layouts[len(test.layouts)-1]
			if l != longest {
				continue
			}
			same(what+", discrete", mustRunRanks(t, ranksConfig(t, plan, l, model), onDiscrete(Options{}, nil)))
			c = ranksConfig(t, plan, l, model)
			mustRun(t, c, stopAfter(3))
			c.Layout = ranksConfig(t, plan, test.resumes, model).Layout
			same(what+", resumed with other stages", mustRunRanks(t, c, Options{}))
		}
	}
}

// A run can start from a model with such layers, or the run's own checkpoint, and needs them.
func TestPredictionsFrom(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	first := ranksConfig(t, plan, LayoutConfig{}, predicting)
	r := mustRun(t, first, Options{})
	text, err := os.ReadFile(filepath.Join(r.Checkpoint, "config.json"))
	if err != nil || !strings.Contains(string(text), `"num_nextn_predict_layers": 1`) {
		t.Errorf("config.json: %s; %v", text, err)
	}
	second := ranksConfig(t, plan, LayoutConfig{}, predicting+
		"schedule: {name: constant, learning_rate: 1.0e-30, warmup_steps: 0}\n")
	second.InitializeFrom = r.Checkpoint
	after := mustRun(t, second, Options{})
	a, err := moe.OpenStoredWith(filesystem.OS{}, r.Checkpoint, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := moe.OpenStoredWith(filesystem.OS{}, after.Checkpoint, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	weights := func(s *moe.Stored) map[string][]float32 {
		all := map[string][]float32{}
		if err := s.Each(t.Context(), func(name string, piece []float32) error {
			if moe.Trained(name) {
				all[name] = append(all[name], piece...)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return all
	}
	if x, y := weights(a), weights(b); len(x["model.layers.2.eh_proj.weight"]) == 0 ||
		!maps.EqualFunc(x, y, slices.Equal[[]float32]) {
		t.Error("the run did not start with the model's weights")
	}
	more := ranksConfig(t, plan, LayoutConfig{}, strings.Replace(predicting, "layers: 1}", "layers: 2}", 1))
	more.InitializeFrom = r.Checkpoint
	if _, err := Run(t.Context(), more, Options{}); err == nil || !strings.Contains(err.Error(), "model.layers.3.") ||
		!strings.Contains(err.Error(), "num_nextn_predict_layers is 2") {
		t.Errorf("a layer is missing: %v", err)
	}
}

// Settings that do not fit are refused by name.
func TestPredictionsRefuse(t *testing.T) {
	for config, want := range map[string]string{
		"prediction_loss: {coefficient: 0.1}\n":             "prediction_loss.coefficient",
		predicting + "prediction_loss: {coefficient: -1}\n": "prediction_loss.coefficient",
		predicting + "prediction_loss: {weight: 1}\n":       `unknown field "weight"`,
	} {
		if _, err := ParseConfig([]byte(config), "train.yaml"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %s", config, err, want)
		}
	}
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	other := testConfig(t, plan, "model: {preset: mula-nano, num_nextn_predict_layers: 1}\n")
	if _, err := Run(t.Context(), other, Options{}); err == nil ||
		!strings.Contains(err.Error(), "model.num_nextn_predict_layers") {
		t.Errorf("another family: %v", err)
	}
}
