package train

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"mula/internal/filesystem/faultfs"
	"mula/internal/longtest"
	"mula/train/checkpoint"
	"mula/train/group"
	"mula/train/report"
	"mula/train/rundir"
	"mula/xpu/comm"
)

// snapshotsConfig returns a run of ten steps with one checkpoint before its end, and a snapshot
// every two steps in a new folder.
func snapshotsConfig(t *testing.T, plan string, l LayoutConfig, more string) Config {
	t.Helper()
	c := ranksConfig(t, plan, l, crashConfig+"evaluate: {every: 0}\nsteps: 10\n"+more)
	c.Checkpoint.Every, c.Checkpoint.SnapshotEvery, c.Checkpoint.SnapshotDir = new(int64(5)), 2, t.TempDir()
	return c
}

// die runs until the ranks have done a number of steps, and then ends them at once, as a kill does.
func die(t *testing.T, c Config, hosts string, steps int64, o Options) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o.hosts = comm.NewHosts(strings.Fields(hosts))
	o.Progress = func(p Progress) {
		if p.Step == steps-1 {
			cancel()
		}
	}
	if _, err := Run(ctx, c, o); !errors.Is(err, context.Canceled) {
		t.Fatalf("%v; the run must be cancelled after %d steps", err, steps)
	}
}

// hostFolders returns the folders of the hosts that have snapshots.
func hostFolders(t *testing.T, c Config) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(c.Checkpoint.SnapshotDir, "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// snapshotBytes returns the bytes of the tensors in the files of the snapshot on all hosts. A file
// has the size of its header in its first eight bytes.
func snapshotBytes(t *testing.T, c Config) (size int64) {
	t.Helper()
	seen := map[string]bool{}
	paths, err := filepath.Glob(filepath.Join(c.Checkpoint.SnapshotDir, "*", "*", "snapshot-*", "*.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if name := filepath.Base(path); !seen[name] {
			seen[name] = true
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			size += int64(len(text)) - 8 - int64(binary.LittleEndian.Uint64(text))
		}
	}
	return size
}

// With several hosts, ranks send the files of each snapshot, and one byte for each piece of a file,
// more than with one host.
func TestSnapshotsTraffic(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	first := snapshotsConfig(t, plan, LayoutConfig{DP: 1, EP: 2}, "")
	sent := map[string]int64{}
	for _, hosts := range []string{"a a", "a b"} {
		c := first
		c.Output, c.Checkpoint.SnapshotDir = filepath.Join(t.TempDir(), "run"), t.TempDir()
		var mu sync.Mutex
		mustRun(t, c, Options{hosts: comm.NewHosts(strings.Fields(hosts)), ended: func(g *group.Group) {
			mu.Lock()
			defer mu.Unlock()
			for _, traffic := range g.World().Traffic() {
				if traffic.Operation == comm.OpSend {
					sent[hosts] += traffic.Bytes()
				}
			}
		}})
		if hosts == "a a" {
			continue
		}
		want := int64(0)
		lines := linesWith(t, c.Output, "snapshot")
		for _, line := range lines {
			size, _ := number(line, "snapshot.bytes")
			want += int64(size) + 4 // four files, each of one piece
		}
		if got := sent["a b"] - sent["a a"]; got != want || len(lines) != 4 {
			t.Errorf("%d snapshots send %d bytes, want %d", len(lines), got, want)
		}
	}
}

// loseHostFolder removes the folder of a host.
func loseHostFolder(t *testing.T, c Config, host string) {
	t.Helper()
	for _, path := range hostFolders(t, c) {
		if filepath.Base(path) == host {
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("host %s has no snapshots: %q", host, hostFolders(t, c))
}

// A run whose ranks have died, and that has lost any one host, resumes from its newest snapshot on
// a spare host, with the weights of an unbroken run. At the end the folders are empty.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, test := range []struct {
		layout            LayoutConfig
		hosts, lost, then string
		more              string
	}{
		{LayoutConfig{DP: 2, EP: 2}, "a a b b", "b", "a a c c", ""},
		{LayoutConfig{DP: 2, EP: 2}, "a a b b", "a", "c c b b", "precision: bf16_mixed\n"},
		{LayoutConfig{DP: 2, EP: 2}, "a b b c", "b", "a d d c", ""},
		{LayoutConfig{DP: 1, EP: 1}, "a", "", "a", ""},
	} {
		c := snapshotsConfig(t, plan, test.layout, test.more)
		unbroken := c
		unbroken.Output, unbroken.Checkpoint.SnapshotEvery = filepath.Join(t.TempDir(), "run"), 0
		want := mustRun(t, unbroken, Options{})
		die(t, c, test.hosts, 9, Options{Warn: func(text string) { t.Error(text) }})
		ranks := int64(c.Layout.Ranks())
		size := c.memory(c.MicroBatchSize, 16, 0).Snapshots / (2 * min(2, ranks)) * ranks
		if got := snapshotBytes(t, c); size-got < 0 || size-got >= ranks {
			t.Errorf("%+v: a snapshot has %d bytes, the estimate says %d", test, got, size)
		}
		if test.lost != "" {
			loseHostFolder(t, c, test.lost)
		}
		got := mustRun(t, c, Options{hosts: comm.NewHosts(strings.Fields(test.then)),
			Warn: func(text string) { t.Error(text) }})
		if got.Resumed != "snapshot-00000008" || got.Weights != want.Weights {
			t.Errorf("%+v: resumed from %s with weights %.16s…, want %.16s…", test, got.Resumed, got.Weights,
				want.Weights)
		}
		sameRun(t, test.hosts, unbroken.Output, c.Output)
		if r, err := report.Read(c.Output); err != nil || len(r.Spans) != 10 {
			t.Errorf("%+v: the report reads %v, %v", test, r, err)
		}
		sameCheckpoint(t, 10, unbroken.Output, c.Output)
		if left := hostFolders(t, c); len(left) > 0 {
			t.Errorf("%+v: %q are left", test, left)
		}
	}
}

// resume resumes a run on hosts. It returns the result and the warnings.
func resume(t *testing.T, c Config, hosts string) (Result, []string) {
	t.Helper()
	var warnings []string
	result := mustRun(t, c, Options{hosts: comm.NewHosts(strings.Fields(hosts)),
		Warn: func(text string) { warnings = append(warnings, text) }})
	return result, warnings
}

// Snapshots that cannot be used are refused with their reason, and the run resumes from the older
// checkpoint with equal results: changed files, two lost hosts of three, changed manifests. Changed
// files and manifests of one host do not matter if another host has all files, and damaged
// checkpoints do not if there is a snapshot.
func TestSnapshotsRefused(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	first := snapshotsConfig(t, plan, LayoutConfig{DP: 2, EP: 2}, "")
	unbroken := first
	unbroken.Output, unbroken.Checkpoint.SnapshotEvery = filepath.Join(t.TempDir(), "run"), 0
	mustRun(t, unbroken, Options{})
	each := func(t *testing.T, c Config, pattern string) {
		paths, err := filepath.Glob(filepath.Join(c.Checkpoint.SnapshotDir, "*", pattern))
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s: %v, %v", pattern, paths, err)
		}
		for _, path := range paths {
			flip(t, path)
		}
	}
	for name, test := range map[string]struct {
		hosts, resumed, warning string
		damage                  func(t *testing.T, c Config)
	}{
		"weights": {"a a b b", "step-00000005", "snapshot-00000008 cannot be used; using an older state: ",
			func(t *testing.T, c Config) { each(t, c, "*/snapshot-*/model-00001-of-*") }},
		"state": {"a a b b", "step-00000005", "manifest.json says",
			func(t *testing.T, c Config) { each(t, c, "*/snapshot-*/optimizer-*") }},
		"manifests": {"a a b b", "step-00000005", "host b: ",
			func(t *testing.T, c Config) { each(t, c, "*/snapshot-*/manifest.json") }},
		"one manifest": {"a a b b", "snapshot-00000008", "",
			func(t *testing.T, c Config) { each(t, c, "b/snapshot-*/manifest.json") }},
		"files of one host": {"a a b b", "snapshot-00000008", "snapshot-00000008 is damaged; looking for intact copies",
			func(t *testing.T, c Config) { each(t, c, "b/snapshot-*/*.safetensors") }},
		"one file of each host": {"a a b b", "snapshot-00000008", "is damaged; looking for intact copies",
			func(t *testing.T, c Config) {
				each(t, c, "a/snapshot-*/model-0000[13]-of-*")
				each(t, c, "b/snapshot-*/model-0000[24]-of-*")
			}},
		"checkpoint": {"a a b b", "snapshot-00000008", "checkpoint step-00000005 is damaged", damageCheckpoint},
		"two hosts": {"a b b c", "step-00000005", "of its 8 files are on none of the hosts",
			func(t *testing.T, c Config) {
				loseHostFolder(t, c, "b")
				loseHostFolder(t, c, "c")
			}},
		"no checkpoint": {"a a b b", "", "", func(t *testing.T, c Config) { // the user has removed it
			if err := os.RemoveAll(filepath.Join(c.Output, checkpoint.DirName)); err != nil {
				t.Fatal(err)
			}
		}},
		"other run": {"a a b b", "step-00000005", "", func(t *testing.T, c Config) {
			if err := os.Remove(filepath.Join(c.Output, rundir.SnapshotsFile)); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := first
			c.Output, c.Checkpoint.SnapshotDir = filepath.Join(t.TempDir(), "run"), t.TempDir()
			die(t, c, test.hosts, 9, Options{})
			test.damage(t, c)
			result, warnings := resume(t, c, test.hosts)
			if result.Resumed != test.resumed || !strings.Contains(strings.Join(warnings, "\n"), test.warning) ||
				test.warning == "" && test.resumed != "" && len(warnings) > 0 {
				t.Errorf("resumed from %q, warnings %q", result.Resumed, warnings)
			}
			sameRun(t, name, unbroken.Output, c.Output)
		})
	}
}

// A run with damaged checkpoints and a damaged snapshot does not start.
func TestSnapshotsAllDamaged(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := snapshotsConfig(t, plan, LayoutConfig{DP: 1, EP: 2}, "")
	die(t, c, "a b", 9, Options{})
	damageCheckpoint(t, c)
	paths, err := filepath.Glob(filepath.Join(c.Checkpoint.SnapshotDir, "*", "*", "snapshot-*", "model-00001-of-*"))
	if err != nil || len(paths) != 2 {
		t.Fatalf("%q, %v", paths, err)
	}
	for _, path := range paths {
		flip(t, path)
	}
	_, err = Run(t.Context(), c, Options{hosts: comm.NewHosts([]string{"a", "b"})})
	if !errors.Is(err, checkpoint.ErrAllDamaged) {
		t.Errorf("%v, want that every checkpoint is damaged", err)
	}
}

// damageCheckpoint changes a bit of the state of the only checkpoint.
func damageCheckpoint(t *testing.T, c Config) {
	t.Helper()
	flip(t, filepath.Join(c.Output, checkpoint.DirName, "step-00000005", "state.json"))
}

// Ranks that die at any file operation of a snapshot leave this snapshot or the older one.
func TestSnapshotsDeath(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	config := snapshotsConfig(t, plan, LayoutConfig{DP: 1, EP: 2}, "")
	config.Steps, config.Checkpoint.Every = 5, new(int64)
	unbroken := config
	unbroken.Output, unbroken.Checkpoint.SnapshotEvery = filepath.Join(t.TempDir(), "run"), 0
	mustRun(t, unbroken, Options{})
	resumed := map[string]int{}
	var mu sync.Mutex
	for k := int64(1); ; k += int64(longtest.Rounds(4, 1)) {
		c := config
		c.Output, c.Checkpoint.SnapshotDir = filepath.Join(t.TempDir(), "run"), t.TempDir()
		ctx, cancel := context.WithCancel(t.Context())
		nth := &faultfs.Nth{K: k, Err: syscall.EIO, After: true}
		last, begun := "", false
		nth.Counts = func(op faultfs.Op, path string) bool {
			mu.Lock()
			defer mu.Unlock()
			// of several writes to a file the first; the end of the run removes the snapshot
			again := last == string(op)+path
			last = string(op) + path
			newer := strings.Contains(path, "snapshot-00000004") && !strings.Contains(path, ".old")
			begun = begun || newer
			replaces := begun && op == faultfs.Rename && strings.Contains(path, "snapshot-00000002.old")
			return !op.Reads() && !again && (newer && op != faultfs.Remove || replaces)
		}
		_, err := Run(ctx, c, Options{hosts: comm.NewHosts([]string{"a", "b"}),
			memory: faultfs.New(func(op faultfs.Op, path string) error {
				err := nth.Fault(op, path)
				if err != nil {
					cancel()
				}
				return err
			})})
		cancel()
		if nth.Failed() == "" {
			break
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("%s: %v", nth.Failed(), err)
		}
		loseHostFolder(t, c, "b")
		left, _ := filepath.Glob(filepath.Join(c.Checkpoint.SnapshotDir, "*", "*", "*"))
		result, warnings := resume(t, c, "a c")
		if resumed[result.Resumed]++; result.Resumed == "" {
			t.Errorf("%s: not resumed from %v: %q", nth.Failed(), left, warnings)
		}
		sameRun(t, nth.Failed(), unbroken.Output, c.Output)
		if t.Failed() {
			return
		}
	}
	if resumed["snapshot-00000002"] < longtest.Rounds(7, 28) || resumed["snapshot-00000004"] > 4 {
		t.Errorf("resumed from %v", resumed)
	}
}

// A run that resumed from an older state, on hosts without the snapshots, does not use them when
// their hosts return: it has replaced the records of their steps, and the new records may be wrong.
func TestSnapshotsOfReturningHosts(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := snapshotsConfig(t, plan, LayoutConfig{DP: 1, EP: 2, CheckReplicasEvery: 100}, "")
	unbroken := c
	unbroken.Output, unbroken.Checkpoint.SnapshotEvery = filepath.Join(t.TempDir(), "run"), 0
	mustRun(t, unbroken, Options{})
	die(t, c, "a b", 9, Options{})
	memory := c.Checkpoint.SnapshotDir
	for name, there := range map[string]func(c Config){ // from the checkpoint of step 5
		"after 6 steps": func(c Config) { die(t, c, "c d", 6, Options{}) },
		"after 9 steps": func(c Config) { die(t, c, "c d", 9, Options{}) },
		"wrong": func(c Config) {
			_, err := Run(t.Context(), c, Options{hosts: comm.NewHosts([]string{"c", "d"}), atStep: func(r *run) {
				if r.state.Step == 7 && r.leads() {
					for _, b := range r.model.Buckets() {
						if !b.Divided {
							b.Weight.Floats()[0] += 0.25
							break
						}
					}
				}
			}})
			if err == nil || !strings.Contains(err.Error(), "replicated weights differ") {
				t.Fatalf("%v; the comparison of replicas must fail", err)
			}
		},
	} {
		again := c
		again.Output, again.Checkpoint.SnapshotDir = filepath.Join(t.TempDir(), "run"), t.TempDir()
		if err := os.CopyFS(again.Output, os.DirFS(c.Output)); err != nil {
			t.Fatal(err)
		}
		there(again)
		if err := os.CopyFS(again.Checkpoint.SnapshotDir, os.DirFS(memory)); err != nil {
			t.Fatal(err)
		}
		if result, _ := resume(t, again, "a b"); result.Resumed != "step-00000005" {
			t.Errorf("%s: resumed from %q, want the checkpoint", name, result.Resumed)
		}
		sameRun(t, name, unbroken.Output, again.Output)
	}
}

// A full file system of one host does not end the run. The older snapshot stays, and one warning
// names the host's file.
func TestSnapshotsFull(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := snapshotsConfig(t, plan, LayoutConfig{DP: 1, EP: 2}, "")
	c.Checkpoint.Every = new(int64)
	unbroken := c
	unbroken.Output, unbroken.Checkpoint.SnapshotEvery = filepath.Join(t.TempDir(), "run"), 0
	mustRun(t, unbroken, Options{})
	var mu sync.Mutex
	full := false
	memory := faultfs.New(func(op faultfs.Op, path string) error {
		mu.Lock()
		defer mu.Unlock()
		full = full || strings.Contains(path, "snapshot-00000004")
		if full && op == faultfs.Write && strings.Contains(path, "/b/") {
			return syscall.ENOSPC
		}
		return nil
	})
	var warnings []string
	die(t, c, "a b", 9, Options{memory: memory, Warn: func(text string) { warnings = append(warnings, text) }})
	if len(warnings) != 1 || !strings.Contains(warnings[0], "writing snapshot-00000004: rank ") ||
		!strings.Contains(warnings[0], syscall.ENOSPC.Error()) {
		t.Errorf("warnings %q", warnings)
	}
	result, _ := resume(t, c, "a b")
	if result.Resumed != "snapshot-00000002" {
		t.Errorf("resumed from %q", result.Resumed)
	}
	sameRun(t, "full", unbroken.Output, c.Output)
}

// A snapshot is loaded by any number of ranks, as a checkpoint is: the run equals a run that was
// stopped at the step of the snapshot.
func TestSnapshotsReshard(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := snapshotsConfig(t, plan, LayoutConfig{DP: 2, EP: 2}, "")
	stopped := c
	stopped.Output, stopped.Checkpoint.SnapshotEvery = filepath.Join(t.TempDir(), "run"), 0
	mustRun(t, stopped, stopAfter(7))
	stopped.Layout.DP = 1
	want := mustRun(t, stopped, Options{})

	die(t, c, "a a b b", 9, Options{})
	loseHostFolder(t, c, "b")
	c.Layout.DP = 1
	got, _ := resume(t, c, "a a")
	if got.Resumed != "snapshot-00000008" || got.Weights != want.Weights {
		t.Errorf("resumed from %q with weights %.16s…, want %.16s…", got.Resumed, got.Weights, want.Weights)
	}
}

// A run that went back because of a spike does not resume from a snapshot of before, which a host
// still has that was away at that time.
func TestSnapshotsRollback(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	c := testConfig(t, spikyPlan(t, t.TempDir(), "plan.json", nil, 20),
		spikyConfig+spikesYAML("rollback")+"layout: {expert_dp: 2}\n")
	unbroken := c
	unbroken.Output = filepath.Join(t.TempDir(), "run")
	mustRun(t, unbroken, Options{})
	c.Checkpoint.SnapshotEvery, c.Checkpoint.SnapshotDir = 3, t.TempDir()
	die(t, c, "a b", 19, Options{})
	old := t.TempDir()
	if err := os.CopyFS(old, os.DirFS(c.Checkpoint.SnapshotDir)); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(c.Checkpoint.SnapshotDir); err != nil {
		t.Fatal(err)
	}
	// From the checkpoint of step 15 to the spike of step 20, back to step 15, and death there.
	ctx, cancel := context.WithCancel(t.Context())
	var steps []int64
	_, err := Run(ctx, c, Options{hosts: comm.NewHosts([]string{"a", "b"}), Progress: func(p Progress) {
		if steps = append(steps, p.Step); len(steps) == 6 {
			cancel()
		}
	}})
	cancel()
	if !errors.Is(err, context.Canceled) || !slices.Equal(steps, []int64{15, 16, 17, 18, 19, 15}) {
		t.Fatalf("%v, steps %v", err, steps)
	}
	if err := os.CopyFS(c.Checkpoint.SnapshotDir, os.DirFS(old)); err != nil {
		t.Fatal(err)
	}
	result, _ := resume(t, c, "a b")
	if result.Resumed != "step-00000015" {
		t.Errorf("resumed from %q", result.Resumed)
	}
	sameRun(t, "rollback", unbroken.Output, c.Output)
}
