package train

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/longtest"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
)

// backgroundConfig is a run whose checkpoints are written in the background, each of them before
// the next one is due if hooks.atStep is waitForSave.
const backgroundConfig = "steps: 7\ncheckpoint: {every: 3, keep: 9, background: true}\nevaluate: {every: 0}\n"

// waitForSave waits before each step for the part of the checkpoint that this rank writes.
func waitForSave(r *run) {
	for r.saving != nil && !r.saving.Done() {
		time.Sleep(time.Millisecond)
	}
}

// sameCheckpoint compares all files of a step's checkpoint in two runs.
func sameCheckpoint(t *testing.T, step int64, want, got string) {
	t.Helper()
	dir := filepath.Join(checkpoint.DirName, checkpoint.Name(step))
	checkpointtest.SameFiles(t, fmt.Sprint("step ", step), filepath.Join(want, dir), filepath.Join(got, dir))
}

// A checkpoint that is written in the background has the bytes of a checkpoint that is written
// while the run waits, for one and several ranks, weights that are averaged, bfloat16 weights, and
// several sizes of state. The copy has the size of the estimate.
func TestBackgroundBytes(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for i, more := range []string{"", "optimizer: {name: schedule_free_adamw}\nschedule: {name: constant, " +
		"learning_rate: 3e-3, warmup_steps: 2}\n", "precision: bf16_mixed\n", "precision: bf16_compact\n",
		"optimizer: {name: muon}\n"} {
		l := LayoutConfig{DP: 1, EP: 1}
		if i > 0 {
			l = LayoutConfig{DP: 2, EP: 2}
		}
		c := ranksConfig(t, plan, l, more+backgroundConfig)
		results := map[bool]Result{}
		outputs := map[bool]string{}
		for _, background := range []bool{false, true} {
			c.Output, c.Checkpoint.Background = filepath.Join(t.TempDir(), "run"), background
			outputs[background] = c.Output
			var mu sync.Mutex
			copied := map[int]int64{} // bytes of each rank
			count := func(r *run) {
				waitForSave(r)
				mu.Lock()
				defer mu.Unlock()
				copied[r.ranks.Rank()] = 4 * int64(len(r.snapshot))
			}
			results[background] = mustRun(t, c, Options{atStep: count, Warn: func(text string) { t.Error(text) }})
			total := int64(0)
			for _, bytes := range copied {
				total += bytes
			}
			want := c.memory(c.MicroBatchSize, 16, 0).Checkpoint * int64(l.DP*l.EP)
			if want-total < 0 || want-total >= int64(l.DP*l.EP) || background != (want > 0) {
				t.Errorf("%d: the ranks copy %d bytes, the estimate says %d", i, total, want)
			}
		}
		if results[true].Weights != results[false].Weights {
			t.Errorf("%d: weights %.16s…, want %.16s…", i, results[true].Weights, results[false].Weights)
		}
		for _, step := range []int64{3, 6, 7} {
			sameCheckpoint(t, step, outputs[false], outputs[true])
		}
	}
}

// Steps do not wait for a checkpoint in the background: the file system stops at its first file
// until four more steps have ended. The checkpoint has the weights of its step, not newer ones. The
// checkpoint that is due meanwhile is not written. A file is written with few large writes, because
// each write that blocks delays a step.
func TestBackgroundDoesNotStopSteps(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1},
		"steps: 9\ncheckpoint: {every: 3, keep: 9}\nevaluate: {every: 0}\n"+spikesYAML("skip"))
	mustRun(t, c, Options{})
	want := c.Output
	c.Output, c.Checkpoint.Background = filepath.Join(t.TempDir(), "run"), true
	release := make(chan struct{})
	var mu sync.Mutex
	writes := map[string]int{} // of each file
	defer func() { atomicfile.Fault = nil }()
	atomicfile.Fault = func(op atomicfile.Op, path string) error {
		if op == atomicfile.OpWrite && strings.Contains(path, checkpoint.Name(3)) {
			mu.Lock()
			writes[filepath.Base(path)]++
			mu.Unlock()
			<-release
		}
		return nil
	}
	var warnings []string
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }, atStep: func(r *run) {
		if r.state.Step == 7 && r.leads() {
			close(release)
		}
		if r.state.Step >= 7 {
			waitForSave(r)
		}
	}})
	if len(warnings) != 1 || !strings.Contains(warnings[0], "no checkpoint is written after step 6, because "+
		checkpoint.Name(3)+" is still being written") {
		t.Errorf("warnings %q", warnings)
	}
	if names := checkpointsIn(t, c.Output); !slices.Equal(names, []string{checkpoint.Name(9), checkpoint.Name(3)}) {
		t.Errorf("checkpoints %v", names)
	}
	sameCheckpoint(t, 3, want, c.Output)
	sameCheckpoint(t, 9, want, c.Output)
	for name, n := range writes { // the first write of tensors has the header, too
		if n > 2 {
			t.Errorf("%d writes to %s", n, name)
		}
	}
	if len(writes) < 5 {
		t.Errorf("writes to %d files", len(writes))
	}
}

// A checkpoint in the background that fails at any file operation does not stop the run: the next
// one is complete, nothing partial stays, and the run ends like an unbroken run.
func TestBackgroundFaults(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1}, crashConfig+backgroundConfig)
	unbroken := c.Output
	type operation struct {
		op   atomicfile.Op
		name string // of the file; of the temporary directory without its random part
	}
	var mu sync.Mutex
	defer func() { atomicfile.Fault = nil }()
	// fault calls f before the operations on the first checkpoint.
	fault := func(f func(o operation) error) {
		atomicfile.Fault = func(op atomicfile.Op, path string) error {
			mu.Lock()
			defer mu.Unlock()
			if !strings.Contains(path, checkpoint.Name(3)) {
				return nil
			}
			name := filepath.Base(path)
			if strings.HasPrefix(name, ".") {
				name = "the directory"
			}
			return f(operation{op, name})
		}
	}
	var operations []operation
	fault(func(o operation) error {
		if !slices.Contains(operations, o) {
			operations = append(operations, o)
		}
		return nil
	})
	mustRun(t, c, Options{atStep: waitForSave})
	if len(operations) < 30 {
		t.Fatalf("%d operations", len(operations))
	}
	for i, failing := range operations {
		if i%longtest.ShortRounds(4, 1) != 0 {
			continue
		}
		c.Output = filepath.Join(t.TempDir(), "run")
		failed := false
		fault(func(o operation) error {
			if failed = failed || o == failing; failed {
				return syscall.ENOSPC
			}
			return nil
		})
		var warnings []string
		mustRun(t, c, Options{atStep: waitForSave, Warn: func(text string) { warnings = append(warnings, text) }})
		what := fmt.Sprintf("%s of %s failed", failing.op, failing.name)
		if len(warnings) != 1 || !strings.Contains(warnings[0], "saving checkpoint "+checkpoint.Name(3)) ||
			!strings.Contains(warnings[0], "no space left on device; the run continues") {
			t.Errorf("%s: warnings %q", what, warnings)
		}
		names := checkpointsIn(t, c.Output)
		if !slices.Equal(names, []string{checkpoint.Name(7), checkpoint.Name(6)}) {
			t.Errorf("%s: checkpoints %v", what, names)
			continue
		}
		sameCheckpoint(t, 6, unbroken, c.Output)
		if left, _ := filepath.Glob(filepath.Join(c.Output, checkpoint.DirName, ".*")); len(left) > 0 {
			t.Errorf("%s: left behind %v", what, left)
		}
	}
}
