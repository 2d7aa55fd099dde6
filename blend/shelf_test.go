package blend

import (
	"slices"
	"sync"
	"testing"

	"mula/shards"
)

// With room for two of many shards, readers at the same time read what is there, and no more than
// are in use stay open.
func TestShelf(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	want := tokensOf(t, d)
	opened := map[*shards.Shard]bool{}
	var mu sync.Mutex
	narrow := &Data{Plan: d.Plan, facts: d.facts}
	narrow.shelf = newShelf(d.Plan, func(source, shard int) (*shards.Shard, error) {
		s, err := narrow.open(source, shard)
		mu.Lock()
		opened[s] = true
		mu.Unlock()
		return s, err
	})
	narrow.shelf.limit = 2
	defer narrow.Close()
	const readers = 4
	var wg sync.WaitGroup
	for r := range readers {
		wg.Go(func() {
			tokens := make([]uint32, d.SequenceLength+1)
			for i := range want {
				row := want[(i*(r+1)*7)%len(want)]
				s, err := narrow.Locate(row.position)
				if err != nil {
					t.Error(err)
					return
				}
				if err := narrow.Tokens(tokens, s); err != nil || !slices.Equal(tokens, row.tokens) {
					t.Errorf("position %d: %v", row.position, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := narrow.shelf.mapped.Load(); n > 2+readers {
		t.Errorf("%d shards are open", n)
	}
	if shards := len(narrow.shelf.all); shards < 4 || len(opened) <= shards {
		t.Errorf("%d shards were opened %d times: none was closed and opened again", shards, len(opened))
	}
}
