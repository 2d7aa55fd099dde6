package train

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"mula/blend/fingerprint"
	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/train/checkpoint"
	"mula/train/rundir"
)

// childEnv, when set, makes the test binary a training process: it names the train.yaml.
const childEnv = "MULA_TRAIN_CHILD"

func childMain() int {
	c, err := LoadConfig(os.Getenv(childEnv))
	if err == nil {
		_, err = Run(context.Background(), c, Options{})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// crashConfig is a run of a few milliseconds.
const crashConfig = "model: {preset: mula-nano, num_hidden_layers: 1, hidden_size: 16, intermediate_size: 8, " +
	"num_experts: 2, num_experts_per_tok: 1}\n"

// A process that is killed repeatedly at any moment leaves a run directory from which the run
// resumes without a difference: with one rank, and with four ranks that write their checkpoints
// together.
func TestKill(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for name, layout := range map[string]string{"one rank": "", "four ranks": "layout: {expert_dp: 2, ep: 2}\n"} {
		t.Run(name, func(t *testing.T) {
			config := crashConfig + "checkpoint: {every: 2, keep: 2, keep_every: 4, writers: 3}\n" +
				"evaluate: {every: 3, samples: 2}\n" + layout
			killAndResume(t, plan, config, func(run int) string {
				return strings.Replace(config, "keep: 2", fmt.Sprintf("keep: 2, background: %t", run%2 == 0), 1)
			}, func(c Config) {
				for _, name := range checkpointsIn(t, c.Output) {
					dir := filepath.Join(c.Output, checkpoint.DirName, name)
					if _, _, err := checkpoint.Find(context.Background(), dir); err != nil {
						t.Fatalf("left a checkpoint that is not whole: %v", err)
					}
				}
			})
		})
	}
}

// killAndResume starts runs, kills their processes at any moment and starts them again until they
// end, and compares each with an unbroken run. A run has the configuration that configOf returns
// for its number. killed is called after each kill.
func killAndResume(t *testing.T, plan, unbrokenConfig string, configOf func(run int) string, killed func(c Config)) {
	unbroken := testConfig(t, plan, unbrokenConfig)
	begin := time.Now()
	mustRun(t, unbroken, Options{})
	whole := time.Since(begin) + 20*time.Millisecond // and the start of a process; see below
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	kills := 0
	for run := 0; kills < 10; run++ {
		c := testConfig(t, plan, configOf(run))
		if err := os.MkdirAll(c.Output, 0o755); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(filepath.Dir(c.Output), "train.yaml")
		resolved, err := c.resolve(mustPlan(t, plan))
		if err != nil {
			t.Fatal(err)
		}
		if err := resolved.write(filesystem.OS{}, file); err != nil {
			t.Fatal(err)
		}
		for try := 0; ; try++ {
			if try == 500 {
				t.Fatal("the run does not come to its end")
			}
			var stderr strings.Builder
			child := exec.Command(executable)
			child.Env = append(os.Environ(), childEnv+"="+file)
			child.Stderr = &stderr
			if err := child.Start(); err != nil {
				t.Fatal(err)
			}
			// A busy machine can be much slower now than when whole was measured, so children get
			// more time the more of them died.
			wait := time.Duration(rand.Int64N(int64(whole) * int64(5+try) / 5))
			timer := time.AfterFunc(wait, func() { child.Process.Kill() })
			err := child.Wait()
			timer.Stop()
			if err == nil {
				break
			}
			if status, ok := child.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() {
				t.Fatalf("run %d, try %d: %v: %s", run, try, err, &stderr)
			}
			kills++
			killed(c)
		}
		sameRun(t, fmt.Sprint("run ", run), unbroken.Output, c.Output)
		if !c.Checkpoint.Background { // which may skip a checkpoint
			sameModels(t, fmt.Sprint("run ", run), unbroken.Output, c.Output)
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d kills", kills)
}

// If any file operation fails, and the disk is full from then on, the run ends with an error that
// names the cause. The existing checkpoints are complete, and no partial file stays. When it is
// started again, the run ends like an unbroken run.
func TestEveryFault(t *testing.T) {
	longtest.SkipIfShort(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	unbroken := testConfig(t, plan,
		crashConfig+"checkpoint: {every: 1, keep: 1}\nevaluate: {every: 1, samples: 1}\nsteps: 2\n")
	type operation struct {
		op   atomicfile.Op
		path string // in the run directory
	}
	var operations []operation
	c := unbroken
	within := func(path string) string { return strings.TrimPrefix(path, c.Output) }
	defer func() { atomicfile.Fault = nil }()
	atomicfile.Fault = func(op atomicfile.Op, path string) error {
		operations = append(operations, operation{op, within(path)})
		return nil
	}
	mustRun(t, unbroken, Options{})
	failed := map[atomicfile.Op]int{}
	for k, o := range operations {
		// Of many writes to one file in a row the last is enough, and of two checkpoints the
		// second, which has something to lose.
		if k < len(operations)-1 && operations[k+1] == o || strings.Contains(o.path, checkpoint.Name(1)) {
			continue
		}
		failed[o.op]++
		c.Output = filepath.Join(t.TempDir(), "run")
		n := 0
		atomicfile.Fault = func(op atomicfile.Op, path string) error {
			if n++; n == k+1 && (operation{op, within(path)}) != o {
				t.Errorf("operation %d is %s of %s, was %s of %s", n, op, within(path), o.op, o.path)
			}
			if n == k+1 || n > k && (op == atomicfile.OpWrite || op == atomicfile.OpCreate) {
				return syscall.ENOSPC
			}
			return nil
		}
		_, err := Run(context.Background(), c, Options{})
		atomicfile.Fault = nil
		what := fmt.Sprintf("%s of %s failed", o.op, o.path)
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("%s: error %v", what, err)
		}
		names := checkpointsIn(t, c.Output)
		for _, name := range names {
			if _, _, err := checkpoint.Find(context.Background(), filepath.Join(c.Output,
				checkpoint.DirName,
				name)); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
		if strings.Contains(o.path, checkpoint.Name(2)) && (len(names) == 0 ||
			!strings.Contains(err.Error(), "newest complete checkpoint is "+checkpoint.Name(1))) {
			t.Errorf("%s: error %q with checkpoints %v", what, err, names)
		}
		if left, _ := filepath.Glob(filepath.Join(c.Output, checkpoint.DirName, ".*")); len(left) > 0 {
			t.Errorf("%s: left behind %v", what, left)
		}
		mustRun(t, c, Options{})
		sameRun(t, what, unbroken.Output, c.Output)
		if t.Failed() {
			return
		}
	}
	for op, least := range map[atomicfile.Op]int{atomicfile.OpCreate: 8, atomicfile.OpWrite: 8, atomicfile.OpSync: 8,
		atomicfile.OpRename: 8, atomicfile.OpSyncDir: 6} {
		if failed[op] < least {
			t.Errorf("%s failed %d times only", op, failed[op])
		}
	}
	t.Logf("%d operations; failed %v", len(operations), failed)
}

// Before the first checkpoint appears, its records are on disk: their bytes, and their names in the
// run directory.
func TestRecordsBeforeCheckpoint(t *testing.T) {
	c := testConfig(t, makePlan(t, t.TempDir(), "plan.json", ""),
		crashConfig+"steps: 1\nschedule: {warmup_steps: 0}\nevaluate: {every: 0}\n")
	var trace []string
	defer func() { atomicfile.Fault = nil }()
	atomicfile.Fault = func(op atomicfile.Op, path string) error {
		name, err := filepath.Rel(c.Output, path)
		if err != nil {
			t.Error(err)
		}
		trace = append(trace, fmt.Sprint(op, " ", name))
		return nil
	}
	mustRun(t, c, Options{})
	published := slices.Index(trace, fmt.Sprint(atomicfile.OpRename, " ", filepath.Join(checkpoint.DirName,
		checkpoint.Name(1))))
	if published < 0 {
		t.Fatalf("no checkpoint in %q", trace)
	}
	for _, name := range []string{rundir.MetricsFile, fingerprint.LogFile} {
		written := slices.Index(trace, fmt.Sprint(atomicfile.OpWrite, " ", name))
		synced := slices.Index(trace, fmt.Sprint(atomicfile.OpSync, " ", name))
		named := -1
		if written >= 0 {
			named = written + slices.Index(trace[written:], fmt.Sprint(atomicfile.OpSyncDir, " ."))
		}
		if !(0 <= written && written < named && named < published && written < synced && synced < published) {
			t.Errorf("%s: written in operation %d, synced in %d, its directory in %d, checkpoint published in %d", name,
				written, synced, named, published)
		}
	}
}

// A checkpoint with any damage is refused by name, and the run resumes from the previous
// checkpoint, with the same end.
func TestDamagedCheckpoint(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = crashConfig + "checkpoint: {every: 2, keep: 5}\nevaluate: {every: 0}\n"
	unbroken := testConfig(t, plan, more)
	mustRun(t, unbroken, Options{})
	original := testConfig(t, plan, more)
	mustRun(t, original, stopAfter(5))

	damages := map[string]func(dir string) error{
		"manifest deleted": func(dir string) error { return os.Remove(filepath.Join(dir, manifestFile)) },
		"manifest of another step": func(dir string) error {
			data, err := os.ReadFile(filepath.Join(dir, "..", checkpoint.Name(4), manifestFile))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, manifestFile), data, 0o644)
		},
		"checkpoint of another step under this name": func(dir string) error {
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
			return os.CopyFS(dir, os.DirFS(filepath.Join(dir, "..", checkpoint.Name(4))))
		},
		"manifest without files": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, manifestFile), []byte(`{"format": 1, "step": 6, "files": {}}`),
				0o644)
		},
		"manifest with a path": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, manifestFile),
				[]byte(`{"format":1,"step":6,"files":{"../x":{},"state.json":{},"model.safetensors":{},"optimizer.safetensors":{}}}`), 0o644)
		},
		"manifest without format": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, manifestFile), []byte(`{"step": 6}`), 0o644)
		},
		"empty directory": func(dir string) error {
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
			return os.Mkdir(dir, 0o755)
		},
		"a file in its place": func(dir string) error {
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
			return os.WriteFile(dir, nil, 0o644)
		},
	}
	for _, name := range []string{modelFile, optimizerFile, stateFile, "config.json", generationFile, manifestFile} {
		edit := func(change func([]byte) []byte) func(string) error {
			return func(dir string) error {
				path := filepath.Join(dir, name)
				data, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				return os.WriteFile(path, change(data), 0o644)
			}
		}
		damages[name+": truncated"] = edit(func(b []byte) []byte { return b[:len(b)/2] })
		damages[name+": empty"] = edit(func([]byte) []byte { return nil })
		if name != manifestFile {
			damages[name+": a bit flipped"] = edit(func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
			damages[name+": deleted"] = func(dir string) error { return os.Remove(filepath.Join(dir, name)) }
			damages[name+": longer"] = edit(func(b []byte) []byte { return append(b, 0) })
		}
	}
	for what, damage := range damages {
		c := original
		c.Output = filepath.Join(t.TempDir(), "run")
		if err := os.CopyFS(c.Output, os.DirFS(original.Output)); err != nil {
			t.Fatal(err)
		}
		newest := filepath.Join(c.Output, checkpoint.DirName, checkpoint.Name(6))
		if err := damage(newest); err != nil {
			t.Fatal(err)
		}
		found, refused, err := checkpoint.Find(context.Background(), c.Output)
		if err != nil || found.Name() != checkpoint.Name(4) || len(refused) != 1 ||
			refused[0].Checkpoint != checkpoint.Name(6) {
			t.Fatalf("%s: load: %+v, refused %v, error %v", what, found, refused, err)
		}
		if file, _, ok := strings.Cut(what, ": "); ok && file != modelFile {
			continue // a run finds its checkpoint in the same way, and goes on alike whichever file is damaged
		}
		var warnings []string
		var resumed string
		mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) },
			Report: func(s Summary) { resumed = s.Resumed }})
		if resumed != checkpoint.Name(4) || len(warnings) != 1 || !strings.Contains(warnings[0], checkpoint.Name(6)) {
			t.Errorf("%s: resumed from %q with warnings %q", what, resumed, warnings)
		}
		var lines int
		for _, line := range readLines(t, filepath.Join(c.Output, rundir.MetricsFile)) {
			if r, ok := line["resumed"].(map[string]any); ok {
				lines++
				if refused, _ := r["refused"].([]any); len(refused) != 1 || r["checkpoint"] != checkpoint.Name(4) {
					t.Errorf("%s: metrics say %v", what, r)
				}
			}
		}
		if lines != 1 {
			t.Errorf("%s: %d lines about resuming", what, lines)
		}
		sameRun(t, what, unbroken.Output, c.Output)
		if _, _, err := checkpoint.Find(context.Background(), newest); err != nil {
			t.Errorf("%s: step 6 was not saved again: %v", what, err)
		}
		if t.Failed() {
			return
		}
	}

	// What cannot be read is not damaged: the run does not go on without it, and nothing is
	// removed.
	for what, test := range map[string]struct {
		change func(dir string) error
		want   string
	}{
		"checkpoint of a newer version": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, manifestFile), []byte(`{"format": 3, "step": 6}`), 0o644)
		}, "format 3, written by a newer version of mula"},
		"file that the system does not give": {func(dir string) error {
			path := filepath.Join(dir, modelFile)
			return errors.Join(os.Remove(path), os.Symlink(path, path))
		}, modelFile},
	} {
		c := original
		c.Output = filepath.Join(t.TempDir(), "run")
		if err := os.CopyFS(c.Output, os.DirFS(original.Output)); err != nil {
			t.Fatal(err)
		}
		newest := filepath.Join(c.Output, checkpoint.DirName, checkpoint.Name(6))
		if err := test.change(newest); err != nil {
			t.Fatal(err)
		}
		_, err := Run(context.Background(), c, Options{})
		for _, want := range []string{checkpoint.Name(6) + " cannot be read", test.want, "move it away"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v does not say %q", what, err, want)
			}
		}
		if names := checkpointsIn(t, c.Output); len(names) != 3 {
			t.Errorf("%s: checkpoints after the error: %v", what, names)
		}
	}

	// With every checkpoint damaged, the run cannot resume, and nothing is removed.
	c := original
	names := checkpointsIn(t, c.Output)
	if len(names) != 3 {
		t.Fatalf("checkpoints %v", names)
	}
	for _, name := range names {
		if err := os.Truncate(filepath.Join(c.Output, checkpoint.DirName, name, modelFile), 100); err != nil {
			t.Fatal(err)
		}
	}
	_, err := Run(context.Background(), c, Options{})
	if err == nil {
		t.Fatal("a run with all its checkpoints damaged began anew")
	}
	for _, name := range names {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("error %q does not name %s", err, name)
		}
	}
	if after := checkpointsIn(t, c.Output); len(after) != 3 {
		t.Errorf("checkpoints after the error: %v", after)
	}
	if _, _, err := checkpoint.Find(context.Background(), c.Output); err == nil {
		t.Error("a damaged checkpoint was loaded")
	}
	if _, _, err := checkpoint.Find(context.Background(), t.TempDir()); !errors.Is(err, checkpoint.ErrNone) {
		t.Errorf("no checkpoint: %v", err)
	}
	if _, _, err := checkpoint.Find(context.Background(), filepath.Join(t.TempDir(), "x")); !errors.Is(err,
		fs.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}

// What a killed process leaves behind is removed; what is not ours stays.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "")
	dir := filepath.Join(c.Output, checkpoint.DirName)
	for _, name := range []string{".step-00000002.tmp", ".step-00000001.old.tmp", "mine", ".mine"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, modelFile), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(c.Output, ".metrics.jsonl.123.tmp"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	mustRun(t, c, Options{})
	for name, want := range map[string]bool{
		"checkpoints/.step-00000002.tmp": false, "checkpoints/.step-00000001.old.tmp": false,
		".metrics.jsonl.123.tmp": false,
		"checkpoints/mine":       true, "checkpoints/.mine": true,
	} {
		if _, err := os.Stat(filepath.Join(c.Output, name)); (err == nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
}
