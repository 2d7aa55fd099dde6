package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem/faultfs"
	"mula/internal/longtest"
	"mula/internal/testwait"
	"mula/shards"
)

// kills is how often a test kills a command.
var kills = longtest.Rounds(8, 20)

// mula starts the command in dir as a process of its own.
func mula(dir string, args ...string) *exec.Cmd {
	c := exec.Command("mula", args...)
	c.Dir = dir
	return c
}

func mustRun(t *testing.T, dir string, args ...string) string {
	t.Helper()
	out, err := mula(dir, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("mula %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// A killer kills runs of a command at random moments.
type killer struct {
	random *rand.Rand
	span   time.Duration // kills come within it
	inTime int           // kills that came before the end of the run
}

// newKiller makes a killer of runs that take about as long as this one takes.
func newKiller(seed uint64, run func()) *killer {
	start := time.Now()
	run()
	return &killer{random: rand.New(rand.NewPCG(seed, 1)), span: time.Since(start)}
}

// kill runs the command and kills it. Runs take longer or shorter as other work on the machine
// comes and goes: the span follows them.
func (k *killer) kill(t *testing.T, dir string, args ...string) {
	t.Helper()
	c := mula(dir, args...)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Duration(k.random.Float64() * float64(k.span)))
	c.Process.Signal(syscall.SIGKILL)
	err := c.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil:
		k.span /= 2
	case errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL:
		k.inTime++
		k.span = k.span * 12 / 10
	default:
		t.Fatalf("mula %s: %v\n%s", strings.Join(args, " "), err, out.String())
	}
}

// enough fails the test if it says little, since most runs were over before they were killed.
func (k *killer) enough(t *testing.T) {
	t.Helper()
	t.Logf("%d of %d kills came before the end", k.inTime, kills)
	if k.inTime < kills/4 {
		t.Errorf("only %d of %d kills came before the end", k.inTime, kills)
	}
}

// prepared is a new folder with documents, a tokenizer, a shard and the configurations of a small
// job. They are made once, and copied.
func prepared(t *testing.T) string {
	t.Helper()
	preparedOnce.Do(func() { preparedFiles = contents(t, prepare(t)) })
	if len(preparedFiles) == 0 {
		t.Fatal("they could not be made for an earlier test")
	}
	dir := t.TempDir()
	for name, content := range preparedFiles {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content),
			0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

var (
	preparedOnce  sync.Once
	preparedFiles map[string]string // by name in the folder
)

func prepare(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := writeCorpus(filepath.Join(dir, "docs.jsonl"), 600, 1); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"blend.yaml": "sequence_length: 32\nvalidation: 0.05\nsources:\n  - {name: a, shards: [shards/a]}\n",
		"train.yaml": "output: run\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 12\nseed: 3\ncheckpoint: " +
			"{every: 2, keep: 2}\nevaluate: {every: 6, samples: 2}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	mustRun(t, dir, "tokenizer", "train", "--vocab-size", "400", "docs.jsonl")
	mustRun(t, dir, "tokenize", "--tokenizer", "tokenizer.json", "--output", "shards/a", "docs.jsonl")
	return dir
}

// contents reads every file below dir that is under a final name.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(path, atomicfile.TempSuffix) {
			return err
		}
		data, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		files[name] = string(data)
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return files
}

// A killed `mula tokenize` leaves a shard that is whole, or none that any command accepts.
func TestKilledTokenize(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := prepared(t)
	whole := tokenizeOutput(t, filepath.Join(dir, "shards"))
	command := []string{"tokenize", "--tokenizer", "tokenizer.json", "--output", "killed/a", "docs.jsonl"}
	config := strings.ReplaceAll("sequence_length: 32\nsources:\n  - {name: a, shards: [killed/a]}\n", "\t", "")
	if err := os.WriteFile(filepath.Join(dir, "killed.yaml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	k := newKiller(1, func() { mustRun(t, dir, command...) })
	for range kills {
		if err := os.RemoveAll(filepath.Join(dir, "killed")); err != nil {
			t.Fatal(err)
		}
		k.kill(t, dir, command...)
		out, err := mula(dir, "blend", "--config", "killed.yaml", "--output", "killed.json").CombinedOutput()
		if err != nil {
			continue // refused
		}
		for name, content := range whole {
			if got := contents(t, filepath.Join(dir, "killed"))[name]; got != content {
				t.Fatalf("after a kill `mula blend` accepted a shard whose %s is not whole (%d of %d bytes)\n%s", name,
					len(got), len(content), out)
			}
		}
	}
	k.enough(t)
}

// A killed `mula blend` leaves the old plan or the new one.
func TestKilledBlend(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := prepared(t)
	path := filepath.Join(dir, "plan.json")
	plans := map[string]bool{}
	for _, seed := range []string{"1", "2"} {
		config := fmt.Sprintf("sequence_length: 32\nseed: %s\nsources:\n  - {name: a, shards: [shards/a]}\n", seed)
		if err := os.WriteFile(filepath.Join(dir, "seed"+seed+".yaml"), []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
		mustRun(t, dir, "blend", "--config", "seed"+seed+".yaml")
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		plans[string(data)] = true
	}
	k := newKiller(2, func() { mustRun(t, dir, "blend", "--config", "seed1.yaml") })
	for i := range kills {
		k.kill(t, dir, "blend", "--config", fmt.Sprintf("seed%d.yaml", 1+(i+1)%2))
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !plans[string(data)] {
			t.Fatalf("after a kill plan.json is neither the old nor the new plan:\n%s", data)
		}
		mustRun(t, dir, "peek", "--position", "0")
	}
	k.enough(t)
}

// A run of `mula train` that is killed twenty times, at any point, ends like an unbroken run.
func TestKilledTrain(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := prepared(t)
	mustRun(t, dir, "blend")
	k := newKiller(3, func() { mustRun(t, dir, "train") })
	k.span /= 3 // so that the kills are spread over runs that have begun, have gone on, and are nearly done
	whole := contents(t, filepath.Join(dir, "run"))
	if err := os.Rename(filepath.Join(dir, "run"), filepath.Join(dir, "whole")); err != nil {
		t.Fatal(err)
	}
	for range kills {
		k.kill(t, dir, "train")
		if _, err := os.Stat(filepath.Join(dir, "run/checkpoints/step-00000012")); err == nil {
			compareRuns(t, contents(t, filepath.Join(dir, "run")), whole)
			if err := os.RemoveAll(filepath.Join(dir, "run")); err != nil {
				t.Fatal(err)
			}
		}
	}
	mustRun(t, dir, "train")
	compareRuns(t, contents(t, filepath.Join(dir, "run")), whole)
	mustRun(t, dir, "verify", "run", "whole")
	k.enough(t)
}

// SIGINT and SIGTERM let `mula train` finish its step, save and exit with 3, or 0 with
// --stop-is-success. The same command then resumes the run, which ends like an unbroken run.
func TestStoppedTrain(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := prepared(t)
	writeFile(t, "sequence_length: 32\nsamples: 400000\nsources:\n  - {name: a, shards: [shards/a]}\n", dir,
		"blend.yaml")
	mustRun(t, dir, "blend")
	configure := func(output string, steps int) {
		writeFile(t, fmt.Sprintf("output: %s\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: %d\nschedule: "+
			"{decay_steps: 50}\ncheckpoint: {every: 0}\nevaluate: {every: 0}\n", output, steps), dir, "train.yaml")
	}
	configure("run", 100_000) // never reached
	for i, test := range []struct {
		sig  os.Signal
		args []string
		code int
	}{{os.Interrupt, nil, exitStopped}, {syscall.SIGTERM, nil, exitStopped},
		{syscall.SIGTERM, []string{"--stop-is-success"}, exitDone}} {
		sig := test.sig
		c := mula(dir, append([]string{"train"}, test.args...)...)
		log := filepath.Join(t.TempDir(), "log")
		out, err := os.Create(log)
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		said := func() string {
			text, _ := os.ReadFile(log)
			return string(text)
		}
		c.Stdout, c.Stderr = out, out
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		steps := func() int {
			data, _ := os.ReadFile(filepath.Join(dir, "run/metrics.jsonl"))
			return bytes.Count(data, []byte(`"learning_rate"`))
		}
		before := steps()
		ended := make(chan error, 1)
		go func() { ended <- c.Wait() }()
		testwait.Until(t, "three more steps are done", func() bool { return steps() >= before+3 || len(ended) > 0 })
		if i == 0 { // a SIGQUIT does not end the run
			if err := c.Process.Signal(syscall.SIGQUIT); err != nil {
				t.Fatal(err)
			}
			testwait.Until(t, "the stacks are written", func() bool {
				return strings.Contains(said(), "end of the stacks") || len(ended) > 0
			})
			if !strings.Contains(said(), "mula/train.") {
				t.Errorf("no function of package train is in the stacks:\n%s", said())
			}
		}
		if err := c.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; c.ProcessState.ExitCode() != test.code {
			t.Fatalf("%v %v: %v, want exit code %d\n%s", sig, test.args, err, test.code, said())
		}
		if !strings.Contains(said(), "stopped; run the same command to resume") {
			t.Fatalf("%v: the run was not stopped before its end:\n%s", sig, said())
		}
		checkpoints, err := filepath.Glob(filepath.Join(dir, "run/checkpoints/step-*"))
		if err != nil || len(checkpoints) != i+1 {
			t.Fatalf("%v: checkpoints %v, %v", sig, checkpoints, err)
		}
	}
	checkpoints, err := filepath.Glob(filepath.Join(dir, "run/checkpoints/step-*"))
	if err != nil {
		t.Fatal(err)
	}
	last := filepath.Base(checkpoints[len(checkpoints)-1])
	var step int
	if _, err := fmt.Sscanf(last, "step-%d", &step); err != nil {
		t.Fatal(err)
	}
	configure("whole", step)
	mustRun(t, dir, "train")
	got, want := contents(t, filepath.Join(dir, "run")), contents(t, filepath.Join(dir, "whole"))
	for _, name := range []string{"checkpoints/" + last + "/model.safetensors",
		"checkpoints/" + last + "/optimizer.safetensors", "fingerprints.jsonl"} {
		if want[name] == "" || got[name] != want[name] {
			t.Errorf("%s differs after three stops", name)
		}
	}
}

// compareRuns compares what does not depend on the time of day: the newest checkpoint and the
// fingerprints.
func compareRuns(t *testing.T, got, want map[string]string) {
	t.Helper()
	for _, name := range []string{"checkpoints/step-00000012/model.safetensors",
		"checkpoints/step-00000012/optimizer.safetensors",
		"checkpoints/step-00000012/state.json", "fingerprints.jsonl"} {
		if want[name] == "" {
			t.Fatalf("the whole run has no %s", name)
		}
		if got[name] != want[name] {
			t.Errorf("%s differs after kills", name)
		}
	}
}

// wholeShard reports whether a shard is complete.
func wholeShard(t *testing.T, prefix string) bool {
	t.Helper()
	s, err := shards.Open(prefix)
	if err != nil {
		return false
	}
	defer s.Close()
	return s.Verify(t.Context(), nil) == nil
}

// If the disk is full at any moment, the exit code is 1, the message names the cause, and there is
// no file under a final name.
func TestFullDisk(t *testing.T) {
	dir := prepared(t)
	mustRun(t, dir, "blend")
	t.Chdir(dir)
	for _, c := range []struct{ name, args, output string }{
		{"tokenizer train", "tokenizer train --vocab-size 300 --output out/tokenizer.json docs.jsonl", "out"},
		{"tokenize", "tokenize --tokenizer tokenizer.json --output out/a docs.jsonl", "out"},
		{"blend", "blend --output out/plan.json", "out"},
		{"hash", "hash --batch-size 4 --output out/log.jsonl", "out"},
	} {
		failures := 0
		for k := int64(1); ; k++ {
			if err := os.RemoveAll(c.output); err != nil {
				t.Fatal(err)
			}
			if c.name != "tokenize" { // which makes its folder
				if err := os.Mkdir(c.output, 0o777); err != nil {
					t.Fatal(err)
				}
			}
			nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC}
			code, _, stderr := callOn(t, faultfs.New(nth.Fault), strings.Fields(c.args)...)
			hit := nth.Failed()
			if hit == "" {
				if code != exitDone {
					t.Errorf("%s without a fault: exit %d, %s", c.name, code, stderr)
				}
				break
			}
			failures++
			if code != exitFailed || !strings.Contains(stderr, "no space left on device") {
				t.Errorf("%s, full at operation %d (%s): exit %d, %q", c.name, k, hit, code, stderr)
			}
			for name := range contents(t, c.output) {
				// A shard's data files may exist, but not its index, which marks it as complete.
				// The job's folder may exist for the same command.
				if c.name == "tokenize" && (filepath.Ext(name) != ".idx" || wholeShard(t, "out/a")) ||
					strings.HasPrefix(hit, string(faultfs.SyncDir)) {
					continue
				}
				t.Errorf("%s, full at operation %d (%s): left %s", c.name, k, hit, name)
			}
		}
		if failures < 4 {
			t.Errorf("%s: only %d operations could fail", c.name, failures)
		}
	}
}
