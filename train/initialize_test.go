package train

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/rundir"
	"mula/train/spikes"
)

// A checkpoint of a run can be converted like any other model.
func TestConvertCheckpoint(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "steps: 1\nschedule: {warmup_steps: 0}\n")
	result := mustRun(t, c, Options{})
	from, refused, err := checkpoint.FindModel(ctx, c.Output)
	if err != nil || refused != nil || from.Checkpoint == nil || from.Dir != result.Checkpoint {
		t.Fatalf("%+v, %v, %v", from, refused, err)
	}
	exported := filepath.Join(t.TempDir(), "exported")
	found, err := from.Convert(ctx, exported, checkpoint.ConvertOptions{})
	if err != nil || found.Weights != result.Weights || len(found.Notes) != 1 {
		t.Errorf("%+v, %v; the run has weights %s", found, err, result.Weights)
	}
	want := []string{"config.json", "generation_config.json", "model.safetensors"}
	if got := checkpointtest.Names(t, exported); !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
}

// A run that starts with given weights has them at step 0, continues like any other run, and does
// not need their directory again.
func TestInitializeFrom(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	first := mustRun(t, testConfig(t, plan, "steps: 2\n"), Options{})
	hf, m := checkpointtest.Model(t, func(c *moe.Config) { c.VocabSize = 512 }, nil)

	// An update this small leaves every weight as it is.
	still := "steps: 1\nschedule: {learning_rate: 1.0e-35, warmup_steps: 0}\noptimizer: {weight_decay: 0}\n"
	for from, want := range map[string]string{filepath.Dir(filepath.Dir(first.Checkpoint)): first.Weights,
		first.Checkpoint: first.Weights, hf: checkpointtest.WeightsHash(m.Parameters())} {
		c := testConfig(t, plan, still)
		c.InitializeFrom = from
		result := mustRun(t, c, Options{})
		if result.Weights != want || result.Resumed != "" || result.Steps != 1 {
			t.Errorf("from %s: %+v, want weights %s", from, result, want)
		}
	}

	c := testConfig(t, plan, "checkpoint: {every: 3}\n")
	c.InitializeFrom = hf
	whole := mustRun(t, c, Options{})
	d := c
	d.Output = filepath.Join(t.TempDir(), "run")
	if r := mustRun(t, d, stopAfter(3)); r.Finished {
		t.Fatal("the run did not stop")
	}
	d.InitializeFrom = filepath.Join(t.TempDir(), "gone")
	if r := mustRun(t, d, Options{}); r.Weights != whole.Weights || r.Resumed == "" {
		t.Errorf("resumed %q to weights %s, want %s", r.Resumed, r.Weights, whole.Weights)
	}
	sameRun(t, "stopped and resumed without the first model", c.Output, d.Output)
	written, err := LoadConfig(filepath.Join(c.Output, rundir.ConfigFile))
	if err != nil || written.InitializeFrom != hf {
		t.Errorf("train.yaml of the run: %q, %v", written.InitializeFrom, err)
	}
}

// Every mismatch between the initial model and the run is named before the first step.
func TestInitializeFromRefuses(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	saved := mustRun(t, testConfig(t, plan, "steps: 1\nschedule: {warmup_steps: 0}\n"), Options{}).Checkpoint
	other, _ := checkpointtest.Model(t, func(c *moe.Config) { c.VocabSize, c.Layers, c.RopeTheta = 640, 1, 500 }, nil)
	tokenizer, _ := checkpointtest.Model(t, nil, map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t)})
	damaged := filepath.Join(t.TempDir(), "damaged")
	if err := os.CopyFS(damaged, os.DirFS(saved)); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(damaged, modelFile), 1000); err != nil {
		t.Fatal(err)
	}
	missing, _ := checkpointtest.Model(t, nil, nil)
	if err := os.Remove(filepath.Join(missing, safetensors.ShardName(1, len(checkpointtest.Names(t,
		missing))-2))); err != nil {
		t.Fatal(err)
	}
	diverged, m := checkpointtest.Model(t, nil, nil)
	m.Parameters()[3].Weight.Floats()[5] = float32(math.NaN())
	for _, name := range checkpointtest.Names(t, diverged) {
		if err := os.Remove(filepath.Join(diverged, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Save(t.Context(), diverged, moe.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		from string
		want []string
	}{
		{filepath.Join(t.TempDir(), "nowhere"), []string{"nowhere", "name a run's folder"}},
		{filepath.Join(saved, modelFile), []string{modelFile + " is a file; name a run's folder"}},
		{diverged, []string{diverged, "NaN or Inf: element 5 of " + m.Parameters()[3].Name + " is NaN"}},
		{t.TempDir(), []string{"no config.json of a Hugging Face model"}},
		{other, []string{other, "model.vocab_size is 640 in the folder and 512 in train.yaml",
			"model.num_hidden_layers is 1 in the folder and 2 in train.yaml",
			"model.rope_theta is 500 in the folder and 10000 in train.yaml"}},
		{tokenizer, []string{tokenizer, "the model's tokenizer has SHA-256",
			"tokenize the documents with the model's tokenizer.json", "replace the file by the plan's tokenizer.json"}},
		{damaged, []string{damaged, "damaged", modelFile}},
		{missing, []string{safetensors.ShardName(1, len(checkpointtest.Names(t, missing))-1)}},
	} {
		c := testConfig(t, plan, "")
		c.InitializeFrom = test.from
		_, err := Run(context.Background(), c,
			Options{Progress: func(Progress) { t.Errorf("%s: a step was made", test.from) }})
		for _, want := range append(test.want, "initialize_from: ") {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v, want %q", test.from, err, want)
			}
		}
	}
}

// A run that started with a model before format 2 has another hash of its weights, and can start
// with them again.
func TestInitialOfFormat1(t *testing.T) {
	t.Parallel()
	dir, m := checkpointtest.Model(t, func(*moe.Config) {}, nil)
	var all []byte
	for _, p := range m.Parameters() {
		for _, v := range p.Weight.Floats() {
			all = binary.LittleEndian.AppendUint32(all, math.Float32bits(v))
		}
	}
	for began, want := range map[string]string{
		checkpointtest.WeightsHash(m.Parameters()): "", fmt.Sprintf("%x", sha256.Sum256(all)): "", fmt.Sprintf("%x",
			sha256.Sum256(all[4:])): "restore those weights",
	} {
		r := &run{ranks: oneRank(t), start: start{initial: checkpoint.ModelDir{Dir: dir}},
			config: Config{InitializeFrom: dir},
			state:  checkpoint.State{Spikes: &spikes.State{Began: began}}}
		if err := r.findInitial(context.Background()); (err == nil) != (want == "") || err != nil &&
			!strings.Contains(err.Error(), want) {
			t.Errorf("began with %s: %v", began, err)
		}
	}
}
