package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"mula/fixtures/vectors"
	"mula/internal/longtest"
)

// tokenFiles writes .idx files of Megatron-LM with made-up lengths, and the words of a blend of
// them.
func tokenFiles(t *testing.T, dir string, files, documents int) (words string) {
	t.Helper()
	for f := range files {
		lengths := make([]int32, documents)
		for d := range lengths {
			lengths[d] = int32((d*7919 + f*104729) % 997)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%d.idx", f)), vectors.Index(lengths),
			0o644); err != nil {
			t.Fatal(err)
		}
		words += fmt.Sprintf("%d.5 f%d ", f+1, f)
	}
	if err := os.WriteFile(filepath.Join(dir, "tok.json"),
		[]byte(`{"class": "_NullTokenizer", "tokenizer_path": [null], "vocab_size": "50304"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	return words
}

// indexArguments returns the arguments that build an index in cache.
func indexArguments(words, cache string) []string {
	return []string{"index", "--for", "megatron", "--data-path", words, "--split", "90,10,0", "--seq-length", "128",
		"--tokenizer-json", "tok.json",
		"--train-samples", "200000", "--valid-samples", "5000", "--test-samples", "0", "--cache", cache}
}

// indexFiles are the files of a cache, without the folder of locks and records.
func indexFiles(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := contents(t, dir)
	for name := range files {
		if strings.HasPrefix(name, ".mula") {
			delete(files, name)
		}
	}
	return files
}

func sameFiles(t *testing.T, got, want map[string]string) {
	t.Helper()
	for name := range want {
		if got[name] != want[name] {
			t.Errorf("%s differs from that of an unbroken build (%d bytes, want %d)", name, len(got[name]),
				len(want[name]))
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d files, want %d", len(got), len(want))
	}
}

// An index build that is killed repeatedly and resumed ends with the bytes of an unbroken build.
func TestKilledIndex(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	words := tokenFiles(t, dir, 12, 6000)
	k := newKiller(4, func() { mustRun(t, dir, indexArguments(words, "whole")...) })
	whole := indexFiles(t, filepath.Join(dir, "whole"))
	if want := 2 * (12*4 + 3); len(whole) != want { // of each split: four files of each data set, three of the blend
		t.Fatalf("%d files, want %d", len(whole), want)
	}
	for i := range kills {
		k.kill(t, dir, indexArguments(words, "killed")...)
		if i%4 != 3 {
			continue // the next process resumes from here
		}
		mustRun(t, dir, indexArguments(words, "killed")...)
		sameFiles(t, indexFiles(t, filepath.Join(dir, "killed")), whole)
		if t.Failed() {
			t.Fatalf("after kill %d", i+1)
		}
		if err := os.RemoveAll(filepath.Join(dir, "killed")); err != nil {
			t.Fatal(err)
		}
	}
	k.enough(t)
}

// Eight processes that start on one empty cache make one build's bytes.
func TestEightIndexes(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	words := tokenFiles(t, dir, 6, 2000)
	mustRun(t, dir, indexArguments(words, "whole")...)
	whole := indexFiles(t, filepath.Join(dir, "whole"))
	for range 3 {
		var g sync.WaitGroup
		for range 8 {
			g.Go(func() {
				if out, err := mula(dir, indexArguments(words, "shared")...).CombinedOutput(); err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
		g.Wait()
		sameFiles(t, indexFiles(t, filepath.Join(dir, "shared")), whole)
		if err := os.RemoveAll(filepath.Join(dir, "shared")); err != nil {
			t.Fatal(err)
		}
	}
}
