package blend

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"mula/shards"
)

// maxMapped is the approximate number of shards that a shelf keeps open. Each shard has three
// mappings; Linux allows 65,530 per process by default (vm.max_map_count).
const maxMapped = 1 << 14

// A shelf opens the shards of a plan on first use, and closes unused shards if too many are open.
// It is safe for concurrent use.
type shelf struct {
	slots  [][]slot // by source
	all    []*slot  // the same slots in one list
	open   func(source, shard int) (*shards.Shard, error)
	limit  int64
	mapped atomic.Int64
	hand   atomic.Int64 // index of the slot where the search for a shard to close continues
}

// A slot holds one shard.
type slot struct {
	mu     sync.Mutex
	shard  *shards.Shard // nil while it is not open
	users  int
	fresh  bool            // used since the hand last passed
	failed []*shards.Shard // failed shards that may still be in use; closed when users is 0
	why    error           // why the last of failed was replaced, until another is open
}

// newShelf returns an empty shelf for the shards of a plan.
func newShelf(p *Plan, open func(source, shard int) (*shards.Shard, error)) *shelf {
	s := &shelf{slots: make([][]slot, len(p.Sources)), open: open, limit: maxMapped}
	for i := range p.Sources {
		s.slots[i] = make([]slot, len(p.Sources[i].Shards))
		for k := range s.slots[i] {
			s.all = append(s.all, &s.slots[i][k])
		}
	}
	return s
}

// take returns a shard for use until put is called.
func (s *shelf) take(source, shard int) (*shards.Shard, error) {
	t := &s.slots[source][shard]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shard == nil {
		opened, err := s.open(source, shard)
		if err != nil && t.why != nil {
			err = fmt.Errorf("%w; reopening it: %w", t.why, err)
		}
		if err != nil {
			return nil, err
		}
		t.shard, t.why = opened, nil
		if s.mapped.Add(1) > s.limit {
			s.closeOne() // skips this slot, which is locked
		}
	}
	t.users++
	t.fresh = true
	return t.shard, nil
}

// put ends one use of a shard.
func (s *shelf) put(source, shard int) {
	t := &s.slots[source][shard]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.users--; t.users > 0 || len(t.failed) == 0 {
		return
	}
	for _, old := range t.failed {
		old.Close()
	}
	s.mapped.Add(-int64(len(t.failed)))
	t.failed = nil
}

// renew marks a shard as failed, so that the next take opens it again. The caller must still call
// put.
func (s *shelf) renew(source, shard int, failed *shards.Shard, why error) {
	t := &s.slots[source][shard]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shard == failed { // else another user has already renewed it
		t.shard, t.failed, t.why = nil, append(t.failed, failed), why
	}
}

// closeOne closes an unused shard, preferably a shard without recent reads. If all shards are in
// use, it closes none.
func (s *shelf) closeOne() {
	for range 2 * len(s.all) {
		t := s.all[s.hand.Add(1)%int64(len(s.all))]
		if !t.mu.TryLock() {
			continue
		}
		closed := false
		if t.shard != nil && t.users == 0 {
			if closed = !t.fresh; closed {
				t.shard.Close() // unmaps files that were only read; no data can be lost
				t.shard = nil
			}
			t.fresh = false
		}
		t.mu.Unlock()
		if closed {
			s.mapped.Add(-1)
			return
		}
	}
}

// close closes all shards. None may be in use.
func (s *shelf) close() error {
	var errs []error
	for _, t := range s.all {
		t.mu.Lock()
		if t.shard != nil {
			errs = append(errs, t.shard.Close())
			t.shard = nil
		}
		t.mu.Unlock()
	}
	s.mapped.Store(0)
	return errors.Join(errs...)
}
