// Package shardtest writes shards of made-up documents for tests.
package shardtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mula/internal/filesystem/faultfs"
	"mula/shards"
)

// The tokenizer of the shards.
const (
	Vocabulary = 1000
	EOD        = 999
)

// Tokenizer describes the tokenizer of the shards.
func Tokenizer() shards.TokenizerInfo {
	return shards.TokenizerInfo{SHA256: strings.Repeat("ab", 32), VocabSize: Vocabulary, EOD: EOD,
		ClassTable: "unicode 16.0.0", Specials: "text"}
}

// Write writes the shard dir/name, whose documents have the given lengths. The tokens depend only
// on the name and the lengths. Document d has the id "name/d" and line d+1 of "name.jsonl".
func Write(t testing.TB, dir, name string, dtype shards.DType, lengths ...int) {
	t.Helper()
	WriteWith(t, dir, name, dtype, Tokenizer(), lengths...)
}

// WriteWith does what [Write] does, with another tokenizer in the manifest.
func WriteWith(t testing.TB, dir, name string, dtype shards.DType, tokenizer shards.TokenizerInfo, lengths ...int) {
	t.Helper()
	prefix := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(prefix), 0o755); err != nil {
		t.Fatal(err)
	}
	w, err := shards.CreateOn(faultfs.New(nil), prefix, dtype, tokenizer)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	state := uint32(2166136261)
	for _, b := range []byte(name) {
		state = (state ^ uint32(b)) * 16777619
	}
	for doc, n := range lengths {
		tokens := make([]uint32, n)
		for i := range tokens {
			state = state*1664525 + 1013904223
			tokens[i] = state >> 8 % EOD
		}
		if n > 0 {
			tokens[n-1] = EOD
		}
		origin := shards.DocumentOrigin{ID: fmt.Sprintf("%s/%d", name, doc), File: name + ".jsonl",
			Line: int64(doc + 1)}
		if err := w.Append(tokens, origin); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

// Lengths returns n pseudorandom document lengths from 0 to most.
func Lengths(n, most int) []int {
	list := make([]int, n)
	state := uint32(n*31 + most)
	for i := range list {
		state = state*1664525 + 1013904223
		list[i] = int(state>>8) % (most + 1)
	}
	return list
}

// WriteMixed writes shards of several sizes: web/part-0, web/part-1, web/part-2, wiki/a and code/x.
func WriteMixed(t testing.TB, dir string) {
	t.Helper()
	Write(t, dir, "web/part-0", shards.UInt16, Lengths(40, 60)...)
	Write(t, dir, "web/part-1", shards.UInt16, Lengths(60, 30)...)
	Write(t, dir, "web/part-2", shards.UInt16, 3) // too short for a window of 17 tokens
	Write(t, dir, "wiki/a", shards.UInt16, Lengths(25, 40)...)
	Write(t, dir, "code/x", shards.UInt16, Lengths(9, 120)...)
}

// LongAgo is the modification time that [Age] sets.
var LongAgo = time.Now().Add(-time.Hour)

// Age makes all files below a directory old, so that the cache of shard facts trusts their times.
func Age(t testing.TB, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(path, LongAgo, LongAgo))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// UserCache gives the test a user's cache directory of its own. It returns the directory of the
// cache of shard facts, which does not exist yet.
func UserCache(t testing.TB) (facts string) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", dir)
	t.Setenv("HOME", dir)
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(cache, "mula", "shards")
}
