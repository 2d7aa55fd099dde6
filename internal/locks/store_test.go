package locks

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/internal/testwait"
)

// A lock of a store has one holder, who keeps it by heartbeats and gives it back even after the end
// of its context.
func TestStore(t *testing.T) {
	dir := objectstest.S3(t).URL + "job"
	ctx, cancel := context.WithCancel(t.Context())
	a, err := Open(ctx, nil, dir, quick)
	if err != nil {
		t.Fatal(err)
	}
	b := open(t, dir)
	b.timing = DefaultTiming
	path := dir + "/unit" + Suffix
	l, _, err := a.Acquire(path)
	if l == nil || err != nil || !l.Ours() {
		t.Fatalf("%v, %v", l, err)
	}
	for range 3 {
		a.at.beat(path)
		if m, holder, err := b.Acquire(path); m != nil || err != nil || holder != atomicfile.Self().String() {
			t.Fatalf("%v, %q, %v", m, holder, err)
		}
		seen := b.seen[path]
		seen.since = time.Now().Add(-2 * DefaultTiming.Stale)
		b.seen[path] = seen
	}
	beating, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); a.Beat(beating) }()
	before, _, err := a.at.read(path)
	if err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "a heartbeat", func() bool {
		now, _, err := a.at.read(path)
		return err == nil && string(now) != string(before)
	})
	cancel()
	l.Release()
	stop()
	<-ended
	m, _, err := b.Acquire(path)
	if m == nil || err != nil || !m.Ours() || l.Ours() {
		t.Fatalf("a lock that was given back: %v, %v; the first has it still: %v", m, err, l.Ours())
	}
	m.Release()
	if names, err := b.at.names(); len(names) > 0 || err != nil {
		t.Errorf("left: %q, %v", names, err)
	}
}

// Of many that see no heartbeat of a lock for long, one gets it, and its former holder notices.
func TestStoreStale(t *testing.T) {
	dir := objectstest.S3(t).URL + "job"
	path := dir + "/unit" + Suffix
	holder := open(t, dir)
	l, _, err := holder.Acquire(path)
	if l == nil || err != nil {
		t.Fatalf("%v, %v", l, err)
	}
	var got atomic.Int64
	var group sync.WaitGroup
	for range 6 {
		other := open(t, dir)
		group.Go(func() {
			testwait.Until(t, "a holder", func() bool {
				m, _, err := other.Acquire(path)
				if err != nil {
					t.Error(err)
				}
				if m != nil {
					got.Add(1)
					if !m.Ours() {
						t.Error("the new holder does not have the lock")
					}
					other.at.beat(path) // so that it stays the holder
				}
				return got.Load() > 0
			})
		})
	}
	group.Wait()
	if got.Load() != 1 || l.Ours() {
		t.Errorf("%d have the lock; the first has it still: %v", got.Load(), l.Ours())
	}
	before, _, err := objects.ReadFile(t.Context(), path, maxLock)
	if err != nil {
		t.Fatal(err)
	}
	holder.at.beat(path)
	l.Release()
	if after, _, err := objects.ReadFile(t.Context(), path, maxLock); err != nil || string(after) != string(before) {
		t.Errorf("the former holder changed the lock from %s to %s, %v", before, after, err)
	}
}

// The lock of a process of this machine that has ended is free at once.
func TestStoreDead(t *testing.T) {
	dir := objectstest.S3(t).URL + "job"
	path := dir + "/unit" + Suffix
	for _, clean := range []bool{false, true} {
		if err := objects.WriteFile(t.Context(), path, text{Owner: deadOwner(), Nonce: 1}.content()); err != nil {
			t.Fatal(err)
		}
		if clean {
			if err := Clean(t.Context(), nil, dir); err != nil {
				t.Fatal(err)
			}
		}
		l, _, err := open(t, dir).Acquire(path)
		if l == nil || err != nil {
			t.Fatalf("%v, %v", l, err)
		}
		l.Release()
	}
}

// A heartbeat whose response is lost does not lose the lock.
func TestStoreLostBeat(t *testing.T) {
	place := objectstest.S3(t)
	dir := place.URL + "job"
	path := dir + "/unit" + Suffix
	a, err := Open(t.Context(), nil, dir, quick)
	if err != nil {
		t.Fatal(err)
	}
	l, _, err := a.Acquire(path)
	if l == nil || err != nil {
		t.Fatalf("%v, %v", l, err)
	}
	at := a.at.(*store)
	claim := at.held[path]
	for range 2 {
		first := claim.info
		// The heartbeat arrives, and the process gives up when it repeats the request.
		ctx, giveUp := context.WithCancel(t.Context())
		var writes atomic.Int64
		place.Proxy.Disturb(func(r *http.Request) (f objectstest.Fault) {
			if r.Method == http.MethodPut {
				if f.Lose = writes.Add(1) == 1; !f.Lose {
					f.Drop = true
					giveUp()
				}
			}
			return f
		})
		at.ctx = ctx
		a.at.beat(path)
		place.Proxy.Disturb(nil)
		at.ctx = t.Context()
		if n := writes.Load(); n != 2 {
			t.Fatalf("%d requests", n)
		}
		a.at.beat(path)
		a.at.beat(path)
		if now, err := objects.Stat(t.Context(), path); err != nil || now.Version == first.Version ||
			now.Version != claim.info.Version || !l.Ours() {
			t.Errorf("the lock has the version %q, %v; the holder knows %q; before: %q", now.Version, err,
				claim.info.Version, first.Version)
		}
	}
}
