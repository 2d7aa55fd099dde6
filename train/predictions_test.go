package train

import (
	"encoding/json"
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
	for name, more := range map[string]string{"fp32": "", "bf16": "precision: bf16_mixed\n",
		"compact": "precision: bf16_compact\nactivations: bf16\n", "muon": "optimizer: {name: muon}\n",
		"recompute": "recompute: layers\nmicro_batch_size: 1\n"} {
		c := ranksConfig(t, plan, LayoutConfig{DP: 1, EP: 2}, predicting+more)
		mustRunRanks(t, c, stopAfter(2))
		before := metricsOf(t, c.Output)
		c.Layout = ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1, TP: 2}, predicting+more).Layout
		mustRunRanks(t, c, Options{})
		whole := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1, TP: 2}, predicting+more)
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
		predicting + "layout: {pp: 2}\n":                    "layout.pp",
		predicting + "optimizer: {name: sophiag}\n":         "optimizer.name",
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
