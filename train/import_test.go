package train

import (
	"path/filepath"
	"strings"
	"testing"

	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/foreign"
)

// stateOf returns the training state of a run's checkpoint as the state of another framework.
func stateOf(t *testing.T, saved string, masters bool) *foreign.State {
	t.Helper()
	open := func(name string) *safetensors.File {
		f, err := safetensors.Open(filepath.Join(saved, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	model, optimizer := open("model.safetensors"), open("optimizer.safetensors")
	s := &foreign.State{Form: "test", Dir: "test"}
	for _, tensor := range model.Tensors() {
		s.Parameters = append(s.Parameters, foreign.Parameter{Name: tensor.Name, Shape: tensor.Shape,
			Read: func(kind foreign.Kind, dst []float32, first int64) error {
				switch {
				case kind == foreign.ExpAvg:
					return optimizer.Float32(dst, tensor.Name+".exp_avg", first)
				case kind == foreign.ExpAvgSq:
					return optimizer.Float32(dst, tensor.Name+".exp_avg_sq", first)
				case masters:
					return optimizer.Float32(dst, tensor.Name+".master", first)
				}
				return model.Float32(dst, tensor.Name, first)
			}})
	}
	return s
}

// A run that resumes from imported weights, moments and progress has the bits of the run that they
// are from.
func TestImport(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, precision := range []string{"fp32", "bf16_mixed"} {
		t.Run(precision, func(t *testing.T) {
			settings := "steps: 4\nprecision: " + precision + "\n"
			first := testConfig(t, plan, settings+"checkpoint: {every: 2}\n")
			stopped := mustRun(t, first, stopAfter(2))
			model := checkpoint.ModelDir{Dir: stopped.Checkpoint, Foreign: stateOf(t, stopped.Checkpoint,
				precision != "fp32")}
			model.Foreign.Step, model.Foreign.Updates, model.Foreign.Samples = 3, 3, 3*int64(first.BatchSize)

			second := testConfig(t, plan, settings)
			done, err := Import(t.Context(), second, model, ImportOptions{Step: -1})
			if err != nil {
				t.Fatal(err)
			}
			if done.Step != 3 || done.Updates != 3 || done.Position != model.Foreign.Samples ||
				done.Weights != stopped.Weights {
				t.Errorf("%+v, want weights %s", done, stopped.Weights)
			}
			want, got := mustRun(t, first, Options{}), mustRun(t, second, Options{})
			if got.Weights != want.Weights || got.Resumed != "step-00000003" || got.LastLoss != want.LastLoss ||
				got.FirstLoss != want.LastLoss {
				t.Errorf("%+v, want %+v", got, want)
			}
			if _, err := Import(t.Context(), second, model, ImportOptions{Step: -1}); err == nil ||
				!strings.Contains(err.Error(), "has step-") {
				t.Errorf("imported into a run with checkpoints: %v", err)
			}
		})
	}
}

func TestImportRefuses(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	saved := mustRun(t, testConfig(t, plan, "steps: 1\nschedule: {warmup_steps: 0}\n"), Options{}).Checkpoint
	for name, test := range map[string]struct {
		settings string
		change   func(s *foreign.State)
		step     int64
		want     string
	}{
		"optimizer": {"optimizer: {name: lion}\n", nil, -1, "optimizer.name is lion"},
		"samples":   {"", func(s *foreign.State) { s.Samples = 7 }, -1, "not a multiple of batch_size"},
		"plan":      {"steps: 3\n", nil, 3, "is at step 3, but the run has 3 steps"},
		"model":     {"model: {rope_theta: 5}\n", nil, 0, "model.rope_theta is 10000"},
		"missing": {"", func(s *foreign.State) { s.Parameters = s.Parameters[1:] }, 0,
			"tensors missing: model.embed"},
		"not finite": {"", func(s *foreign.State) {
			read := s.Parameters[1].Read
			s.Parameters[1].Read = func(kind foreign.Kind, dst []float32, first int64) error {
				err := read(kind, dst, first)
				if kind == foreign.ExpAvgSq {
					dst[0] /= 0
					dst[0] -= dst[0]
				}
				return err
			}
		}, 0, "exp_avg_sq"},
	} {
		t.Run(name, func(t *testing.T) {
			model := checkpoint.ModelDir{Dir: saved, Foreign: stateOf(t, saved, false)}
			if test.change != nil {
				test.change(model.Foreign)
			}
			_, err := Import(t.Context(), testConfig(t, plan, test.settings), model, ImportOptions{Step: test.step})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}
