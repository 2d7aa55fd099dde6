package train

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"mula/internal/filesystem/faultfs"
	"mula/internal/longtest"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/train/checkpoint"
)

const copiedRun = crashConfig + "checkpoint: {every: 2, keep: 1, copies: s3://bucket/run/, keep_copies: 2}\n" +
	"evaluate: {every: 3, samples: 2}\n"

// copied lists the complete copies of s3://bucket/run.
func copied(t *testing.T) (names []string) {
	t.Helper()
	for e, err := range objects.List(t.Context(), "s3://bucket/run/") {
		if err != nil {
			t.Fatal(err)
		}
		if name, ok := strings.CutSuffix(e.URL, "/manifest.json"); ok {
			names = append(names, strings.TrimPrefix(name, "s3://bucket/run/"))
		}
	}
	return names
}

// A run that loses its folder continues from the copies in an object store, to the same weights,
// metrics and fingerprints. The store fails now and then.
func TestCopies(t *testing.T) {
	store := objectstest.S3(t)
	store.Proxy.Disturb(objectstest.Repeat(11, map[int64]objectstest.Fault{
		2: {Status: http.StatusServiceUnavailable}, 5: {Drop: true}, 8: {Lose: true}}))
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	unbroken := testConfig(t, plan, crashConfig+"checkpoint: {every: 2, keep: 1}\nevaluate: {every: 3, samples: 2}\n")
	mustRun(t, unbroken, Options{})

	c := testConfig(t, plan, copiedRun)
	mustRun(t, c, stopAfter(5))
	if got := copied(t); len(got) == 0 || got[len(got)-1] != "step-00000006" {
		t.Errorf("copies: %v", got)
	}
	if err := os.RemoveAll(c.Output); err != nil {
		t.Fatal(err)
	}
	if r := mustRun(t, c, Options{}); r.Resumed != "step-00000006" {
		t.Errorf("resumed from %q", r.Resumed)
	}
	sameRun(t, "from the copies", unbroken.Output, c.Output)
	if got := copied(t); !slices.Equal(got, []string{"step-00000006", "step-00000008"}) {
		t.Errorf("copies at the end: %v; want the newest two", got)
	}
}

// The models of old copies at multiples of checkpoint.keep_every stay in the store, also if a
// process is killed while it removes the rest. A damaged model is an error. A run that copies the
// step again replaces it.
func TestKeepEveryCopies(t *testing.T) {
	store := objectstest.S3(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, strings.ReplaceAll(copiedRun, "keep_copies: 2", "keep_copies: 1, keep_every: 4"))
	mustRun(t, c, stopAfter(1))
	weights := mustRun(t, c, stopAfter(3)).Weights // of step 4
	removed := 0
	store.Proxy.Disturb(func(r *http.Request) (f objectstest.Fault) {
		if r.Method == http.MethodDelete && strings.Contains(r.URL.Path, "/step-00000004/") {
			if removed++; removed > 2 { // the manifest, and another file
				f.Status = http.StatusForbidden
			}
		}
		return f
	})
	mustRun(t, c, stopAfter(5))
	ctx := t.Context()
	const kept = "s3://bucket/run/step-00000004"
	check := func(complete bool) {
		t.Helper()
		m, _, err := checkpoint.FindModel(ctx, kept)
		if err != nil || m.Checkpoint != nil {
			t.Fatalf("%+v, %v", m, err)
		}
		if same, got, err := m.HasWeights(ctx, weights); err != nil || !same {
			t.Errorf("weights %s, want %s; %v", got, weights, err)
		}
		left := false
		for name := range objectstest.Contents(t, kept) {
			left = left || strings.Contains(name, "optimizer") || strings.Contains(name, "records/")
		}
		if left == complete {
			t.Errorf("complete %v, but files that only resuming needs are left: %v", complete, left)
		}
	}
	check(false)
	store.Proxy.Disturb(nil)
	mustRun(t, c, Options{})
	check(true)
	if got := copied(t); !slices.Equal(got, []string{"step-00000008"}) {
		t.Errorf("copies at the end: %v", got)
	}

	const config = kept + "/config.json"
	data, _, err := objects.ReadFile(ctx, config, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	data[0] ^= 1
	if err := objects.WriteFile(ctx, config, data); err != nil {
		t.Fatal(err)
	}
	if _, _, err := checkpoint.FindModel(ctx, kept); err == nil ||
		!strings.Contains(err.Error(), config+" has SHA-256") {
		t.Errorf("a damaged model: %v", err)
	}
	if err := objects.Remove(ctx, "s3://bucket/run/step-00000008/manifest.json"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := checkpoint.FindModel(ctx, "s3://bucket/run"); !errors.Is(err, checkpoint.ErrNone) {
		t.Errorf("a folder with a model and no complete copy: %v", err)
	}
	c.Output = t.TempDir()
	if r := mustRun(t, c, stopAfter(3)); r.Resumed != "" {
		t.Errorf("resumed from %q, which is only a model", r.Resumed)
	}
	if got := copied(t); !slices.Contains(got, "step-00000004") {
		t.Errorf("copies after the second run: %v", got)
	}
}

// A copy without a manifest is not used. A damaged copy, and a store that cannot be reached, are
// errors.
func TestCopiesThatCannotBeUsed(t *testing.T) {
	store := objectstest.S3(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, copiedRun)
	mustRun(t, c, stopAfter(5)) // the last checkpoint of a run is always copied
	mustRun(t, c, Options{})
	fresh := func() (Result, error) {
		again := testConfig(t, plan, copiedRun)
		return Run(context.Background(), again, Options{})
	}
	ctx := t.Context()
	if err := objects.Remove(ctx, "s3://bucket/run/step-00000008/manifest.json"); err != nil {
		t.Fatal(err)
	}
	if r, err := fresh(); err != nil || r.Resumed != "step-00000006" {
		t.Errorf("without the newest manifest: resumed from %q, %v", r.Resumed, err)
	}
	const state = "s3://bucket/run/step-00000008/state.json"
	data, _, err := objects.ReadFile(ctx, state, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := objects.WriteFile(ctx, state, data); err != nil {
		t.Fatal(err)
	}
	if _, err := fresh(); err == nil || !strings.Contains(err.Error(), state) {
		t.Errorf("a damaged copy: %v", err)
	}
	store.Proxy.Disturb(func(*http.Request) objectstest.Fault {
		return objectstest.Fault{Status: http.StatusForbidden}
	})
	if _, err := fresh(); err == nil || !strings.Contains(err.Error(), "s3://bucket/run") {
		t.Errorf("a store that refuses: %v", err)
	}
	// A run that has begun goes on, and reports the missing copy at its end.
	store.Proxy.Disturb(func(r *http.Request) (f objectstest.Fault) {
		if r.Method != http.MethodGet {
			f.Status = http.StatusForbidden
		}
		return f
	})
	c = testConfig(t, plan, strings.ReplaceAll(copiedRun, "bucket/run/", "bucket/other"))
	var warned []string
	_, err = Run(context.Background(), c, Options{Warn: func(text string) { warned = append(warned, text) }})
	if err == nil || !strings.Contains(err.Error(), "the last checkpoint is complete, but not its copy") {
		t.Errorf("a store that refuses to write: %v", err)
	}
	if !slices.ContainsFunc(warned, func(text string) bool { return strings.Contains(text, "s3://bucket/other") }) {
		t.Errorf("warnings: %q", warned)
	}
	if got := checkpointsIn(t, c.Output); !slices.Equal(got, []string{"step-00000008"}) {
		t.Errorf("local checkpoints: %v", got)
	}
	// The same command copies it.
	store.Proxy.Disturb(nil)
	for range 2 {
		if _, err := Run(context.Background(), c, Options{}); err != nil {
			t.Error(err)
		}
		if _, err := objects.Stat(ctx, "s3://bucket/other/step-00000008/manifest.json"); err != nil {
			t.Error(err)
		}
	}
}

// A local checkpoint that cannot be read may be good, so its copy does not replace it.
func TestCopyDoesNotReplaceUnread(t *testing.T) {
	objectstest.S3(t)
	c := testConfig(t, makePlan(t, t.TempDir(), "plan.json", ""), copiedRun)
	mustRun(t, c, stopAfter(5))
	mark := filepath.Join(c.Output, checkpoint.DirName, "step-00000006", "mark") // a new folder would not have it
	if err := os.WriteFile(mark, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Run(t.Context(), c, Options{files: faultfs.FailOn(faultfs.Open, "state.json", syscall.EIO)})
	if err == nil || !strings.Contains(err.Error(), "may be complete") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(mark); err != nil {
		t.Errorf("the checkpoint was replaced: %v", err)
	}
}

// A process that is killed at any moment, and whose folder is lost each time, comes to its end with
// the weights, metrics and fingerprints of the unbroken run.
func TestKillWithLostFolders(t *testing.T) {
	longtest.SkipIfShort(t)
	objectstest.S3(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	killAndResume(t, plan, strings.ReplaceAll(copiedRun, ", copies: s3://bucket/run/, keep_copies: 2", ""),
		func(run int) string { return strings.ReplaceAll(copiedRun, "bucket/run", fmt.Sprint("bucket/", run)) },
		func(c Config) {
			if err := os.RemoveAll(c.Output); err != nil {
				t.Fatal(err)
			}
		})
}

// The model of a copy is the model of the checkpoint. The newest complete copy of a folder is used.
// An incomplete one, and a damaged one, are errors; the optimizer's state is not read.
func TestModelOfCopy(t *testing.T) {
	store := objectstest.S3(t)
	c := testConfig(t, makePlan(t, t.TempDir(), "plan.json", ""), copiedRun)
	mustRun(t, c, stopAfter(5))
	r := mustRun(t, c, Options{})
	ctx := t.Context()
	store.Proxy.Disturb(func(r *http.Request) (f objectstest.Fault) {
		if strings.HasSuffix(r.URL.Path, "optimizer.safetensors") && r.Method == http.MethodGet {
			f.Status = http.StatusForbidden
		}
		return f
	})
	const newest = "s3://bucket/run/step-00000008"
	for _, url := range []string{"s3://bucket/run/", newest} {
		m, _, err := checkpoint.FindModel(ctx, url)
		if err != nil || m.Dir != newest || m.Checkpoint.State.Step != 8 {
			t.Fatalf("%s: %+v, %v", url, m, err)
		}
		if found, err := m.Inspect(ctx, nil); err != nil || found.Weights != r.Weights {
			t.Errorf("%s: %+v, %v; want weights %s", url, found, err, r.Weights)
		}
	}
	if _, _, err := checkpoint.FindModel(ctx, "s3://bucket/none"); !errors.Is(err, checkpoint.ErrNone) {
		t.Errorf("a folder without copies: %v", err)
	}
	data, _, err := objects.ReadFile(ctx, newest+"/state.json", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := objects.WriteFile(ctx, newest+"/state.json", data); err != nil {
		t.Fatal(err)
	}
	if _, _, err := checkpoint.FindModel(ctx, "s3://bucket/run"); err == nil ||
		!strings.Contains(err.Error(), newest+"/state.json has SHA-256") {
		t.Errorf("a damaged copy: %v", err)
	}
	if err := objects.Remove(ctx, newest+"/manifest.json"); err != nil {
		t.Fatal(err)
	}
	if m, _, err := checkpoint.FindModel(ctx, "s3://bucket/run"); err != nil || m.Checkpoint.State.Step != 6 {
		t.Errorf("without the newest manifest: %+v, %v", m, err)
	}
	for range 2 { // with and without state.json
		if _, _, err := checkpoint.FindModel(ctx, newest); err == nil ||
			!strings.Contains(err.Error(), newest+" is an incomplete checkpoint") {
			t.Errorf("a copy without a manifest: %v", err)
		}
		if err := objects.Remove(ctx, newest+"/state.json"); err != nil {
			t.Fatal(err)
		}
	}
}
