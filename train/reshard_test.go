package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/group"
	"mula/train/optimizer/optimizertest"
	"mula/xpu"
	"mula/xpu/comm"
)

// gathered returns all tensors in a checkpoint, of the model and of the optimizer's state,
// complete, by name. It reads the files only by the rules of docs/formats/run.md.
func gathered(t testing.TB, dir string) map[string][]float32 {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil || len(files) < 2 {
		t.Fatalf("%s: %v, %v", dir, files, err)
	}
	all := map[string][]float32{}
	for _, path := range files {
		f, err := safetensors.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, tensor := range f.Tensors() {
			values := make([]float32, tensor.Elements())
			if err := f.Float32(values, tensor.Name, 0); err != nil {
				t.Fatal(err)
			}
			name, part, _ := strings.Cut(tensor.Name, "[")
			first := 0
			if part != "" {
				if first, err = strconv.Atoi(part[:strings.Index(part, ":")]); err != nil {
					t.Fatal(err)
				}
			}
			if need := first + len(values); len(all[name]) < need {
				all[name] = append(all[name], make([]float32, need-len(all[name]))...)
			}
			copy(all[name][first:], values)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// reload loads the newest checkpoint of a run like a new process, and saves the state, without a
// step, into another directory. The ranks together must read each byte of the checkpoint once.
func reload(t testing.TB, c Config) string {
	t.Helper()
	dir := t.TempDir()
	var path, from string
	files := checkpointtest.NewCounter(filesystem.OS{}, filepath.Join(c.Output, checkpoint.DirName))
	optimizertest.Together(t, c.Layout.Ranks(), func(world *comm.Comm) error {
		ctx := context.Background()
		ranks, err := group.New(ctx, world, c.Layout.shape(), c.groupOptions(nil))
		if err != nil {
			return err
		}
		defer ranks.Close()
		r := &run{config: c, options: Options{World: world, files: files}, ranks: ranks, history: history{saved: -1}}
		defer r.close(false)
		saved, err := r.begin(ctx)
		if err != nil {
			return err
		}
		if saved == nil {
			return fmt.Errorf("no checkpoint in %s", c.Output)
		}
		if err := r.prepare(ctx, saved); err != nil {
			return err
		}
		if err := r.optimizer.Average(ctx, true); err != nil {
			return err
		}
		weights := r.state.Weights
		if err := checkpoint.Save(ctx, world, dir, &r.state, checkpoint.NewShard(r.model, r.optimizer),
			checkpoint.Options{}); err != nil {
			return err
		}
		if r.state.Weights != weights {
			return fmt.Errorf("weights %s, the checkpoint had %s", r.state.Weights, weights)
		}
		if world.Rank() == 0 {
			path, from = filepath.Join(dir, checkpoint.Name(r.state.Step)), saved.Dir
		}
		return nil
	})
	if err := files.Check(checkpointtest.Names(t, from)); err != nil {
		t.Errorf("%+v: %v", c.Layout, err)
	}
	return path
}

// losses of the steps of a run.
func losses(t testing.TB, output string) []float64 {
	t.Helper()
	var all []float64
	for _, line := range metricsOf(t, output) {
		if text, ok := line["loss"].(json.Number); ok {
			loss, err := text.Float64()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, loss)
		}
	}
	return all
}

// A run of any layout can start with the model of a run of many ranks.
func TestInitializeFromManyRanks(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const config = "model: {preset: mula-nano, num_hidden_layers: 1, hidden_size: 16, intermediate_size: 8, " +
		"num_experts: 4, num_experts_per_tok: 2}\nevaluate: {every: 0}\n"
	first := testConfig(t, plan, config+"steps: 2\nlayout: {expert_dp: 2, ep: 2}\n")
	mustRun(t, first, Options{})
	var all []float64
	for _, layout := range []string{"expert_dp: 1, ep: 1", "expert_dp: 1, ep: 4", "expert_dp: 2, ep: 1"} {
		c := testConfig(t, plan,
			config+"steps: 1\nschedule: {warmup_steps: 0}\nspikes: {action: rollback}\nlayout: {"+layout+"}\n")
		c.InitializeFrom = first.Output
		mustRun(t, c, Options{})
		saved, _, err := checkpoint.Find(context.Background(), c.Output)
		if err != nil {
			t.Fatal(err)
		}
		begun, _, err := checkpoint.Find(context.Background(), first.Output)
		if err != nil || saved.State.Spikes.Began != begun.State.Weights {
			t.Errorf("%s: began with %s, the model has %s; %v", layout, saved.State.Spikes.Began,
				begun.State.Weights, err)
		}
		all = append(all, losses(t, c.Output)[0])
	}
	if math.Abs(all[1]-all[0]) > 1e-5*all[0] || math.Abs(all[2]-all[0]) > 1e-5*all[0] {
		t.Errorf("the first losses are %v", all)
	}
}

// A run that stops at one layout resumes at any other with the same bits of weights and moments,
// for every optimizer and sharding scheme. Its next losses equal the losses of the run that kept
// its layout, within rounding.
func TestResumeAtAnyLayout(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const config = "model: {preset: mula-nano, num_hidden_layers: 2, hidden_size: 16, intermediate_size: 8, " +
		"num_experts: 4, num_experts_per_tok: 2}\n" +
		"steps: 6\nevaluate: {every: 0}\ncheckpoint: {every: 3, keep: 5}\n"
	for _, test := range []struct {
		optimizer string
		from      string
		to        []string
		precision xpu.Precision
	}{
		{"adamw", "expert_dp: 4, ep: 1", []string{"expert_dp: 4, ep: 1, optimizer: so", "expert_dp: 2, ep: 2",
			"expert_dp: 1, ep: 4",
			"expert_dp: 2, ep: 1, optimizer: unsharded", "expert_dp: 1, ep: 1"}, xpu.FP32},
		{"adamw", "expert_dp: 1, ep: 1", []string{"expert_dp: 2, ep: 2"}, xpu.FP32},
		{"muon", "expert_dp: 2, ep: 2, optimizer: so", []string{"expert_dp: 1, ep: 4", "expert_dp: 1, ep: 1"},
			xpu.FP32},
		{"schedule_free_adamw", "expert_dp: 2, ep: 2", []string{"expert_dp: 4, ep: 1", "expert_dp: 1, ep: 2, " +
			"optimizer: unsharded",
			"expert_dp: 1, ep: 1"}, xpu.FP32},
		{"adamw", "expert_dp: 4, ep: 1", []string{"expert_dp: 2, ep: 2", "expert_dp: 1, ep: 2, pp: 2, optimizer: so",
			"expert_dp: 1, ep: 1"}, xpu.BF16Mixed},
		{"muon", "expert_dp: 2, ep: 2, optimizer: so", []string{"expert_dp: 1, ep: 1"}, xpu.BF16Mixed},
		{"adamw", "expert_dp: 2, ep: 2, pp: 2", []string{"expert_dp: 1, ep: 1"}, xpu.BF16Compact},
		{"schedule_free_adamw", "expert_dp: 2, ep: 2", []string{"expert_dp: 4, ep: 1", "expert_dp: 1, ep: 1"},
			xpu.BF16Compact},
	} {
		more := fmt.Sprintf("%sprecision: %s\n", config, test.precision)
		tolerance := 1e-5
		if test.precision != xpu.FP32 {
			tolerance = 0.005
		}
		if test.optimizer != "adamw" {
			more += "optimizer: {name: " + test.optimizer + "}\n"
		}
		if test.optimizer == "schedule_free_adamw" {
			more += "schedule: {name: constant, learning_rate: 3e-3, warmup_steps: 2}\n"
		}
		with := func(layout string) Config { return testConfig(t, plan, more+"layout: {"+layout+"}\n") }
		whole := with(test.from)
		mustRun(t, whole, Options{})
		want := losses(t, whole.Output)
		if len(want) != 6 {
			t.Fatalf("%d losses", len(want))
		}
		stopped := with(test.from)
		mustRun(t, stopped, stopAfter(2))
		saved := filepath.Join(stopped.Output, checkpoint.DirName, checkpoint.Name(3))
		state := gathered(t, saved)
		for _, layout := range test.to {
			what := fmt.Sprintf("%s from %s to %s", test.optimizer, test.from, layout)
			c := with(layout)
			if err := os.CopyFS(c.Output, os.DirFS(stopped.Output)); err != nil {
				t.Fatal(err)
			}
			again := gathered(t, reload(t, c))
			if len(again) != len(state) {
				t.Errorf("%s: %d tensors, want %d", what, len(again), len(state))
			}
			for name, values := range state {
				if !slices.EqualFunc(values, again[name],
					func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }) {
					t.Errorf("%s: %s has changed", what, name)
				}
			}
			result := mustRun(t, c, Options{})
			if result.Resumed != checkpoint.Name(3) {
				t.Errorf("%s: resumed %q", what, result.Resumed)
			}
			got := losses(t, c.Output)
			for i := range want {
				if i >= len(got) || math.Abs(got[i]-want[i]) > tolerance*want[i] || i < 3 && got[i] != want[i] {
					t.Errorf("%s: losses %v, want %v", what, got, want)
					break
				}
			}
			found, _, err := checkpoint.FindModel(context.Background(), c.Output)
			if err != nil {
				t.Fatal(err)
			}
			inspected, err := found.Inspect(context.Background(), nil)
			if err != nil || inspected.Weights != result.Weights {
				t.Errorf("%s: weights %s, the run has %s; %v", what, inspected.Weights, result.Weights, err)
			}
		}
	}
}
