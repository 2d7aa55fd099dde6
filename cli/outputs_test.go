package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A command that writes one file does not make folders for it, since the path may be mistyped.
func TestMissingFolder(t *testing.T) {
	plan := smallPlan(t)
	dir := filepath.Dir(plan)
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return path
	}
	config := write("blend.yaml", "sequence_length: 8\nsources:\n  - {name: a, shards: [a]}\nsamples: 50\n")
	documents := write("docs.jsonl", `{"id":"1","text":"some text"}`+"\n")
	tokenizer := filepath.Join(dir, "tokenizer.json")
	missing := filepath.Join(dir, "typo", "folder")
	for _, args := range [][]string{
		{"blend", "--config", config, "--output", filepath.Join(missing, "plan.json")},
		{"blend", "--amend", plan, "--skip", "8:16", "--output", filepath.Join(missing, "plan.json")},
		{"hash", "--plan", plan, "--batch-size", "8", "--output", filepath.Join(missing, "log.jsonl")},
		{"simulate", "--plan", plan, "--batch-size", "8", "--report", filepath.Join(missing, "page.html")},
		{"check", "--plan", plan, "--report", filepath.Join(missing, "page.html")},
		{"estimate", "--model", "mula-tiny", "--plot", filepath.Join(missing, "plot.svg")},
		{"report", "--output", filepath.Join(missing, "page.html"), dir},
		{"tokenizer", "train", "--vocab-size", "260", "--output", filepath.Join(missing, "tokenizer.json"), documents},
		{"tokenizer", "train", "--vocab-size", "260", "--output", tokenizer, documents}, // for the next
		{"tokenize", "--tokenizer", tokenizer, "--output", filepath.Join(dir, "new", "x"), "--on-error", "skip",
			"--rejects", filepath.Join(missing, "rejects.jsonl"), documents},
		// a job makes its folders
		{"tokenize", "--tokenizer", tokenizer, "--output", filepath.Join(dir, "new", "x"), "--on-error", "skip",
			documents},
	} {
		code, _, stderr := call(t, args...)
		if !strings.Contains(strings.Join(args, " "), "typo") {
			if code != exitDone {
				t.Errorf("%q: exit %d, %q", args, code, stderr)
			}
			continue
		}
		if code != exitUsage || !strings.Contains(stderr, "typo/folder does not exist; create it with `mkdir -p") {
			t.Errorf("%q: exit %d, %q", args, code, stderr)
		}
		if _, err := os.Stat(filepath.Dir(missing)); err == nil {
			t.Fatalf("%q made %s", args, filepath.Dir(missing))
		}
	}
}
