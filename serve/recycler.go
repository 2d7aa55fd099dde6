package serve

import (
	"sync"

	"github.com/apache/arrow-go/v18/arrow/memory"
)

// A recycler is the allocator of one stream. Records of a stream have the same sizes, so the
// buffers of a released record are reused for a later record. This saves clearing the memory and
// work of the garbage collector. A recycler keeps as much memory as the live records had at one
// time.
type recycler struct {
	fresh memory.Allocator
	mu    sync.Mutex
	free  [][]byte
}

// mostFree exceeds the number of buffers of two records.
const mostFree = 64

// Allocate returns size bytes with arbitrary content.
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

// Reallocate returns size bytes that start with the bytes of b. b must not be used again.
func (r *recycler) Reallocate(size int, b []byte) []byte {
	if size <= cap(b) {
		return b[:size]
	}
	bigger := r.Allocate(size)
	copy(bigger, b)
	r.Free(b)
	return bigger
}

// Free keeps b for reuse.
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

// forget releases all unused buffers to the garbage collector.
func (r *recycler) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free = nil
}
