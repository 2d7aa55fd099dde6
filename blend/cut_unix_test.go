//go:build unix

package blend

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/shards"
	"mula/shards/shardtest"
)

// cutError checks that an error names a file that was cut short, and what can be done.
func cutError(t *testing.T, what string, err error, path string) {
	t.Helper()
	var at *fs.PathError
	if !errors.As(err, &at) || at.Path != path || !strings.Contains(err.Error(), "cut short") ||
		!strings.Contains(err.Error(), "restore it") {
		t.Errorf("%s: %v; it is to name %s, to say that it was cut short, and to restore it", what, err, path)
	}
}

// A file that is cut short while it is mapped causes errors for its readers, and for nothing else:
// the process, and readers of other shards, continue.
func TestFilesCutWhileOpen(t *testing.T) {
	for _, dtype := range []shards.DType{shards.UInt16, shards.Int32} {
		for _, summed := range []bool{true, false} {
			for _, test := range []struct {
				ending string
				left   func(size int64) int64
			}{
				{".bin", func(int64) int64 { return 1000 }},
				{".bin", func(int64) int64 { return 0 }},
				{".bin", func(size int64) int64 { return size / 2 }},
				{".idx", func(int64) int64 { return 100 }},
				{".idx", func(int64) int64 { return 0 }},
			} {
				t.Run(fmt.Sprint(dtype, summed, test.ending, test.left(100)), func(t *testing.T) {
					testCut(t, dtype, summed, test.ending, test.left)
				})
			}
		}
	}
}

func testCut(t *testing.T, dtype shards.DType, summed bool, ending string, left func(int64) int64) {
	c := newCorpus(t)
	c.shard("good", dtype, shardtest.Lengths(1000, 60)...)
	c.shard("bad", dtype, shardtest.Lengths(3000, 60)...)
	if !summed { // as foreign shards are
		for _, file := range []string{"bad.sums", "bad.json", "bad.docs.arrow"} {
			if err := os.Remove(filepath.Join(c.dir, file)); err != nil {
				t.Fatal(err)
			}
		}
	}
	d := c.open("sequence_length: 32\nsources:\n  - {name: good, shards: [good]}\n  - {name: bad, shards: [bad]}\n")
	tokens := make([]uint32, 33)
	first := map[int]Sample{}
	for position := range d.Length() {
		s, err := d.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Tokens(tokens, s); err != nil {
			t.Fatal(err)
		}
		if was, ok := first[s.Source]; !ok || s.Token < was.Token {
			first[s.Source] = s
		}
	}
	path := filepath.Join(c.dir, "bad"+ending)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, left(info.Size())); err != nil {
		t.Fatal(err)
	}
	for range 2 { // an error stays one
		cutError(t, "a sample whose tokens are left", d.Tokens(tokens, first[1]), path)
		cutError(t, "all samples", readAll(t.Context(), d, 0, d.Length()), path)
		_, _, err = d.Peek(t.Context(), first[1].Position)
		cutError(t, "peek", err, path)
		if summed && ending == ".idx" { // with the ids of documents
			for _, err = range d.Where(t.Context(), "bad/7") {
			}
			cutError(t, "where", err, path)
		}
		if err := d.Tokens(tokens, first[0]); err != nil {
			t.Errorf("the shard that is whole: %v", err)
		}
		if _, _, err := d.Peek(t.Context(), first[0].Position); err != nil {
			t.Errorf("peek into the shard that is whole: %v", err)
		}
	}
}

// A packing index that is cut short while it is mapped gives errors, too.
func TestPackingCutWhileOpen(t *testing.T) {
	c, text := packed(t)
	d := c.open(text)
	path := d.order.files()[1].path
	position := int64(0)
	sample, err := d.Locate(position)
	for ; err == nil && sample.Source != 1; position++ {
		sample, err = d.Locate(position + 1)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	cutError(t, "tokens", d.Tokens(make([]uint32, 17), sample), path)
	cutError(t, "all samples", readAll(t.Context(), d, 0, d.Length()), path)
	_, err = d.Locate(sample.Position)
	cutError(t, "locate", err, path)
	for _, err = range d.order.occurrences(t.Context(), Document{Source: 1, Tokens: 1}) {
	}
	cutError(t, "where", err, path)
	for s := range d.Validation(1) {
		if s.Shard != -1 {
			t.Errorf("a held-out sample whose place is known: %+v", s)
		}
	}
}

// So does an index file of a Megatron cache, wherever the order is read.
func TestMegatronCutWhileOpen(t *testing.T) {
	c, golden, _ := megatronCache(t, "blend")
	d := c.open(golden.config())
	for _, ending := range []string{"-BlendedDataset-train-dataset_sample_index.npy",
		"-BlendedDataset-train-dataset_index.npy"} {
		path := filepath.Join(c.dir, "cache", golden.TrainHash+ending)
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(c.dir, "cache", golden.TrainHash+"-BlendedDataset-train-dataset_index.npy")
	_, err := d.Locate(0)
	cutError(t, "locate", err, path)
	for _, err = range d.Positions(t.Context(), 0, d.Length()) {
	}
	cutError(t, "positions", err, path)
	if position, ok := d.Position(0, -1, 0); ok {
		t.Errorf("a sample is at position %d of an order that is gone", position)
	}
	cutError(t, "a check of the cache", d.order.(*cacheOrder).train.Check(t.Context()), path)
}
