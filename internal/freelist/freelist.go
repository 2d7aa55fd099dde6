// Package freelist keeps unused objects that are expensive to allocate, so that they can be reused.
package freelist

import "sync"

// A List holds objects that are not in use. Unlike sync.Pool it never drops them, so that a
// training step allocates nothing after warm-up. The list grows to the largest number of objects in
// use at once. The zero List is empty and ready for concurrent use.
type List[T any] struct {
	mu    sync.Mutex
	items []*T
}

// Get returns an object that was put back, or a new zero object.
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

// Put returns an object to the list.
func (l *List[T]) Put(x *T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.items = append(l.items, x)
}
