// Package plantest builds shards and plans for tests of packages that read plans.
package plantest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"mula/blend"
	"mula/internal/filesystem/faultfs"
	"mula/shards"
)

// Main runs the tests of a package and ends the process. TestMain calls it. The tests use a
// temporary cache of shard facts instead of the user's. Leaked goroutines fail the tests.
func Main(m *testing.M) { goleak.VerifyTestMain(withCache{m}) }

// withCache runs tests with a temporary cache.
type withCache struct{ tests *testing.M }

func (m withCache) Run() int {
	cache, err := os.MkdirTemp("", "mula-test")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(cache)
	for _, name := range []string{"XDG_CACHE_HOME", "HOME"} { // of Linux, of Darwin
		os.Setenv(name, cache)
	}
	return m.tests.Run()
}

// Shard writes a shard. Each document is a list of token ids below vocabulary.
func Shard(t testing.TB, prefix string, dtype shards.DType, vocabulary int, documents [][]uint32) {
	t.Helper()
	w, err := shards.CreateOn(faultfs.New(nil), prefix, dtype, shards.TokenizerInfo{
		SHA256: strings.Repeat("ab", 32), VocabSize: vocabulary, EOD: 0, ClassTable: "test", Specials: "text"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	name := filepath.Base(prefix)
	for i, document := range documents {
		if err := w.Append(document, shards.DocumentOrigin{ID: fmt.Sprintf("%s/%d", name, i), File: name + ".jsonl",
			Line: int64(i) + 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

// Seal builds the plan of the given blend.yaml text in dir, writes it to the file dir/name, and
// returns its path.
func Seal(t testing.TB, dir, name, config string) string {
	t.Helper()
	c, err := blend.ParseConfig([]byte(config), "blend.yaml", dir)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := blend.Seal(context.Background(), c, blend.SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := plan.WriteOn(faultfs.New(nil), path); err != nil {
		t.Fatal(err)
	}
	return path
}

// Open opens the plan at path. The caller must close it.
func Open(t testing.TB, path string) *blend.Data {
	t.Helper()
	plan, err := blend.ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	data, err := blend.Open(context.Background(), plan, blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return data
}
