// Package pool keeps the shards open that are being read, up to a limit.
package pool

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"mula/internal/mapping"
	"mula/shards"
)

// maxMapped is the approximate number of shards that a pool keeps open. Each shard has three
// mappings; Linux allows 65,530 per process by default (vm.max_map_count).
const maxMapped = 1 << 14

// A Pool opens shards on first use, and closes unused shards if too many are open. Its shards have
// numbers. It is safe for concurrent use.
type Pool struct {
	slots    []slot
	open     func(i int) (*shards.Shard, error)
	verified bool
	limit    int64
	mapped   atomic.Int64 // number of open shards
	hand     atomic.Int64 // index of the slot where the search for a shard to close continues
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

// New returns a pool of n shards, which open opens. No shard is open yet. If complete files are
// verified, a shard without sums is never opened again, because only the opened files were
// verified.
func New(n int, verified bool, open func(i int) (*shards.Shard, error)) *Pool {
	return &Pool{slots: make([]slot, n), open: open, verified: verified, limit: maxMapped}
}

// Read calls f with shard number i, guarded by [shards.Shard.Guard]. If f fails because bytes of
// the shard's files are gone, or because its files are damaged and have been replaced, the next use
// opens the shard again.
func (p *Pool) Read(i int, f func(s *shards.Shard) error) error {
	shard, err := p.Acquire(i)
	if err != nil {
		return err
	}
	defer p.Release(i)
	err = shard.Guard(func() error { return f(shard) })
	if err != nil && (!p.verified || shard.Summed()) &&
		(errors.Is(err, mapping.ErrUnreadable) || errors.Is(err, shards.ErrCorrupt) && shard.Replaced()) {
		p.discard(i, shard, err)
	}
	return err
}

// Acquire returns shard number i for use until Release is called.
func (p *Pool) Acquire(i int) (*shards.Shard, error) {
	t := &p.slots[i]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shard == nil {
		opened, err := p.open(i)
		if err != nil && t.why != nil {
			err = fmt.Errorf("%w; reopening it: %w", t.why, err)
		}
		if err != nil {
			return nil, err
		}
		t.shard, t.why = opened, nil
		if p.mapped.Add(1) > p.limit {
			p.closeOne() // skips this slot, which is locked
		}
	}
	t.users++
	t.fresh = true
	return t.shard, nil
}

// Release ends one use of a shard.
func (p *Pool) Release(i int) {
	t := &p.slots[i]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.users--; t.users > 0 || len(t.failed) == 0 {
		return
	}
	for _, old := range t.failed {
		old.Close()
	}
	p.mapped.Add(-int64(len(t.failed)))
	t.failed = nil
}

// discard makes the next use of a shard open it again. The caller must still call Release.
func (p *Pool) discard(i int, failed *shards.Shard, why error) {
	t := &p.slots[i]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shard == failed { // else another user has already renewed it
		t.shard, t.failed, t.why = nil, append(t.failed, failed), why
	}
}

// closeOne closes an unused shard, preferably a shard without recent reads. If all shards are in
// use, it closes none.
func (p *Pool) closeOne() {
	for range 2 * len(p.slots) {
		t := &p.slots[p.hand.Add(1)%int64(len(p.slots))]
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
			p.mapped.Add(-1)
			return
		}
	}
}

// Close closes all shards. None may be in use.
func (p *Pool) Close() error {
	var errs []error
	for i := range p.slots {
		t := &p.slots[i]
		t.mu.Lock()
		if t.shard != nil {
			errs = append(errs, t.shard.Close())
			t.shard = nil
		}
		t.mu.Unlock()
	}
	p.mapped.Store(0)
	return errors.Join(errs...)
}
