//go:build unix

package stream

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/shards"
	"mula/shards/shardtest"
)

// A stream over a shard that is cut short while it is mapped ends with an error that names the
// file.
func TestShardCutWhileOpen(t *testing.T) {
	for _, ending := range []string{".bin", ".idx"} {
		c := newCorpus(t)
		c.shard("good", shards.UInt16, shardtest.Lengths(1000, 60)...)
		c.shard("bad", shards.UInt16, shardtest.Lengths(3000, 60)...)
		d := c.open("sequence_length: 32\nsources:\n  - {name: good, shards: [good]}\n  - {name: bad, shards: [bad]}\n")
		if err := WriteIPC(t.Context(), io.Discard, d, Options{BatchSize: 16}); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(c.dir, "bad"+ending)
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
		for _, prefetch := range []int{0, 3} {
			err := WriteIPC(t.Context(), io.Discard, d, Options{BatchSize: 16, Prefetch: prefetch})
			var at *fs.PathError
			if !errors.As(err, &at) || at.Path != path || !strings.Contains(err.Error(), "cut short") {
				t.Errorf("%s, prefetch %d: %v", ending, prefetch, err)
			}
		}
	}
}
