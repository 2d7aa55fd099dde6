package opencl

import (
	"fmt"
	"unsafe"
)

// Pinned is memory of the host that the driver has allocated and that stays in place, so that a
// device copies from and to it directly.
type Pinned struct {
	object
	context *Context
	memory  []byte
}

// NewPinned allocates the given number of bytes, at least 1. The queue maps the memory into the
// process; no command may run in the queue.
func (q *Queue) NewPinned(bytes int64) (*Pinned, error) {
	c, l, code := q.context, q.context.device.library, new(int32)
	if bytes < 1 || bytes > c.device.MaxAllocation {
		return nil, fmt.Errorf("opencl: %s: invalid size of %d bytes of pinned memory; it must be from 1 to %d",
			c.device.Name, bytes, c.device.MaxAllocation)
	}
	queue, err := q.hold()
	if err != nil {
		return nil, c.fail(err, "pinned memory: the queue")
	}
	defer q.drop()
	context, err := c.hold()
	if err != nil {
		return nil, c.fail(err, "pinned memory: the context")
	}
	defer c.drop()
	handle := l.CreateBuffer(context, memoryReadWrite|memoryAllocateHost, uintptr(bytes), 0, code)
	if err := created("clCreateBuffer", handle, *code); err != nil {
		return nil, c.fail(err, "%d bytes of pinned memory", bytes)
	}
	at := l.EnqueueMapBuffer(queue, handle, 1, mapRead|mapWrite, 0, uintptr(bytes), 0, nil, nil, code)
	handlers().RestoreIfFaults()
	err = check("clEnqueueMapBuffer", *code)
	if err == nil && at == nil {
		err = fmt.Errorf("clEnqueueMapBuffer: no address")
	}
	if err != nil {
		l.ReleaseMemObject(handle)
		return nil, c.fail(err, "%d bytes of pinned memory", bytes)
	}
	p := &Pinned{context: c, memory: unsafe.Slice((*byte)(at), bytes)}
	live.bytes.Add(bytes)
	p.start(handle, func(handle uintptr) int32 {
		defer live.bytes.Add(-bytes)
		l.EnqueueUnmapMemObject(queue, handle, at, 0, nil, nil) // runs after all commands that use the memory
		return l.ReleaseMemObject(handle)
	}, &live.buffers, &q.object)
	return p, nil
}

// Bytes returns the memory, which is valid until Release.
func (p *Pinned) Bytes() []byte { return p.memory }

// Upload copies bytes from byte from of p to byte to of the buffer, after all preceding commands of
// the queue. It does not wait: the bytes of p must not change before the end of the event, which
// the caller must release.
func (q *Queue) Upload(b *Buffer, to int64, p *Pinned, from, bytes int64) (*Event, error) {
	return q.copyPinned("clEnqueueWriteBuffer", q.context.device.library.EnqueueWriteBuffer, b, to, p, from, bytes)
}

// Download copies bytes from byte from of the buffer to byte to of p, after all preceding commands
// of the queue. It does not wait: p has the bytes at the end of the event, which the caller must
// release.
func (q *Queue) Download(p *Pinned, to int64, b *Buffer, from, bytes int64) (*Event, error) {
	return q.copyPinned("clEnqueueReadBuffer", q.context.device.library.EnqueueReadBuffer, b, from, p, to, bytes)
}

// copyPinned copies bytes between byte first of b and byte at of p.
func (q *Queue) copyPinned(call string, enqueue enqueueCopy, b *Buffer, first int64, p *Pinned, at,
	bytes int64) (*Event, error) {
	held := int64(len(p.memory))
	if bytes < 1 || first < 0 || first > b.bytes || bytes > b.bytes-first || at < 0 || at > held || bytes > held-at {
		return nil, fmt.Errorf("opencl: %s: %d bytes from byte %d on exceed a buffer of %d bytes, or from byte %d on "+
			"pinned memory of %d bytes", call, bytes, first, b.bytes, at, held)
	}
	if b.context != q.context || p.context != q.context {
		return nil, fmt.Errorf("opencl: %s: the buffer, the pinned memory and the queue have different contexts", call)
	}
	buffer, err := b.hold()
	if err != nil {
		return nil, fmt.Errorf("opencl: %s: the buffer: %w", call, err)
	}
	defer b.drop() // the command keeps its own reference
	if _, err := p.hold(); err != nil {
		return nil, fmt.Errorf("opencl: %s: the pinned memory: %w", call, err)
	}
	defer p.drop()
	return q.enqueue(call, func(queue uintptr, event *uintptr) int32 {
		return enqueue(queue, buffer, 0, uintptr(first), uintptr(bytes), unsafe.Pointer(&p.memory[at]), 0, nil, event)
	})
}
