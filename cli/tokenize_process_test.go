package cli

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"mula/internal/longtest"
)

// tokenizeArguments returns the arguments of a job with many units, several segments in progress at
// once, and several shards.
func tokenizeArguments(output string) []string {
	return []string{"tokenize", "--tokenizer", "tokenizer.json", "--output", output + "/x", "--shard-tokens", "20K",
		"--piece-size", "16K", "--on-error", "skip", "--max-rejects", "30%", "corpus"}
}

// tokenizePrepared makes documents and a tokenizer, and the output of an unbroken job in whole.
func tokenizePrepared(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "corpus"), 0o777); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"a.jsonl", "b.jsonl.zst", "c.jsonl", "d.jsonl.zst"} {
		if err := writeCorpus(filepath.Join(dir, "corpus", name), 300, uint64(i+1)); err != nil {
			t.Fatal(err)
		}
	}
	bad := filepath.Join(dir, "corpus", "bad.jsonl")
	if err := os.WriteFile(bad, []byte(strings.Repeat("{\"text\":\"fine\"}\n{\"text\":\"\"}\n", 500)),
		0o666); err != nil {
		t.Fatal(err)
	}
	mustRun(t, dir, "tokenizer", "train", "--vocab-size", "400", "corpus/a.jsonl")
	mustRun(t, dir, tokenizeArguments("whole")...)
	return dir
}

// tokenizeOutput are the files of a job that depend on nothing but its inputs and settings.
func tokenizeOutput(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := contents(t, dir)
	for name := range files {
		if base := filepath.Base(name); strings.HasSuffix(filepath.Dir(name), ".job") && (base == "job.json" ||
			base == "done.json") {
			delete(files, name) // they depend on the time, and on the division into parts
		}
	}
	return files
}

// A job that is killed repeatedly and resumed ends with the bytes of an unbroken job, and leaves
// nothing else.
func TestKilledTokenizeJob(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := tokenizePrepared(t)
	whole := tokenizeOutput(t, filepath.Join(dir, "whole"))
	if len(whole) < 10 || strings.Count(whole["x.rejects.jsonl"], "\n") != 500 {
		t.Fatalf("%d files, %d rejects", len(whole), strings.Count(whole["x.rejects.jsonl"], "\n"))
	}
	k := newKiller(5, func() { mustRun(t, dir, tokenizeArguments("timed")...) })
	for i := range kills {
		k.kill(t, dir, tokenizeArguments("killed")...)
		if i%4 != 3 {
			continue // the next process resumes from here
		}
		mustRun(t, dir, tokenizeArguments("killed")...)
		sameFiles(t, tokenizeOutput(t, filepath.Join(dir, "killed")), whole)
		if t.Failed() {
			t.Fatalf("after kill %d", i+1)
		}
		if err := os.RemoveAll(filepath.Join(dir, "killed")); err != nil {
			t.Fatal(err)
		}
	}
	k.enough(t)
}

// If several processes start together and one is killed, the job has the same bytes, and the other
// processes succeed.
func TestSharedTokenizeJob(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := tokenizePrepared(t)
	whole := tokenizeOutput(t, filepath.Join(dir, "whole"))
	for round := range 3 {
		victim := mula(dir, tokenizeArguments("shared")...)
		if err := victim.Start(); err != nil {
			t.Fatal(err)
		}
		var g sync.WaitGroup
		for range 3 {
			g.Go(func() {
				if out, err := mula(dir, tokenizeArguments("shared")...).CombinedOutput(); err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
		time.Sleep(time.Duration(round*30) * time.Millisecond)
		victim.Process.Kill()
		victim.Wait()
		g.Wait()
		// it is complete, and what the killed one left under temporary names goes
		mustRun(t, dir, tokenizeArguments("shared")...)
		sameFiles(t, tokenizeOutput(t, filepath.Join(dir, "shared")), whole)
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
		if err := os.RemoveAll(filepath.Join(dir, "shared")); err != nil {
			t.Fatal(err)
		}
	}
}
