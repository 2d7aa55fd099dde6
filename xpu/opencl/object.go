package opencl

import (
	"errors"
	"sync"
	"sync/atomic"
)

// ErrReleased is the error of a call with an object that was released before.
var ErrReleased = errors.New("the object was released before")

// Counts are numbers of live objects.
type Counts struct {
	Contexts, Queues, Buffers, Programs, Kernels, Events int64
	Bytes                                                int64 // total size of the buffers
}

var live struct{ contexts, queues, buffers, programs, kernels, events, bytes atomic.Int64 }

// Live returns the number of objects that this process has created and not released.
func Live() Counts {
	return Counts{live.contexts.Load(), live.queues.Load(), live.buffers.Load(), live.programs.Load(),
		live.kernels.Load(), live.events.Load(), live.bytes.Load()}
}

// An object is a reference-counted handle of the library. Running calls and dependent objects hold
// references. It is released when its owner has released it and the last reference is dropped.
type object struct {
	release func(handle uintptr) int32
	parent  *object // referenced by this object, or nil
	count   *atomic.Int64

	mu     sync.Mutex
	handle uintptr
	users  int
	gone   bool // its owner has released it
}

// start initializes an object with a new handle, which the caller owns. The caller must hold a
// reference to the parent.
func (o *object) start(handle uintptr, release func(uintptr) int32, count *atomic.Int64, parent *object) {
	o.handle, o.release, o.count, o.parent = handle, release, count, parent
	count.Add(1)
	if parent != nil {
		parent.mu.Lock()
		parent.users++
		parent.mu.Unlock()
	}
}

// hold keeps the handle valid until drop is called.
func (o *object) hold() (uintptr, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.gone {
		return 0, ErrReleased
	}
	o.users++
	return o.handle, nil
}

func (o *object) drop() {
	o.mu.Lock()
	o.users--
	o.end()
}

// Release releases the object as soon as nothing uses it.
func (o *object) Release() {
	o.mu.Lock()
	o.gone = true
	o.end()
}

// end releases the handle if there are no references, and unlocks.
func (o *object) end() {
	handle := o.handle
	if !o.gone || o.users > 0 || handle == 0 {
		o.mu.Unlock()
		return
	}
	o.handle = 0
	o.mu.Unlock()
	o.release(handle) // fails only for an invalid handle
	o.count.Add(-1)
	if o.parent != nil {
		o.parent.drop()
	}
}
