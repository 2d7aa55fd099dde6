package train

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"mula/internal/atomicfile"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
)

// tied is a dense model with tied embeddings, of a family that every framework has.
const tied = "model: {preset: mula-nano, model_type: qwen3, num_experts: 0, num_experts_per_tok: 0, head_dim: 8, " +
	"num_key_value_heads: 2, tie_word_embeddings: true}\n"

// export exports the checkpoint at path into a new folder.
func export(t *testing.T, path string, o checkpoint.ExportOptions) (string, error) {
	t.Helper()
	model, _, err := checkpoint.FindModel(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	output := filepath.Join(t.TempDir(), "exported")
	_, err = model.Export(t.Context(), output, o)
	return output, err
}

// An exported checkpoint, imported again, has the bits of weights, masters and moments, and the
// progress of the run. Ranks that share the optimizer's state have written ranges of tensors.
func TestExport(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const moe = "model: {preset: mula-nano}\n"
	const mixed = "model: {preset: mula-nano, model_type: qwen2_moe, num_hidden_layers: 3, num_key_value_heads: 2, " +
		"shared_expert_intermediate_size: 24, dense_layers: '1', dense_intermediate_size: 40}\n"
	for name, test := range map[string]struct {
		settings, layout string
		options          checkpoint.ExportOptions
	}{
		"deepspeed": {moe, "", checkpoint.ExportOptions{Framework: checkpoint.DeepSpeed}},
		"deepspeed, masters of ranks": {moe + "precision: bf16_mixed\n", "layout: {expert_dp: 2, ep: 2}\n",
			checkpoint.ExportOptions{Framework: checkpoint.DeepSpeed, SeparateExperts: true}},
		"megatron": {tied, "", checkpoint.ExportOptions{Framework: checkpoint.Megatron}},
		"megatron, dense layers and masters of ranks": {mixed + "precision: bf16_mixed\n",
			"layout: {expert_dp: 2, ep: 2}\n", checkpoint.ExportOptions{Framework: checkpoint.Megatron}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			settings := test.settings + "steps: 4\ncheckpoint: {every: 2}\n"
			run := mustRun(t, testConfig(t, plan, settings+test.layout), stopAfter(2))
			output, err := export(t, run.Checkpoint, test.options)
			if err != nil {
				t.Fatal(err)
			}
			model, ok, err := checkpoint.FindForeign(output, "")
			if err != nil || !ok {
				t.Fatal(ok, err)
			}
			done, err := Import(t.Context(), testConfig(t, plan, settings), model, ImportOptions{Step: -1})
			if err != nil {
				t.Fatal(err)
			}
			if done.Step != run.Steps || done.Updates != run.Steps || done.Weights != run.Weights {
				t.Errorf("%+v, want %+v", done, run)
			}
			want, got := gathered(t, run.Checkpoint), gathered(t, done.Checkpoint)
			if len(want) != len(got) {
				t.Errorf("%d tensors, want %d", len(got), len(want))
			}
			for name, values := range want {
				if !slices.EqualFunc(values, got[name], func(x, y float32) bool {
					return math.Float32bits(x) == math.Float32bits(y)
				}) {
					t.Errorf("%s differs", name)
				}
			}
		})
	}
}

// The export to Megatron core has a note about a parameter group that Megatron core does not have.
func TestExportGroups(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for groups, want := range map[string]string{
		"": "input_layernorm.weight has weight decay 0.1 and a factor of 1 on the learning rate in the run, and 0 and",
		", groups: [{match: [norms], weight_decay: 0}]":                                          "",
		", groups: [{match: [norms], weight_decay: 0}, {match: [head], learning_rate_scale: 2}]": "factor of 2",
	} {
		settings := strings.Replace(tied, "tie_word_embeddings: true", "tie_word_embeddings: false", 1) +
			"optimizer: {weight_decay: 0.1" + groups + "}\nsteps: 3\n"
		run := mustRun(t, testConfig(t, plan, settings), stopAfter(0))
		model, _, err := checkpoint.FindModel(t.Context(), run.Checkpoint)
		if err != nil {
			t.Fatal(err)
		}
		done, err := model.Export(t.Context(), filepath.Join(t.TempDir(), "exported"),
			checkpoint.ExportOptions{Framework: checkpoint.Megatron})
		if err != nil {
			t.Fatal(err)
		}
		notes := strings.Join(done.Notes, "\n")
		if strings.Contains(notes, "has weight decay") != (want != "") || !strings.Contains(notes, want) {
			t.Errorf("%s: notes %q, want %q", groups, done.Notes, want)
		}
	}
}

func TestExportRefuses(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for want, test := range map[string]struct {
		settings  string
		framework checkpoint.Framework
	}{
		"optimizer.name is lion; only the state of adamw can be exported": {"optimizer: {name: lion}\nsteps: 3\n",
			checkpoint.DeepSpeed},
		"e_score_correction_bias is updated without an optimizer": {deepSeek, checkpoint.DeepSpeed},
		"config.json has model_type olmoe":                        {"steps: 3\n", checkpoint.Megatron},
	} {
		run := mustRun(t, testConfig(t, plan, test.settings), stopAfter(0))
		output, err := export(t, run.Checkpoint, checkpoint.ExportOptions{Framework: test.framework})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if _, err := os.Stat(output); err == nil {
			t.Errorf("%s exists", output)
		}
	}
	dir, _ := checkpointtest.Model(t, nil, nil)
	if _, err := export(t, dir, checkpoint.ExportOptions{Framework: checkpoint.DeepSpeed}); err == nil ||
		!strings.Contains(err.Error(), "is not a checkpoint of a run, and has no moments") {
		t.Error(err)
	}
}

// After a failed operation, such as a write to a full disk, nothing is left.
func TestExportFaults(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	settings := tied + "steps: 1\nschedule: {warmup_steps: 0}\n"
	run := mustRun(t, testConfig(t, plan, settings), Options{})
	checkExportFaults(t, run.Checkpoint, checkpoint.DeepSpeed, 100)
	checkExportFaults(t, run.Checkpoint, checkpoint.Megatron, 20)
}

// checkExportFaults makes some of the operations of an export fail, which has at least least.
func checkExportFaults(t *testing.T, saved string, framework checkpoint.Framework, least int) {
	t.Helper()
	defer func() { atomicfile.Fault = nil }()
	for k := 1; ; k += 1 + k/2 {
		n := 0
		atomicfile.Fault = func(atomicfile.Op, string) error {
			if n++; n == k {
				return syscall.ENOSPC
			}
			return nil
		}
		output, err := export(t, saved, checkpoint.ExportOptions{Framework: framework})
		atomicfile.Fault = nil
		if n < k {
			if err != nil || n < least {
				t.Errorf("%d operations, %v", n, err)
			}
			return
		}
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), output) {
			t.Errorf("operation %d: %v", k, err)
		}
		if names := checkpointtest.Names(t, filepath.Dir(output)); len(names) != 0 {
			t.Errorf("operation %d failed and left %v", k, names)
		}
	}
}
