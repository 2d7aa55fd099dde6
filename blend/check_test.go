package blend

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"mula/shards"
	"mula/shards/audit"
	"mula/shards/shardtest"
)

func TestCheck(t *testing.T) {
	c := newCorpus(t)
	// two empty documents, one with only an end-of-document id, 131 tokens
	c.shard("a", shards.UInt16, 100, 0, 1, 30, 0)
	c.shard("tiny", shards.UInt16, 5)
	c.shard("long", shards.UInt16, audit.HugeDocument+3, 7)
	c.shard("foreign", shards.Int32, 200)
	copyShard(t, c.dir, "foreign", "copy")
	for _, name := range []string{"foreign.json", "foreign.docs.arrow"} {
		if err := os.Remove(filepath.Join(c.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	const text = `
sequence_length: 16
samples: 100
sources:
  - {name: a, shards: [a, tiny], weight: 1}
  - {name: b, shards: [long], weight: 1}
  - {name: c, shards: [foreign, copy], weight: 1}
`
	var progress HashProgress
	p, err := Seal(context.Background(), c.config(text), SealOptions{Progress: func(h HashProgress) { progress = h }})
	if err != nil {
		t.Fatal(err)
	}
	if progress.Bytes != progress.Total || progress.Total < 800 { // the foreign shard alone is read in full
		t.Errorf("%+v", progress)
	}
	d, err := Open(context.Background(), p, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var bytes int64
	report, err := d.Check(context.Background(), CheckOptions{Progress: func(h HashProgress) {
		if h.Bytes < bytes || h.Bytes > h.Total {
			t.Errorf("%+v after %d bytes", h, bytes)
		}
		bytes = h.Bytes
	}})
	if err != nil {
		t.Fatal(err)
	}
	path := func(name string) string { return filepath.Join(c.dir, name) }
	for i := range report.Shards {
		if m := &report.Shards[i]; m.MaxID >= shardtest.Vocabulary || m.MaxID < shardtest.EOD {
			t.Errorf("%s: the largest id is %d", m.Path, m.MaxID)
		} else {
			// What is counted beside these is audit's, and tested there.
			report.Shards[i] = audit.Shard{Source: m.Source, Path: m.Path, Tokens: m.Tokens, Windows: m.Windows,
				Tail: m.Tail, Documents: m.Documents,
				EmptyDocuments: m.EmptyDocuments, LongDocuments: m.LongDocuments, Longest: m.Longest,
				Verified: m.Verified}
		}
	}
	want := []audit.Shard{
		{Source: "a", Path: path("a"), Tokens: 131, Windows: 8, Tail: 2, Documents: 5, EmptyDocuments: 3, Longest: 100,
			Verified: true},
		{Source: "a", Path: path("tiny"), Tokens: 5, Tail: 5, Documents: 1, Longest: 5, Verified: true},
		{Source: "b", Path: path("long"), Tokens: audit.HugeDocument + 10, Windows: 65536, Tail: 9, Documents: 2,
			LongDocuments: 1, Longest: audit.HugeDocument + 3, Verified: true},
		{Source: "c", Path: path("foreign"), Tokens: 200, Windows: 12, Tail: 7, Documents: 1, Longest: 200,
			Verified: true},
		{Source: "c", Path: path("copy"), Tokens: 200, Windows: 12, Tail: 7, Documents: 1, Longest: 200,
			Verified: true},
	}
	if diff := cmp.Diff(want, report.Shards, cmpopts.IgnoreUnexported(audit.Shard{}, audit.Lengths{})); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	var messages []string
	for _, f := range report.Findings {
		if f.Level == audit.Error {
			t.Errorf("%+v", f)
		}
		messages = append(messages, filepath.Base(f.Path)+": "+f.Message)
	}
	wantMessages := []string{
		"a: 3 of 5 documents are empty",
		"tiny: its 5 tokens are too few for a window of 17: the shard is never read",
		"long: 1 documents have 1,048,576 tokens or more; the longest is document 0 with 1,048,579",
		"foreign: no manifest; its tokenizer and the origins of its documents are unknown",
		"foreign: its ids have four bytes, but two are enough (the largest is 999)",
		"copy: its ids have four bytes, but two are enough (the largest is 999)",
		"copy: its tokens equal those in " + path("foreign") + ": the data is duplicated",
		".: 5.1 % of its tokens, at the ends of shards, are in no window; use fewer and longer shards",
		".: 3.5 % of its tokens, at the ends of shards, are in no window; use fewer and longer shards",
		"foreign: 14 % of the documents, with 0.019 % of the tokens, are copies of others; document 0 of this " +
			"shard, with 200 tokens, occurs 2 times",
	}
	if diff := cmp.Diff(wantMessages, messages); diff != "" || report.Failed() {
		t.Errorf("(-want +got)\n%s", diff)
	}

	// One bit anywhere, in a shard with a manifest and in one without, is found.
	for _, name := range []string{"long.bin", "foreign.bin", "foreign.idx", "long.docs.arrow"} {
		data, err := os.ReadFile(path(name))
		if err != nil {
			t.Fatal(err)
		}
		at := len(data) / 2
		if name == "foreign.idx" {
			at = 34 + 2 // the length of its only document, in the mapped file
		}
		flip(t, path(name), at)
		report, err := d.Check(context.Background(), CheckOptions{Workers: 1})
		if err != nil {
			t.Fatal(err)
		}
		if !report.Failed() {
			t.Errorf("%s: a flipped bit was not found", name)
		}
		for _, f := range report.Findings {
			if f.Level == audit.Error && !strings.HasPrefix(name, filepath.Base(f.Path)+".") {
				t.Errorf("%s: %+v", name, f)
			}
		}
		flip(t, path(name), at)
	}
	for _, workers := range []int{-1, 4097} {
		if _, err := d.Check(context.Background(), CheckOptions{Workers: workers}); err == nil ||
			!strings.Contains(err.Error(), "workers") {
			t.Errorf("%d workers: %v", workers, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := d.Check(ctx, CheckOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancelling: %v", err)
	}
}

func copyShard(t *testing.T, dir, from, to string) {
	t.Helper()
	for _, ending := range []string{".bin", ".idx", ".docs.arrow", ".sums", ".json"} {
		data, err := os.ReadFile(filepath.Join(dir, from+ending))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, to+ending), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// flip changes the lowest bit of a byte of a file, in place.
func flip(t *testing.T, path string, at int) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, int64(at)); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, int64(at)); err != nil {
		t.Fatal(err)
	}
}
