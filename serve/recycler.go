package serve

import (
	"sync"

	"github.com/apache/arrow-go/v18/arrow/memory"
)

// A recycler is the allocator of one stream. Its records have the same sizes, so that the buffers
// of one are those of a later one: nothing is cleared that is written over, and the garbage
// collector is left alone. It holds what the records that were alive at one time held.
type recycler struct {
	fresh memory.Allocator
	mu    sync.Mutex
	free  [][]byte
}

// mostFree is more than the buffers of two records.
const mostFree = 64

// Allocate gives size bytes, of any content.
func (r *recycler) Allocate(size int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	best := -1
	for i, b := range r.free {
		if cap(b) >= size && cap(b)/2 <= size && (best < 0 || cap(b) < cap(r.free[best])) {
			best = i
		}
	}
	if best < 0 {
		return r.fresh.Allocate(size)
	}
	b := r.free[best]
	last := len(r.free) - 1
	r.free[best], r.free[last] = r.free[last], nil
	r.free = r.free[:last]
	return b[:size]
}

// Reallocate gives size bytes that begin with those of b, which is not to be used again.
func (r *recycler) Reallocate(size int, b []byte) []byte {
	if size <= cap(b) {
		return b[:size]
	}
	bigger := r.Allocate(size)
	copy(bigger, b)
	r.Free(b)
	return bigger
}

// Free keeps b for a later use.
func (r *recycler) Free(b []byte) {
	if cap(b) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.free) < mostFree {
		r.free = append(r.free, b[:0])
	}
}

// forget gives what is not in use to the garbage collector.
func (r *recycler) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free = nil
}
