package verifier

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"mula/shards"
	"mula/shards/facts"
	"mula/shards/shardtest"
)

// A verified file is not read again, by any rank, until it changes.
func TestVerifiedOnce(t *testing.T) {
	shardtest.UserCache(t)
	dir := t.TempDir()
	var files []File
	for i := range 5 {
		path := filepath.Join(dir, fmt.Sprint("shard", i))
		shardtest.Write(t, dir, filepath.Base(path), shards.UInt16, 50)
		s, err := shards.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		known := facts.Of(s)
		files = append(files, File{Path: path, Shard: true,
			Verify: func(context.Context, func(int64)) (*facts.Facts, error) { return &known, nil }})
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	shardtest.Age(t, dir)
	// read returns the number of files that a rank reads.
	read := func(rank, world int) int {
		t.Helper()
		v, err := Start(files, Options{Rank: rank, World: world}, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer v.Stop()
		for i := rank; i < len(files); i += world {
			if err := v.Await(t.Context(), i); err != nil {
				t.Error(err)
			}
		}
		return v.Progress().OfFiles
	}
	if a, b := read(0, 2), read(1, 2); a != 3 || b != 2 {
		t.Errorf("two ranks verified %d and %d files, want 3 and 2", a, b)
	}
	if n := read(0, 1); n != 0 {
		t.Errorf("%d files were verified again", n)
	}
	changed := time.Now().Add(-time.Minute)
	if err := os.Chtimes(files[3].Path+".bin", changed, changed); err != nil {
		t.Fatal(err)
	}
	if n := read(0, 1); n != 1 {
		t.Errorf("after a change of one file, %d files were verified", n)
	}
	if _, err := Start(files, Options{Rank: 2, World: 2}, 0); err == nil {
		t.Error("Start accepted rank 2 of 2")
	}
}
