package blend

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"mula/internal/filesystem/faultfs"
	"mula/shards"
)

// Nothing of a test goes into the user's ledger.
func TestMain(m *testing.M) {
	if plan := os.Getenv(rankPlan); plan != "" {
		if err := rankOf(plan); err != nil {
			log.Fatal(err)
		}
		return
	}
	cache, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	for _, name := range []string{"XDG_CACHE_HOME", "HOME"} { // of Linux, of Darwin
		os.Setenv(name, cache)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(cache)
		os.Exit(code)
	}))
}

// shardOf gives a shard of open data to a test.
func shardOf(t testing.TB, d *Data, source, shard int) *shards.Shard {
	t.Helper()
	s, err := d.shelf.take(source, shard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.shelf.put(source, shard) })
	return s
}

// documentStart is the first token of a document.
func documentStart(t testing.TB, s *shards.Shard, d int64) int64 {
	t.Helper()
	start, err := s.DocumentStart(d)
	if err != nil {
		t.Fatal(err)
	}
	return start
}

// A corpus is a directory with shards of made-up documents, for one blend.
type corpus struct {
	t   testing.TB
	dir string
}

func newCorpus(t testing.TB) corpus { return corpus{t, t.TempDir()} }

const (
	vocabulary = 1000
	eod        = 999
)

var tokenizerInfo = shards.TokenizerInfo{SHA256: strings.Repeat("ab", 32), VocabSize: vocabulary, EOD: eod,
	ClassTable: "unicode 16.0.0", Specials: "text"}

// shard writes a shard of documents with these lengths. Its ids are a function of the name and the
// place, and differ from place to place.
func (c corpus) shard(name string, dtype shards.DType, lengths ...int) {
	c.t.Helper()
	prefix := filepath.Join(c.dir, name)
	if err := os.MkdirAll(filepath.Dir(prefix), 0o755); err != nil {
		c.t.Fatal(err)
	}
	w, err := shards.CreateOn(faultfs.New(nil), prefix, dtype, tokenizerInfo)
	if err != nil {
		c.t.Fatal(err)
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
			tokens[i] = state >> 8 % eod
		}
		if n > 0 {
			tokens[n-1] = eod
		}
		origin := shards.DocumentOrigin{ID: fmt.Sprintf("%s/%d", name, doc), File: name + ".jsonl",
			Line: int64(doc + 1)}
		if err := w.Append(tokens, origin); err != nil {
			c.t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		c.t.Fatal(err)
	}
}

// lengths gives n document lengths between 0 and most.
func lengths(n, most int) []int {
	list := make([]int, n)
	state := uint32(n*31 + most)
	for i := range list {
		state = state*1664525 + 1013904223
		list[i] = int(state>>8) % (most + 1)
	}
	return list
}

// config parses a blend.yaml in the corpus.
func (c corpus) config(text string) *Config {
	c.t.Helper()
	cfg, err := ParseConfig([]byte(text), "blend.yaml", c.dir)
	if err != nil {
		c.t.Fatal(err)
	}
	return cfg
}

// seal seals a blend.yaml, writes the plan and reads it again.
func (c corpus) seal(text string) *Plan {
	c.t.Helper()
	p, err := Seal(context.Background(), c.config(text), SealOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	path := filepath.Join(c.dir, "plan.json")
	if err := p.WriteOn(faultfs.New(nil), path); err != nil {
		c.t.Fatal(err)
	}
	read, err := ReadPlan(path)
	if err != nil {
		c.t.Fatal(err)
	}
	if read.Fingerprint() != p.Fingerprint() {
		c.t.Fatalf("the plan that was sealed is %s, the one that was read %s", p.Fingerprint(), read.Fingerprint())
	}
	return read
}

// open seals a blend.yaml and opens the plan.
func (c corpus) open(text string) *Data {
	c.t.Helper()
	d, err := Open(context.Background(), c.seal(text), OpenOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if err := d.Close(); err != nil {
			c.t.Error(err)
		}
	})
	return d
}

// mixed is a corpus of three sources with shards of several sizes, and a blend of them that uses
// all there is to a plan.
func mixed(t testing.TB) (corpus, string) {
	c := newCorpus(t)
	c.shard("web/part-0", shards.UInt16, lengths(40, 60)...)
	c.shard("web/part-1", shards.UInt16, lengths(60, 30)...)
	c.shard("web/part-2", shards.UInt16, 3) // too short for a window
	c.shard("wiki/a", shards.UInt16, lengths(25, 40)...)
	c.shard("code/x", shards.UInt16, lengths(9, 120)...)
	return c, mixture
}

// mixture is a blend.yaml of web, wiki and code.
const mixture = `
sequence_length: 16
seed: 6198
validation: 0.05
samples: 600
sources:
  - name: web
    shards: [web/part-*.idx]
    weight: 0.7
  - name: wiki
    shards: [wiki/a]
    weight: 1/10
    max_epochs: 8
  - name: code
    shards: [code/x.bin]
    weight: 0.2
stages:
  - samples: 200
  - samples: 100
    weights: {wiki: 0.3, web: 0.7}
  - samples: rest
    weights: {code: 0.25, web: 0.5, wiki: 0.25}
skips:
  - {from: 37, to: 41}
  - {from: 310, to: 330}
`
