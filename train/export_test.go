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
	for name, test := range map[string]struct {
		settings, layout string
		options          checkpoint.ExportOptions
	}{
		"deepspeed": {moe, "", checkpoint.ExportOptions{Framework: checkpoint.DeepSpeed}},
		"deepspeed, masters of ranks": {moe + "precision: bf16_mixed\n", "layout: {expert_dp: 2, ep: 2}\n",
			checkpoint.ExportOptions{Framework: checkpoint.DeepSpeed, SeparateExperts: true}},
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

func TestExportRefuses(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for want, settings := range map[string]string{
		"optimizer.name is lion; only the state of adamw can be exported": "optimizer: {name: lion}\nsteps: 3\n",
		"e_score_correction_bias is updated without an optimizer":         deepSeek,
	} {
		run := mustRun(t, testConfig(t, plan, settings), stopAfter(0))
		output, err := export(t, run.Checkpoint, checkpoint.ExportOptions{Framework: checkpoint.DeepSpeed})
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
	run := mustRun(t, testConfig(t, plan, "steps: 1\nschedule: {warmup_steps: 0}\n"), Options{})
	defer func() { atomicfile.Fault = nil }()
	for k := 1; ; k += 1 + k/2 {
		n := 0
		atomicfile.Fault = func(atomicfile.Op, string) error {
			if n++; n == k {
				return syscall.ENOSPC
			}
			return nil
		}
		output, err := export(t, run.Checkpoint, checkpoint.ExportOptions{Framework: checkpoint.DeepSpeed})
		atomicfile.Fault = nil
		if n < k {
			if err != nil || k < 100 {
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
