package opencl

import (
	"errors"
	"sync"
	"sync/atomic"
)

// ErrReleased is the error of a call that was given something that was released before.
var ErrReleased = errors.New("it was released before")

// Counts are numbers of what is there.
type Counts struct {
	Contexts, Queues, Buffers, Programs, Kernels, Events int64
	Bytes                                                int64 // of buffers
}

var live struct{ contexts, queues, buffers, programs, kernels, events, bytes atomic.Int64 }

// Live counts what this process has made and the library has not been told to release.
func Live() Counts {
	return Counts{live.contexts.Load(), live.queues.Load(), live.buffers.Load(), live.programs.Load(),
		live.kernels.Load(), live.events.Load(), live.bytes.Load()}
}

// An object is a handle of the library with those who use it: calls under way, and objects made of
// it. It is released when its owner does not want it any more and the last of them has ended.
type object struct {
	release func(handle uintptr) int32
	parent  *object // which it holds, or nil
	count   *atomic.Int64

	mu     sync.Mutex
	handle uintptr
	users  int
	gone   bool // its owner has released it
}

// start makes an object of a new handle, which the caller owns. The parent must be held by the
// caller.
func (o *object) start(handle uintptr, release func(uintptr) int32, count *atomic.Int64, parent *object) {
	o.handle, o.release, o.count, o.parent = handle, release, count, parent
	count.Add(1)
	if parent != nil {
		parent.mu.Lock()
		parent.users++
		parent.mu.Unlock()
	}
}

// hold keeps the handle valid until drop.
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

// Release ends it, as soon as nothing uses it any more.
func (o *object) Release() {
	o.mu.Lock()
	o.gone = true
	o.end()
}

// end releases the handle if its time has come, and unlocks.
func (o *object) end() {
	handle := o.handle
	if !o.gone || o.users > 0 || handle == 0 {
		o.mu.Unlock()
		return
	}
	o.handle = 0
	o.mu.Unlock()
	o.release(handle) // fails only for what is no handle
	o.count.Add(-1)
	if o.parent != nil {
		o.parent.drop()
	}
}
