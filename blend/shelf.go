package blend

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"mula/shards"
)

// maxMapped is the number of shards that a shelf keeps open, more or less. Each has three mappings
// of the 65,530 that Linux allows a process unless vm.max_map_count says otherwise.
const maxMapped = 1 << 14

// A shelf opens the shards of a plan when they are first used, and closes some that are not in use
// when it has too many open. It is safe for concurrent use.
type shelf struct {
	slots  [][]slot // by source
	all    []*slot  // the same in one row
	open   func(source, shard int) (*shards.Shard, error)
	limit  int64
	mapped atomic.Int64
	hand   atomic.Int64 // where the search for a shard to close goes on
}

// A slot is the place of one shard.
type slot struct {
	mu     sync.Mutex
	shard  *shards.Shard // nil while it is not open
	users  int
	fresh  bool            // used since the hand was here last
	failed []*shards.Shard // given out before, and perhaps still in use; never again
	why    error           // why the last of them was given up, until another is open
}

// newShelf is an empty shelf for the shards of a plan.
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

// take gives a shard for use until it is put back.
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
			s.closeOne() // passes this slot over, which is locked
		}
	}
	t.users++
	t.fresh = true
	return t.shard, nil
}

// put says that one user of a shard has finished.
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

// renew has a shard that was given out, and that could not be read, opened anew when it is next
// taken. It is still to be put back.
func (s *shelf) renew(source, shard int, failed *shards.Shard, why error) {
	t := &s.slots[source][shard]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shard == failed { // else another user was faster
		t.shard, t.failed, t.why = nil, append(t.failed, failed), why
	}
}

// closeOne closes a shard that nobody uses, rather one that was not used lately. If all are in use
// it closes none.
func (s *shelf) closeOne() {
	for range 2 * len(s.all) {
		t := s.all[s.hand.Add(1)%int64(len(s.all))]
		if !t.mu.TryLock() {
			continue
		}
		closed := false
		if t.shard != nil && t.users == 0 {
			if closed = !t.fresh; closed {
				t.shard.Close() // unmapping what was mapped; nothing is left to be lost
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
