package blend

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"mula/blend/fingerprint"
	"mula/internal/filesystem/faultfs"
	"mula/shards"
	"mula/shards/shardtest"
)

// The tests have a cache of shard facts of their own.
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
	s, err := d.pool.Acquire(d.firsts[source] + shard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.pool.Release(d.firsts[source] + shard) })
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

// shard writes a shard of documents with these lengths.
func (c corpus) shard(name string, dtype shards.DType, lengths ...int) {
	c.t.Helper()
	shardtest.Write(c.t, c.dir, name, dtype, lengths...)
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
	sealed, sealedErr := p.Locate(0)
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
	if got, err := read.Locate(0); got != sealed || fmt.Sprint(err) != fmt.Sprint(sealedErr) {
		c.t.Fatalf("position 0 of the sealed plan is %+v, %v; of the plan that was read %+v, %v", sealed,
			sealedErr, got, err)
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
	shardtest.WriteMixed(t, c.dir)
	return c, mixedBlend(t)
}

// mixedBlend returns a blend.yaml with stages, weights, skips, a limit of epochs and validation.
func mixedBlend(t testing.TB) string {
	t.Helper()
	text, err := os.ReadFile("testdata/mixed.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A positioned has the tokens of the sample at a position.
type positioned struct {
	position int64
	tokens   []uint32
}

// tokensOf reads all samples of a plan that are not skipped, one by one.
func tokensOf(t testing.TB, d *Data) (list []positioned) {
	t.Helper()
	for position := range d.Length() {
		s, err := d.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		if s.Skipped {
			continue
		}
		tokens := make([]uint32, d.SampleTokens())
		if err := d.Tokens(tokens, s); err != nil {
			t.Fatal(err)
		}
		list = append(list, positioned{position, tokens})
	}
	return list
}

// readAll reads the tokens and document starts of positions [from, to).
func readAll(ctx context.Context, d *Data, from, to int64) error {
	tokens, starts := make([]uint32, d.SampleTokens()), []int32{}
	for position := from; position < to; position++ {
		s, err := d.Locate(position)
		if err == nil {
			starts = starts[:0]
			_, err = ReadSample(ctx, d, s, tokens, &starts)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// stepsOf returns the fingerprints of the steps of a plan.
func stepsOf(t testing.TB, d *Data, batch int64) (list []fingerprint.StepHash) {
	t.Helper()
	samples := tokensOf(t, d)
	var hasher fingerprint.Hasher
	for first := int64(0); first < d.Length(); first += batch {
		for len(samples) > 0 && samples[0].position < first+batch {
			hasher.Add(samples[0].tokens)
			samples = samples[1:]
		}
		list = append(list, hasher.Step(first/batch, first))
	}
	return list
}
