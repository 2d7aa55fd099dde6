package train

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/rundir"
)

// A run that starts with a model in a store, which fails now and then, is the run that starts with
// the local model, in any layout. The model is a copy of a checkpoint, the newest copy of a folder,
// or a Hugging Face model.
func TestInitializeFromStore(t *testing.T) {
	longtest.SkipIfShort(t)
	store := objectstest.S3(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const config = "model: {preset: mula-nano, num_hidden_layers: 1, hidden_size: 16, intermediate_size: 8, " +
		"num_experts: 4, num_experts_per_tok: 2}\nevaluate: {every: 0}\n"
	first := testConfig(t, plan, config+"steps: 2\nlayout: {expert_dp: 2, ep: 2}\n")
	saved := mustRun(t, first, Options{}).Checkpoint
	objectstest.Upload(t, saved, "*", "s3://bucket/run/"+filepath.Base(saved))
	objectstest.Upload(t, saved, "config.json", "s3://bucket/hf")
	objectstest.Upload(t, saved, "model*", "s3://bucket/hf")
	store.Proxy.Disturb(objectstest.Repeat(17, map[int64]objectstest.Fault{
		3: {Status: http.StatusServiceUnavailable}, 8: {Cut: 1000}, 13: {Lose: true}}))
	for _, layout := range []string{"expert_dp: 1, ep: 1", "expert_dp: 1, ep: 4", "expert_dp: 2, ep: 2"} {
		start := func(from string) Config {
			c := testConfig(t, plan, config+"steps: 1\nschedule: {warmup_steps: 0}\nlayout: {"+layout+"}\n")
			c.InitializeFrom = from
			mustRun(t, c, Options{})
			return c
		}
		local := start(first.Output)
		for _, url := range []string{"s3://bucket/run/", "s3://bucket/run/" + filepath.Base(saved), "s3://bucket/hf"} {
			c := start(url)
			sameRun(t, layout+", from "+url, local.Output, c.Output)
			if written, err := LoadConfig(filepath.Join(c.Output, rundir.ConfigFile)); err != nil ||
				written.InitializeFrom != url {
				t.Errorf("train.yaml of the run: %q, %v", written.InitializeFrom, err)
			}
		}
	}
}

// A run that began with a model in a store goes back to it, and only to its weights.
func TestSpikeRollbackToStore(t *testing.T) {
	objectstest.S3(t)
	plan := spikyPlan(t, t.TempDir(), "plan.json", nil, 20)
	model := func(seed uint64) string {
		c := testConfig(t, plan, spikyConfig)
		c.Seed = seed
		return mustRun(t, c, stopAfter(1)).Checkpoint
	}
	const url = "s3://bucket/model"
	first := model(1)
	objectstest.Upload(t, first, "*", url)
	config := func(from string) Config {
		c := testConfig(t, plan, spikyConfig+spikesYAML("rollback"))
		c.InitializeFrom, c.Checkpoint.Every = from, new(int64)
		return c
	}
	unbroken := config(first)
	mustRun(t, unbroken, Options{})
	c := config(url)
	mustRun(t, c, stopAfter(18)) // after the start of the skipped data
	objectstest.Upload(t, model(2), "*", url)
	if _, err := Run(context.Background(), c, Options{}); err == nil ||
		!strings.Contains(err.Error(), url+" has weights with SHA-256") {
		t.Errorf("another model: %v", err)
	}
	objectstest.Upload(t, first, "*", url)
	mustRun(t, c, Options{})
	sameRun(t, "resumed", unbroken.Output, c.Output)
}

// A model in a store that cannot be used is named before the first step.
func TestInitializeFromStoreRefuses(t *testing.T) {
	store := objectstest.S3(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	saved := mustRun(t, testConfig(t, plan, "steps: 1\nschedule: {warmup_steps: 0}\n"), Options{}).Checkpoint
	whole, err := os.ReadFile(filepath.Join(saved, modelFile))
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(whole)
	flipped[len(flipped)-9] ^= 1
	put := func(name string, data []byte) {
		t.Helper()
		if err := objects.WriteFile(t.Context(), "s3://bucket/"+name, data); err != nil {
			t.Fatal(err)
		}
	}
	objectstest.Upload(t, saved, "*", "s3://bucket/flipped/step-00000001")
	put("flipped/step-00000001/"+modelFile, flipped)
	objectstest.Upload(t, saved, "*", "s3://bucket/incomplete/step-00000001")
	if err := objects.Remove(t.Context(), "s3://bucket/incomplete/step-00000001/manifest.json"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"short", "missing", "forbidden"} {
		objectstest.Upload(t, saved, "config.json", "s3://bucket/"+name)
	}
	put("short/"+modelFile, whole[:len(whole)-1])
	put("forbidden/"+modelFile, whole)
	other, _ := checkpointtest.Model(t, nil, map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t)})
	objectstest.Upload(t, other, "*", "s3://bucket/other")
	store.Proxy.Disturb(func(r *http.Request) (f objectstest.Fault) {
		if strings.HasSuffix(r.URL.Path, "/forbidden/"+modelFile) {
			f.Status = http.StatusForbidden
		}
		return f
	})
	for from, want := range map[string]string{
		"s3://bucket/flipped":                  "s3://bucket/flipped/step-00000001/" + modelFile + " has SHA-256",
		"s3://bucket/incomplete":               checkpoint.ErrNone.Error(),
		"s3://bucket/incomplete/step-00000001": "is an incomplete checkpoint",
		"s3://bucket/short":                    "s3://bucket/short/" + modelFile,
		"s3://bucket/missing":                  "s3://bucket/missing",
		"s3://bucket/forbidden":                "s3://bucket/forbidden/" + modelFile + ": 403 Forbidden",
		"s3://bucket/other":                    "the model's tokenizer has SHA-256",
		"s3://bucket/nothing":                  "s3://bucket/nothing: " + checkpoint.ErrNone.Error(),
		"unknown://bucket/model":               `unknown scheme "unknown"`,
	} {
		c := testConfig(t, plan, "")
		c.InitializeFrom = from
		_, err := Run(context.Background(), c,
			Options{Progress: func(Progress) { t.Errorf("%s: a step was made", from) }})
		if err == nil || !strings.Contains(err.Error(), "initialize_from: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", from, err, want)
		}
	}
}
