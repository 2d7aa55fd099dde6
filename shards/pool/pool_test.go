package pool

import (
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"

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
	p := New(n, func(i int) (*shards.Shard, error) {
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
	if open := p.Mapped(); open > 2+readers {
		t.Errorf("%d shards are open", open)
	}
	if opened <= n {
		t.Errorf("%d shards were opened %d times: no shard was closed and opened again", n, opened)
	}
	if err := p.Close(); err != nil || p.Mapped() != 0 {
		t.Errorf("%d shards are open after Close: %v", p.Mapped(), err)
	}
}
