// Package freelist keeps things that are expensive to make for their next user.
package freelist

import "sync"

// A List holds things that are not in use. Unlike a sync.Pool it holds on to them, so that a
// training step in its steady state allocates nothing; it grows to the largest number in use at
// once. The zero List is empty and ready for use by several goroutines.
type List[T any] struct {
	mu    sync.Mutex
	items []*T
}

// Get returns a thing that was put back, or a zero one.
func (l *List[T]) Get() *T {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.items); n > 0 {
		x := l.items[n-1]
		l.items = l.items[:n-1]
		return x
	}
	return new(T)
}

// Put gives a thing back.
func (l *List[T]) Put(x *T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.items = append(l.items, x)
}
