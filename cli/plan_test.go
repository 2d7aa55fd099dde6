package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/blend/plantest"
	"mula/shards"
)

// smallPlan writes a plan of 100 positions and returns its path.
func smallPlan(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	document := make([]uint32, 8*100+1)
	for i := range document {
		document[i] = uint32(i % 50)
	}
	plantest.Shard(t, filepath.Join(dir, "a"), shards.UInt16, 50, [][]uint32{document})
	return plantest.Seal(t, dir, "plan.json",
		"sequence_length: 8\nsources:\n  - {name: a, shards: [a]}\nsamples: 100\n")
}

// The commands that read a part of a plan have one rule for --from and --to (blend.Grid).
func TestPositionsOfCommands(t *testing.T) {
	plan := smallPlan(t)
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"stream --batch-size 32 --from 64", exitDone, ""},
		{"stream --batch-size 32 --from 96 --to 100", exitDone, ""},
		{"stream --batch-size 32 --from 100", exitDone, ""}, // the state of a finished run
		{"stream --batch-size 32 --from 40", exitUsage,
			"position 40 is not the start of a step of 32 samples; use 32 or 64. To change the batch size of a run, " +
				"stop the run at a multiple of both batch sizes"},
		{"stream --batch-size 32 --to 40", exitUsage,
			"position 40 is not the end of a step of 32 samples; use 32 or 64"},
		{"stream --batch-size 32 --from 101", exitUsage, "not all in the plan, which has 100"},
		{"stream --batch-size 32 --from -32", exitUsage, "not all in the plan"},
		{"simulate --batch-size 32 --from 64", exitDone, ""},
		{"simulate --batch-size 32 --from 100", exitUsage, "nothing is left to simulate"},
		{"simulate --batch-size 32 --from 40", exitUsage, "use 32 or 64"},
		{"simulate --batch-size 32 --to 99", exitUsage, "use 96 or 100"},
		{"simulate --batch-size 32 --nodes 3", exitUsage, "3 ranks"},
	} {
		code, stdout, stderr := call(t, append(strings.Fields(c.args), "--plan", plan)...)
		if code != c.code || !strings.Contains(stderr, c.says) || c.code != exitDone && stdout != "" {
			t.Errorf("mula %s: exit %d, %.99q; want exit %d and %q", c.args, code, stderr, c.code, c.says)
		}
	}
}

// A plan that was moved away from its shards is refused with the flag that helps.
func TestMovedPlan(t *testing.T) {
	plan := smallPlan(t)
	moved := filepath.Join(t.TempDir(), "plan.json")
	if err := os.Rename(plan, moved); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"hash --batch-size 4", "stream --batch-size 4", "peek --position 1",
		"where --document a/0", "simulate", "serve --socket " + filepath.Join(t.TempDir(), "s")} {
		args := append(strings.Fields(command), "--plan", moved)
		for shards, says := range map[string]string{"": "set --shards to the folder",
			t.TempDir(): "--shards must be the folder"} {
			code, _, stderr := call(t, append(args, "--shards", shards)...)
			if code != exitFailed || !strings.Contains(stderr, says) {
				t.Errorf("mula %s with --shards %q: exit %d, %q; want exit 1 and %q", command, shards, code, stderr,
					says)
			}
		}
		if args[0] == "serve" { // would not end
			continue
		}
		if code, _, stderr := call(t, append(args[:len(args):len(args)], "--shards",
			filepath.Dir(plan))...); code != exitDone {
			t.Errorf("mula %s with the right --shards: exit %d, %q", command, code, stderr)
		}
	}
}

// A folder of logs of the Python client is an operand of `mula verify`: its starts and ranks are
// one run.
func TestVerifyClientLogs(t *testing.T) {
	plan := smallPlan(t)
	dir, folder := t.TempDir(), filepath.Join(t.TempDir(), "fp")
	if err := os.Mkdir(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	expected := filepath.Join(dir, "expected.jsonl")
	hash := func(output, more string) {
		t.Helper()
		if code, _, stderr := call(t, append([]string{"hash", "--plan", plan, "--batch-size", "8", "--output", output},
			strings.Fields(more)...)...); code != exitDone {
			t.Fatal(stderr)
		}
	}
	verify := func() (code int, says string, result map[string]any) {
		t.Helper()
		code, stdout, stderr := call(t, "verify", "--json", expected, folder)
		if stdout != "" {
			if err := json.Unmarshal([]byte(stdout), &result); err != nil {
				t.Fatal(err)
			}
		}
		return code, stderr, result
	}
	hash(expected, "")
	if code, says, _ := verify(); code != exitFailed || !strings.Contains(says, "no fingerprint log in the folder") {
		t.Errorf("an empty folder: exit %d, %q", code, says)
	}
	hash(filepath.Join(folder, "0000000000000000-batch8-rank0of2.jsonl"), "--rank 0 --world 2 --steps 0:6")
	// killed before its last line
	hash(filepath.Join(folder, "0000000000000000-batch8-rank1of2.jsonl"), "--rank 1 --world 2 --steps 0:5")
	hash(filepath.Join(folder, "0000000000000040-batch8-rank0of1.jsonl"), "--steps 5:")
	if code, says, result := verify(); code != exitDone || result["same_batches"] != true ||
		result["equal_steps"] != 13.0 || result["same_plan"] != true {
		t.Errorf("exit %d, %q, %v; want 13 equal steps of one plan", code, says, result)
	}
	if code, stdout, stderr := call(t, "verify", folder, expected); code != exitDone ||
		!strings.Contains(stdout, "same batches: yes; 13 steps from step 0") {
		t.Errorf("exit %d, %q, %q", code, stdout, stderr)
	}
	if err := os.Remove(filepath.Join(folder, "0000000000000000-batch8-rank1of2.jsonl")); err != nil {
		t.Fatal(err)
	}
	if code, says, _ := verify(); code != exitFailed ||
		!strings.Contains(says, "only 1 of the 2 ranks that started at position 0 have a log") {
		t.Errorf("a rank without a log: exit %d, %q", code, says)
	}
}

// Differences of shares are in percentage points.
func TestPlanDiffPoints(t *testing.T) {
	dir := filepath.Dir(smallPlan(t))
	plantest.Shard(t, filepath.Join(dir, "b"), shards.UInt16, 50, [][]uint32{make([]uint32, 8*100+1)})
	seal := func(name, b string) string {
		return plantest.Seal(t, dir, name,
			"sequence_length: 8\nsources:\n  - {name: a, shards: [a], weight: 1}\n  - {name: b, shards: [b], "+
				"weight: "+b+"}\nsamples: 100\n")
	}
	code, stdout, stderr := call(t, "plan", "diff", seal("p.json", "1"), seal("q.json", "3"))
	if code != exitDone || !strings.Contains(stdout, "change (percentage points)") ||
		!strings.Contains(stdout, "+25.000\n") || strings.Contains(stdout, "+25.000 %") {
		t.Errorf("exit %d, %q\n%s", code, stderr, stdout)
	}
}
