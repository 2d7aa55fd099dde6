package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"mula/internal/mapping"
	"mula/shards"
	"mula/shards/shardtest"
)

// If a pool may have two shards open, concurrent readers of more shards read the right tokens, and
// only the shards in use stay open.
func TestPoolClosesShards(t *testing.T) {
	dir := t.TempDir()
	const n, tokens, readers = 6, 50, 4
	var want [n][]uint32
	path := func(i int) string { return filepath.Join(dir, fmt.Sprint("shard", i)) }
	for i := range n {
		shardtest.Write(t, dir, filepath.Base(path(i)), shards.UInt16, tokens)
		s, err := shards.Open(path(i))
		if err != nil {
			t.Fatal(err)
		}
		want[i] = make([]uint32, tokens)
		if err := s.Read(want[i], 0); err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	opened := 0
	var mu sync.Mutex
	p := New(n, false, func(i int) (*shards.Shard, error) {
		mu.Lock()
		opened++
		mu.Unlock()
		return shards.Open(path(i))
	})
	p.limit = 2
	var wg sync.WaitGroup
	for r := range readers {
		wg.Go(func() {
			got := make([]uint32, tokens)
			for k := range 40 * n {
				i := k * (r + 1) * 5 % n
				if r%2 == 0 {
					i = k % n
				}
				err := p.Read(i, func(s *shards.Shard) error { return s.Read(got, 0) })
				if err != nil || !slices.Equal(got, want[i]) {
					t.Errorf("shard %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	if open := p.mapped.Load(); open > 2+readers {
		t.Errorf("%d shards are open", open)
	}
	if opened <= n {
		t.Errorf("%d shards were opened %d times: no shard was closed and opened again", n, opened)
	}
	if err := p.Close(); err != nil || p.mapped.Load() != 0 {
		t.Errorf("%d shards are open after Close: %v", p.mapped.Load(), err)
	}
}

// After a read that failed because bytes are gone, the next use opens the shard again, unless only
// the opened files were verified. The failed shard is closed when it has no users.
func TestPoolReopens(t *testing.T) {
	for _, summed := range []bool{true, false} {
		for _, verified := range []bool{true, false} {
			dir := t.TempDir()
			path := filepath.Join(dir, "shard")
			shardtest.Write(t, dir, "shard", shards.UInt16, 50)
			if !summed {
				if err := errors.Join(os.Remove(path+".json"), os.Remove(path+".sums")); err != nil {
					t.Fatal(err)
				}
			}
			opened := 0
			p := New(1, verified, func(int) (*shards.Shard, error) {
				opened++
				return shards.Open(path)
			})
			if _, err := p.Acquire(0); err != nil {
				t.Fatal(err)
			}
			err := p.Read(0, func(*shards.Shard) error { return mapping.ErrUnreadable })
			if !errors.Is(err, mapping.ErrUnreadable) {
				t.Errorf("the read returned %v, want %v", err, mapping.ErrUnreadable)
			}
			if err := p.Read(0, func(s *shards.Shard) error { return s.Read(make([]uint32, 50), 0) }); err != nil {
				t.Error(err)
			}
			want := 2
			if verified && !summed {
				want = 1
			}
			if open := p.mapped.Load(); opened != want || open != int64(want) {
				t.Errorf("sums %v, verified %v: %d shards were opened and %d are open, want %d", summed, verified,
					opened, open, want)
			}
			p.Release(0)
			if open := p.mapped.Load(); open != 1 {
				t.Errorf("sums %v, verified %v: %d shards are open after the release, want 1", summed, verified, open)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
