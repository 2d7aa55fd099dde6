package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What the program wrote at commit 6cbb29a is read by the program of today: shards of every layout
// with manifests of format 1, a plan, jobs of mula tokenize that had finished and that were killed,
// and a checkpoint. testdata/old/make.sh made the files.
func TestOldFiles(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata/old")); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	t.Setenv("XDG_CACHE_HOME", filepath.Join(dir, "cache"))
	text := func(path string) []byte {
		t.Helper()
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	run := func(want string, args ...string) {
		t.Helper()
		code, stdout, stderr := call(t, args...)
		if code != exitDone || !strings.Contains(stdout+stderr, want) {
			t.Fatalf("mula %s: code %d, want %q\n%s%s", strings.Join(args, " "), code, want, stdout, stderr)
		}
	}
	same := func(a, b string, endings ...string) {
		t.Helper()
		for _, ending := range endings {
			if !bytes.Equal(text(a+ending), text(b+ending)) {
				t.Errorf("%s and %s differ", a+ending, b+ending)
			}
		}
	}
	format := func(path string, want int) {
		t.Helper()
		var m struct{ Format int }
		if err := json.Unmarshal(text(path), &m); err != nil || m.Format != want {
			t.Errorf("%s has format %d, want %d; %v", path, m.Format, want, err)
		}
	}
	// A job knows its inputs by size and time of change, which git does not keep.
	var job struct{ Inputs []struct{ Modified int64 } }
	if err := json.Unmarshal(text("shards/a.job/job.json"), &job); err != nil {
		t.Fatal(err)
	}
	changed := time.Unix(0, job.Inputs[0].Modified)
	if err := os.Chtimes("corpus.jsonl", changed, changed); err != nil {
		t.Fatal(err)
	}

	run("5 shards: no errors", "check", "shards")
	run("all bytes match the plan", "check")
	run("plan 2cae8fc4832a2895", "blend", "--output", "again.json")
	same("again", "plan", ".json")
	run("", "hash", "--batch-size", "4", "--output", "hashes.jsonl")
	same("hashes", "expected", ".jsonl")
	run("corpus.jsonl:4", "where", "--document", "a-3")
	for _, layout := range []string{"dolma", "datatrove", "mds", "fms"} {
		input := filepath.Join("shards", layout, "a")
		run("30 documents", "convert", "--to", "megatron", "--output", "back/"+layout, input)
		same("back/"+layout, "shards/a", ".bin", ".idx", ".docs.arrow", ".sums")
	}

	// The job that had finished makes nothing again, and its shard keeps its manifest.
	before := text("shards/a.json")
	run("30 documents", "tokenize", "--tokenizer", "tokenizer.json", "--output", "shards/a", "corpus.jsonl")
	if !bytes.Equal(before, text("shards/a.json")) {
		t.Error("shards/a.json was written again")
	}
	// The job that was killed is resumed. Its manifest alone has other bytes, and a plan of its
	// shard the same fingerprint.
	run("30 documents", "tokenize", "--tokenizer", "tokenizer.json", "--output", "killed/a", "corpus.jsonl")
	same("killed/a", "shards/a", ".bin", ".idx", ".docs.arrow", ".sums")
	format("shards/a.json", 1)
	format("killed/a.json", 2)
	config := strings.Replace(string(text("blend.yaml")), "shards/a.idx", "killed/a.idx", 1)
	if err := os.WriteFile("killed.yaml", []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	run("2cae8fc4832a2895113b1f8d3e6626ba2b64aea38304a90b49bfe197726a0da7", "blend", "--config", "killed.yaml",
		"--output", "killed.json")

	// The train.yaml of the run has old names of fields, and so has the checkpoint.
	run("run/train.yaml:60: field dp is now called expert_dp", "train", "--dry-run", "--config", "run/train.yaml")
	run("run/train.yaml:80: field leave_out is now called skip_steps", "train", "--dry-run", "--config",
		"run/train.yaml")
	run("done       all steps are in", "train", "--dry-run", "--config", "run/train.yaml")

	// The run resumes from its checkpoint.
	config = strings.Replace(string(text("train.yaml")), "steps: 2\n", "steps: 4\n", 1)
	if err := os.WriteFile("train.yaml", []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	run("step-00000004", "train", "--config", "train.yaml")
	run("same batches: yes; 4 steps from step 0", "verify", "expected.jsonl", "run")
}
