package train

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"mula/moe"
	"mula/train/optimizer"
)

func TestParseConfig(t *testing.T) {
	const file = `
plan: data/plan.json
model:
  preset: mula-nano
  num_hidden_layers: 3
  vocab_size: 1024
batch_size: 16
steps: 100
optimizer: {decay: optimus, clip: 0}
schedule:
  learning_rate: 1e-3
  warmup_steps: 0
z_loss: {coefficient: 0.001}
`
	got, err := ParseConfig([]byte(file), "train.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := defaultConfig()
	if err := want.Model.usePreset("mula-nano"); err != nil {
		t.Fatal(err)
	}
	want.Plan = "data/plan.json"
	want.Model.Layers, want.Model.VocabSize = 3, 1024
	want.BatchSize, want.Steps = 16, 100
	want.Optimizer.Decay, want.Optimizer.Clip = optimizer.DecayOptimus, 0
	want.Schedule.LearningRate, want.Schedule.WarmupSteps = 1e-3, new(int64)
	want.ZLoss.Coefficient = 0.001
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Config{}, ModelConfig{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got.Model.HiddenSize != 64 || got.Optimizer.Name != optimizer.AdamW || got.Model.EOSTokenID != moe.NoToken {
		t.Errorf("fields that the file does not name lost their defaults: %+v", got)
	}
}

// A file without a field, such as a copy that was cut short, starts no run. A file that only names
// the plan has all other defaults.
func TestParseConfigEmpty(t *testing.T) {
	for _, file := range []string{"", "# nothing\n", "---\n"} {
		if _, err := ParseConfig([]byte(file), "train.yaml"); err == nil || !strings.Contains(err.Error(), "empty") {
			t.Errorf("%q: %v", file, err)
		}
	}
	for _, file := range []string{"plan: plan.json\n"} {
		got, err := ParseConfig([]byte(file), "train.yaml")
		if err != nil {
			t.Fatalf("%q: %v", file, err)
		}
		if diff := cmp.Diff(defaultConfig(), got, cmpopts.IgnoreUnexported(Config{}, ModelConfig{})); diff != "" {
			t.Errorf("%q (-default +got):\n%s", file, diff)
		}
	}
}

func TestParseConfigErrors(t *testing.T) {
	for _, test := range []struct {
		file string
		want []string
	}{
		{"steps: 5\nbatchsize: 4\n", []string{"train.yaml:2:", `"batchsize"`, "batch_size"}},
		{"\n\nwarmup_steps: 4\n", []string{"train.yaml:3:", `"warmup_steps"`, "schedule.warmup_steps"}},
		{"model:\n  hiden_size: 4\n", []string{"train.yaml:2:", "hidden_size"}},
		{"optimizer:\n  beta1: 0.9\n", []string{"train.yaml:2:", "betas"}},
		{"zzzzzzzzzz: 4\n", []string{"train.yaml:1:", `unknown field "zzzzzzzzzz"`}},
		{"steps: many\n", []string{"train.yaml:1:", "many", "a whole number"}},
		{"steps: 5\nschedule:\n  learning_rate: fast\n", []string{"train.yaml:3:", "fast", "a number"}},
		{"optimizer: adamw\n", []string{"train.yaml:1:", "adamw",
			"it must be a mapping, such as optimizer: {name: adamw}"}},
		{"steps: 5\nsteps: 6\n", []string{"train.yaml:2:", "steps"}},
		{"steps: [\n", []string{"train.yaml:1:"}},
		{"steps: 5\n---\nsteps: 6\n", []string{"train.yaml:2:", "second"}},
		{"steps: -5\n", []string{"train.yaml:1:", "steps is -5", "0"}},
		{"model: {preset: mula-huge}\n", []string{"train.yaml:1:", "mula-huge", "mula-tiny"}},
		{"optimizer: {decay: l2}\n", []string{"train.yaml:1:", `optimizer.decay is "l2"`, "torch, optimus"}},
		{"optimizer:\n  betas: [0.9, 1]\n", []string{"train.yaml:2:", "optimizer.betas is [0.9, 1]", "below 1"}},
		{"optimizer:\n  betas: [0.9]\n", []string{"train.yaml:2:", "optimizer.betas is [0.9]", "two numbers"}},
		{"optimizer:\n  betas: 0.9\n", []string{"train.yaml:2:", "optimizer.betas is 0.9; it must be a list"}},
		{"optimizer:\n  betas: [0.9, 0.95, 0.99]\n",
			[]string{"train.yaml:2:", "optimizer.betas is [0.9, 0.95, 0.99]; must be two numbers"}},
		{"optimizer: &a {name: adamw}\n\nlog: *a\n",
			[]string{`train.yaml:3: unknown field "name"; did you mean "optimizer.name"? (through the alias *a)`}},
		{"seed: 18446744073709551616\n",
			[]string{"train.yaml:1: seed is 18446744073709551616; it must be between 0 and 18446744073709551615"}},
		{"seed: 1.8446744073709551616e19\n",
			[]string{"train.yaml:1: seed is 1.8446744073709551616e19; it must be between 0 and 18446744073709551615"}},
		{"steps: 010\n", []string{"train.yaml:1: steps: 010 starts with 0, which may mean an octal number; write 10"}},
		{"steps: 0o10\n", []string{"steps: 0o10 is not written in decimal; write 8"}},
		{"steps: 0x10\n", []string{"steps: 0x10 is not written in decimal; write 16"}},
		{"steps: 1_0\n", []string{"steps: 1_0 has underscores; write 10"}},
		{"model: mula-nano\n",
			[]string{"train.yaml:1: model is \"mula-nano\"; it must be a mapping, such as model: {preset: mula-nano}"}},
		{"preset: mula-nano\n", []string{`train.yaml:1: unknown field "preset"; did you mean "model.preset"?`}},
		// Several problems are reported together.
		{"batchsize: 4\nsteps: 010\noptimizer: {name: adam}\n\nprecision: fp16\nspikes: {window: x, sigma: 0}\n",
			[]string{"train.yaml:1: unknown field",
				"\ntrain.yaml:2: steps: 010", "\ntrain.yaml:3: optimizer.name is \"adam\"",
				"\ntrain.yaml:5: precision is",
				"\ntrain.yaml:6: spikes.sigma is 0", "\ntrain.yaml:6: spikes.window is \"x\""}},
		{"steps: 4\ncheckpoint: {snapshot_dir: shm}\n",
			[]string{"train.yaml:2: checkpoint.snapshot_dir is \"shm\"; it must be an absolute path, such as /dev"}},
		{"checkpoint: {snapshot_every: -1}\n", []string{"train.yaml:1: checkpoint.snapshot_every is -1"}},
		{"optimizer: {clip: .nan}\n", []string{"train.yaml:1:", "optimizer.clip is .nan; it must be a finite number"}},
		{"schedule: {learning_rate: .inf}\n",
			[]string{"train.yaml:1:", "schedule.learning_rate is .inf; it must be a finite number"}},
		{"schedule: {learning_rate: 1e-4, min_learning_rate: 1e-3}\n", []string{"schedule.min_learning_rate is 0.001",
			"0.0001"}},
		{"schedule: {name: step}\n", []string{`schedule.name is "step"`, "cosine, linear, wsd, constant"}},
		{"schedule:\n  learning_rate: 0\n", []string{"train.yaml:2:", "schedule.learning_rate is 0", "above 0"}},
		{"schedule: {cooldown_steps: 5}\n", []string{"schedule.cooldown_steps is 5",
			"cosine has no such setting; the setting belongs to wsd"}},
		{"schedule: {name: wsd, cooldown_steps: 0}\n", []string{"schedule.cooldown_steps is 0", "from 1 to"}},
		{"schedule: {name: wsd, cooldown: cosine}\n", []string{`schedule.cooldown is "cosine"`, "1-sqrt, linear"}},
		{"schedule: {name: constant, min_learning_rate: 1e-5}\n", []string{"schedule.min_learning_rate is 1e-05",
			"constant has no such setting; the setting belongs to cosine, linear, wsd"}},
		{"schedule: {name: constant, decay_steps: 5}\n", []string{"schedule.decay_steps is 5",
			"constant does not decay"}},
		{"schedule: {name: constant, warmup_from: min}\n", []string{`schedule.warmup_from is "min"`, "zero"}},
		{"optimizer: {name: adam}\n", []string{`optimizer.name is "adam"`,
			"adamw, adopt, lamb, lion, muon, schedule_free_adamw, sophiag"}},
		{"optimizer:\n  rho: 0.1\n", []string{"train.yaml:2:", "optimizer.rho is 0.1",
			"adamw has no such setting; the setting belongs to sophiag"}},
		{"optimizer: {name: lion, eps: 1e-8}\n", []string{"optimizer.eps is 1e-08",
			"lion has no such setting; the setting belongs to adamw, adopt, lamb, muon, schedule_free_adamw"}},
		{"optimizer: {name: lion, decay: torch}\n", []string{"optimizer.decay is torch",
			"lion has no such setting; the setting belongs to adamw"}},
		{"optimizer: {name: sophiag, rho: 0}\n", []string{"optimizer.rho is 0", "above 0"}},
		{"optimizer: {name: sophiag, hessian_every: 0}\n", []string{"optimizer.hessian_every is 0"}},
		{"optimizer: {name: muon, momentum: 2}\n", []string{"optimizer.momentum is 2", "from 0 to 1"}},
		{"optimizer: {name: muon, ns_steps: 100}\n", []string{"optimizer.ns_steps is 100"}},
		{"optimizer: {name: muon, adjust_lr_fn: none}\n", []string{`optimizer.adjust_lr_fn is "none"`,
			"match_rms_adamw, original"}},
		{"optimizer: {name: schedule_free_adamw}\n", []string{`schedule.name is "cosine"`, "constant"}},
		{"optimizer: {name: schedule_free_adamw, betas: [0, 0.9]}\nschedule: {name: constant}\n",
			[]string{"optimizer.betas is [0, 0.9]", "above 0"}},
		{"optimizer: {name: schedule_free_adamw, r: -1}\nschedule: {name: constant}\n", []string{"optimizer.r is -1"}},
		{"batch_size: 8\nmicro_batch_size: 9\n", []string{"train.yaml:2:", "micro_batch_size is 9", "8"}},
		{"precision: fp16\n", []string{"train.yaml:1:", `precision is "fp16"`, "fp32, bf16"}},
		{"spikes: {action: ignore}\n", []string{"train.yaml:1:", `spikes.action is "ignore"`, "none, skip, rollback"}},
		{"spikes: {sigma: 0.5}\n", []string{"spikes.sigma is 0.5", "1 or more"}},
		{"spikes: {window: 1}\n", []string{"spikes.window is 1", "from 2 to 65536"}},
		{"spikes: {skip_steps: 0}\n", []string{"spikes.skip_steps is 0", "from 1 to"}},
		{"log: {update_ratio_every: -1}\n", []string{"log.update_ratio_every is -1"}},
		{"log: {expert_counts_every: -1}\n", []string{"log.expert_counts_every is -1"}},
		{"log: {slow_factor: 0.5, slow_steps: -1}\n", []string{"log.slow_factor is 0.5", "log.slow_steps is -1"}},
		{"metrics_listen: localhost\n", []string{"train.yaml:1:", `metrics_listen is "localhost"`, "127.0.0.1:9400"}},
		{"device: gpu\n", []string{"train.yaml:1:", `device is "gpu"`, "cpu"}},
		{"aux_loss: {form: paper}\n", []string{`aux_loss.form is "paper"`, "hf, megablocks, sequence, global, none"}},
		{"model: {preset: mula-1b}\naux_loss: {form: hf}\n", []string{"train.yaml:2:", "dense", "none"}},
		{"model: {preset: mula-1b}\nz_loss: {coefficient: 0.1}\n", []string{"train.yaml:2:", "dense"}},
		{"checkpoint: {keep: 0}\n", []string{"checkpoint.keep is 0", "1"}},
		{"plan_change: maybe\n", []string{"plan_change", "refuse, accept"}},
		{"plan: \"\"\n", []string{"plan is empty"}},
	} {
		_, err := ParseConfig([]byte(test.file), "train.yaml")
		if err == nil {
			t.Errorf("%q: no error", test.file)
			continue
		}
		for _, want := range test.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: error %q does not say %q", test.file, err, want)
			}
		}
	}
}

func TestLoadConfigPaths(t *testing.T) {
	path := filepath.Join(t.TempDir(), "train.yaml")
	absolute := filepath.Join(t.TempDir(), "plan.json")
	if err := os.WriteFile(path, []byte("plan: "+absolute+"\noutput: runs/a\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := LoadConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	if c.Plan != absolute || c.Output != filepath.Join(filepath.Dir(path), "runs/a") || c.Tokenizer != "" {
		t.Errorf("plan %q, output %q, tokenizer %q", c.Plan, c.Output, c.Tokenizer)
	}
	if _, err := LoadConfig(path + "x"); !os.IsNotExist(err) {
		t.Errorf("missing file: %v", err)
	}
}

// Old names of fields are read, with a warning, and are the same fields in messages.
func TestParseConfigOldNames(t *testing.T) {
	old, err := ParseConfig([]byte("layout: {dp: 2, links: local}\nspikes:\n  leave_out: 7\n"), "train.yaml")
	if err != nil {
		t.Fatal(err)
	}
	now, err := ParseConfig([]byte("layout: {expert_dp: 2, transport: local}\nspikes: {skip_steps: 7}\n"), "train.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(now, old, cmpopts.IgnoreUnexported(Config{}, ModelConfig{})); diff != "" {
		t.Errorf("(-new +old):\n%s", diff)
	}
	want := []string{"train.yaml:1: field dp is now called expert_dp", "train.yaml:1: field links is now called " +
		"transport",
		"train.yaml:3: field leave_out is now called skip_steps"}
	if !slices.Equal(old.Warnings(), want) || now.Warnings() != nil {
		t.Errorf("warnings %q and %q, want %q and none", old.Warnings(), now.Warnings(), want)
	}
	for text, want := range map[string]string{
		"steps: 1\nlayout: {dp: 0}\n": "train.yaml:2: layout.expert_dp is 0; must be from 1 to 1048576",
		"layout: {dp: 1, expert_dp: 1}\n": "train.yaml:1: dp and expert_dp are the same field: dp is " +
			"the old name of expert_dp; remove it",
		"spikes: {leave_out: 0}\n": "train.yaml:1: spikes.skip_steps is 0; must be from 1 to " +
			"1048576",
		"layout:\n  ep: 1\n  links: carrier pigeon\n": `train.yaml:3: layout.transport is "carrier pigeon"; allowed: auto, local, tcp, mpi`,
	} {
		if _, err := ParseConfig([]byte(text), "train.yaml"); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// A setting has the effect of the same value in the file, whatever the file has.
func TestLoadConfigSettings(t *testing.T) {
	dir := t.TempDir()
	load := func(text string, settings ...string) (Config, error) {
		t.Helper()
		path := filepath.Join(dir, "train.yaml")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return LoadConfig(path, settings...)
	}
	for _, test := range []struct {
		file     string
		settings []string
		same     string
	}{
		{"", []string{"plan=p.json"}, "plan: p.json\n"},
		{"steps: 5\n", []string{"steps=7", "schedule.learning_rate=3e-4"}, "steps: 7\nschedule: {learning_rate: " +
			"3e-4}\n"},
		{"model: {preset: mula-1b, hidden_size: 512}\n", []string{"model.preset=mula-nano"},
			"model: {preset: mula-nano, hidden_size: 512}\n"},
		{"model: {preset: mula-1b, hidden_size: 512}\n", []string{"model={preset: mula-nano}"},
			"model: {preset: mula-nano}\n"},
		{"plan: p\n", []string{"model.vocab_size=512", "verify=reads"}, "plan: p\nmodel: {vocab_size: 512}\nverify: " +
			"on-read\n"},
		{"optimizer: {groups: [{match: [norms], weight_decay: 0}]}\n", []string{"optimizer.groups=[{match: [head]}]"},
			"optimizer: {groups: [{match: [head]}]}\n"},
		{"layout: {ep: 3}\n", []string{"layout.ep=2"}, "layout: {ep: 2}\n"}, // 3 is an error
	} {
		got, err := load(test.file, test.settings...)
		if err != nil {
			t.Errorf("%q %q: %v", test.file, test.settings, err)
		}
		want, err := load(test.same)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(Config{}, "file"),
			cmp.AllowUnexported(ModelConfig{})); diff != "" {
			t.Errorf("%q %q (-file +settings):\n%s", test.file, test.settings, diff)
		}
	}
	_, err := load("batch_size: 5\nprecision: fp8\n", "layout.ep=2", "spikes.window=1", "stepz=4")
	want := filepath.Join(dir, "train.yaml") + ":1: batch_size is 5; must be a multiple of layout.expert_dp · " +
		"layout.ep = 1 · 2 = 2, " +
		"the number of data ranks\n" + filepath.Join(dir, "train.yaml") + ":2: precision is \"fp8\"; allowed: fp32, " +
		"bf16, bf16_mixed, bf16_compact\n" +
		"--set stepz: unknown field \"stepz\"; did you mean \"steps\"?\n--set spikes.window: spikes.window is 1; " +
		"must be from 2 to 65536"
	if err == nil || err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}

func FuzzParseConfig(f *testing.F) {
	for _, seed := range []string{"", "steps: 5", "model: {preset: mula-nano, hidden_size: 8}", "a: &x 1\nb: *x",
		"optimizer: {clip: .nan}", "? [", "steps: 0x"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseConfig(data, "f.yaml")
		if err != nil {
			if !strings.HasPrefix(err.Error(), "f.yaml") {
				t.Errorf("error without the file's name: %v", err)
			}
			return
		}
		if err := c.Validate(); err != nil || math.IsNaN(c.Schedule.LearningRate) {
			t.Errorf("accepted what it refuses: %v", err)
		}
	})
}
