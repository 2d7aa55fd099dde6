package opencl

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"
)

// A Context owns the memory and programs on one device.
type Context struct {
	object
	device *Device
}

// NewContext creates a context on a device.
func NewContext(d *Device) (*Context, error) {
	id, code := d.id, new(int32)
	handle := d.library.CreateContext(nil, 1, &id, 0, 0, code)
	if err := created("clCreateContext", handle, *code); err != nil {
		return nil, fmt.Errorf("opencl: %s: %w", d.Name, err)
	}
	c := &Context{device: d}
	c.start(handle, d.library.ReleaseContext, &live.contexts, nil)
	return c, nil
}

// created converts the result of a function that creates an object to an error.
func created(call string, handle uintptr, code int32) error {
	if err := check(call, code); err != nil {
		return err
	}
	if handle == 0 {
		return fmt.Errorf("%s: no object was created", call)
	}
	return nil
}

// Device returns the context's device.
func (c *Context) Device() *Device { return c.device }

// fail adds the operation and the device to an error.
func (c *Context) fail(err error, format string, args ...any) error {
	return fmt.Errorf("opencl: %s: %s: %w", c.device.Name, fmt.Sprintf(format, args...), err)
}

// A Buffer is memory on the device.
type Buffer struct {
	object
	context *Context
	bytes   int64
}

// NewBuffer allocates a buffer of the given number of bytes, at least 1, with undefined contents.
func (c *Context) NewBuffer(bytes int64) (*Buffer, error) {
	if bytes < 1 || bytes > c.device.MaxAllocation {
		return nil, fmt.Errorf("opencl: %s: invalid buffer size of %d bytes; it must be from 1 to %d", c.device.Name,
			bytes,
			c.device.MaxAllocation)
	}
	parent, err := c.hold()
	if err != nil {
		return nil, c.fail(err, "a buffer of %d bytes in this context", bytes)
	}
	defer c.drop()
	l, code := c.device.library, new(int32)
	handle := l.CreateBuffer(parent, memoryReadWrite, uintptr(bytes), 0, code)
	if err := created("clCreateBuffer", handle, *code); err != nil {
		return nil, c.fail(err, "a buffer of %d bytes on a device with %d bytes of memory", bytes, c.device.Memory)
	}
	b := &Buffer{context: c, bytes: bytes}
	live.bytes.Add(bytes)
	b.start(handle, func(handle uintptr) int32 {
		defer live.bytes.Add(-bytes)
		return l.ReleaseMemObject(handle)
	}, &live.buffers, &c.object)
	return b, nil
}

// Bytes returns the size of the buffer.
func (b *Buffer) Bytes() int64 { return b.bytes }

// A Queue holds commands, which the device executes in order. It may execute the commands of
// several queues at the same time; see [Queue.After].
type Queue struct {
	object
	context *Context
}

// NewQueue creates a queue. With times it records the times of its commands; see [Event.Times].
func (c *Context) NewQueue(times bool) (*Queue, error) {
	parent, err := c.hold()
	if err != nil {
		return nil, c.fail(err, "a queue in this context")
	}
	defer c.drop()
	l, code := c.device.library, new(int32)
	properties := uint64(0)
	if times {
		properties = queueProfiling
	}
	handle := l.CreateCommandQueue(parent, c.device.id, properties, code)
	if err := created("clCreateCommandQueue", handle, *code); err != nil {
		return nil, c.fail(err, "a queue")
	}
	q := &Queue{context: c}
	q.start(handle, l.ReleaseCommandQueue, &live.queues, &c.object)
	return q, nil
}

// Number is an element type of a buffer.
type Number interface {
	uint8 | uint16 | int32 | uint32 | int64 | uint64 | float32
}

// Write copies from to the buffer, starting at its element first, after all preceding commands, and
// waits for the end of the copy. If ctx ends earlier, from may still be read until the command
// ends.
func Write[T Number](ctx context.Context, q *Queue, b *Buffer, first int64, from []T) error {
	return transfer(ctx, q, b, first, from, "clEnqueueWriteBuffer", q.context.device.library.EnqueueWriteBuffer)
}

// Read copies the buffer, starting at its element first, to to, after all preceding commands, and
// waits for the end of the copy. If ctx ends earlier, to may still be written until the command
// ends.
func Read[T Number](ctx context.Context, q *Queue, b *Buffer, first int64, to []T) error {
	return transfer(ctx, q, b, first, to, "clEnqueueReadBuffer", q.context.device.library.EnqueueReadBuffer)
}

// enqueueCopy is clEnqueueReadBuffer or clEnqueueWriteBuffer.
type enqueueCopy = func(queue, buffer uintptr, blocking uint32, offset, bytes uintptr, data unsafe.Pointer,
	waits uint32, wait, event *uintptr) int32

func transfer[T Number](ctx context.Context, q *Queue, b *Buffer, first int64, data []T, call string,
	enqueue enqueueCopy) error {
	var element T
	size := int64(unsafe.Sizeof(element))
	if n := int64(len(data)); first < 0 || first > b.bytes/size || n > b.bytes/size-first {
		return fmt.Errorf("opencl: %s: %d elements of %d bytes from element %d on exceed a buffer of %d bytes", call, n,
			size, first, b.bytes)
	}
	if b.context != q.context {
		return fmt.Errorf("opencl: %s: the buffer and the queue have different contexts", call)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("opencl: %s: %w", call, err)
	}
	if len(data) == 0 {
		return nil
	}
	buffer, err := b.hold()
	if err != nil {
		return fmt.Errorf("opencl: %s: the buffer: %w", call, err)
	}
	defer b.drop() // the command keeps its own reference
	pin := new(runtime.Pinner)
	pin.Pin(&data[0])
	e, err := q.enqueue(call, func(queue uintptr, event *uintptr) int32 {
		return enqueue(queue, buffer, 0, uintptr(first*size), uintptr(int64(len(data))*size), unsafe.Pointer(&data[0]),
			0, nil, event)
	})
	if err != nil {
		pin.Unpin()
		return err
	}
	defer e.Release()
	return e.wait(ctx, func(ended bool) {
		if ended {
			pin.Unpin()
			return
		}
		lost.Lock()
		defer lost.Unlock()
		lost.pins = append(lost.pins, pin)
	})
}

// Zero sets bytes of the buffer to zero, starting at byte first, after all preceding commands. It
// does not wait. first and bytes must be multiples of 4.
func (q *Queue) Zero(b *Buffer, first, bytes int64) error {
	const call = "clEnqueueFillBuffer"
	if err := q.takes(call, b, first, bytes); err != nil || bytes == 0 {
		return err
	}
	buffer, err := b.hold()
	if err != nil {
		return fmt.Errorf("opencl: %s: the buffer: %w", call, err)
	}
	defer b.drop()
	zero := new(uint32)
	return q.give(call, func(queue uintptr) int32 {
		return q.context.device.library.EnqueueFillBuffer(queue, buffer, unsafe.Pointer(zero), unsafe.Sizeof(*zero),
			uintptr(first), uintptr(bytes), 0, nil, nil)
	})
}

// Copy copies bytes within a buffer or from one buffer to another, after all preceding commands. It
// does not wait. The ranges must not overlap; offsets and sizes must be multiples of 4.
func (q *Queue) Copy(to *Buffer, toFirst int64, from *Buffer, fromFirst, bytes int64) error {
	const call = "clEnqueueCopyBuffer"
	err1, err2 := q.takes(call, to, toFirst, bytes), q.takes(call, from, fromFirst, bytes)
	if err := errors.Join(err1, err2); err != nil || bytes == 0 {
		return err
	}
	if to == from && toFirst < fromFirst+bytes && fromFirst < toFirst+bytes {
		return fmt.Errorf("opencl: %s: %d bytes from %d on and from %d on of one buffer overlap", call, bytes,
			fromFirst, toFirst)
	}
	toHandle, err := to.hold()
	if err != nil {
		return fmt.Errorf("opencl: %s: the buffer: %w", call, err)
	}
	defer to.drop()
	fromHandle, err := from.hold()
	if err != nil {
		return fmt.Errorf("opencl: %s: the buffer: %w", call, err)
	}
	defer from.drop()
	return q.give(call, func(queue uintptr) int32 {
		return q.context.device.library.EnqueueCopyBuffer(queue, fromHandle, toHandle, uintptr(fromFirst),
			uintptr(toFirst), uintptr(bytes), 0, nil, nil)
	})
}

// Flush makes the driver start the enqueued commands, if it has not. It does not wait.
func (q *Queue) Flush() error { return q.give("clFlush", q.context.device.library.Flush) }

// takes checks a range of bytes in a buffer.
func (q *Queue) takes(call string, b *Buffer, first, bytes int64) error {
	if first < 0 || bytes < 0 || first > b.bytes || bytes > b.bytes-first || first%4 != 0 || bytes%4 != 0 {
		return fmt.Errorf("opencl: %s: %d bytes from byte %d on exceed a buffer of %d bytes or are not multiples of 4",
			call, bytes, first, b.bytes)
	}
	if b.context != q.context {
		return fmt.Errorf("opencl: %s: the buffer and the queue have different contexts", call)
	}
	return nil
}

// lost is the memory of commands whose end will never be known. The library may still use it.
var lost struct {
	sync.Mutex
	pins []*runtime.Pinner
}

// give enqueues a command without an event.
func (q *Queue) give(call string, give func(queue uintptr) int32) error {
	queue, err := q.hold()
	if err != nil {
		return fmt.Errorf("opencl: %s: the queue: %w", call, err)
	}
	defer q.drop()
	code := give(queue)
	handlers().RestoreIfFaults()
	if err := check(call, code); err != nil {
		return q.context.fail(err, "a command")
	}
	return nil
}

// enqueue enqueues a command, and returns its event.
func (q *Queue) enqueue(call string, give func(queue uintptr, event *uintptr) int32) (*Event, error) {
	queue, err := q.hold()
	if err != nil {
		return nil, fmt.Errorf("opencl: %s: the queue: %w", call, err)
	}
	defer q.drop()
	handle := new(uintptr)
	code := give(queue, handle)
	handlers().RestoreIfFaults()
	if err := check(call, code); err != nil {
		return nil, q.context.fail(err, "a command")
	}
	e := &Event{library: q.context.device.library, call: call}
	e.start(*handle, e.library.ReleaseEvent, &live.events, &q.object)
	return e, nil
}

// Finish returns when all preceding commands of the queue have ended. It does not report their
// errors; their own events do.
func (q *Queue) Finish(ctx context.Context) error {
	e, err := q.Marker()
	if err != nil {
		return err
	}
	defer e.Release()
	return e.Wait(ctx)
}

// Marker returns an event that ends when all preceding commands of the queue have ended. It must be
// released.
func (q *Queue) Marker() (*Event, error) {
	l := q.context.device.library
	return q.enqueue("clEnqueueMarkerWithWaitList", func(queue uintptr, event *uintptr) int32 {
		return l.EnqueueMarkerWithWaitList(queue, 0, nil, event)
	})
}

// After makes all later commands of the queue wait for the end of an event of another queue, whose
// commands must have been flushed.
func (q *Queue) After(e *Event) error {
	const call = "clEnqueueBarrierWithWaitList"
	handle := new(uintptr)
	var err error
	if *handle, err = e.hold(); err != nil {
		return fmt.Errorf("opencl: %s: the event: %w", call, err)
	}
	defer e.drop() // the command keeps its own reference
	return q.give(call, func(queue uintptr) int32 {
		return q.context.device.library.EnqueueBarrierWithWaitList(queue, 1, handle, nil)
	})
}

// Hold makes all later commands of the queue wait until the returned function is called. It is for
// tests of other queues, which continue.
func (q *Queue) Hold() (proceed func() error, err error) {
	l, code := q.context.device.library, new(int32)
	context, err := q.context.hold()
	if err != nil {
		return nil, q.context.fail(err, "an event in this context")
	}
	defer q.context.drop()
	handle := l.CreateUserEvent(context, code)
	if err := created("clCreateUserEvent", handle, *code); err != nil {
		return nil, q.context.fail(err, "an event")
	}
	e := &Event{library: l, call: "clCreateUserEvent"}
	e.start(handle, l.ReleaseEvent, &live.events, &q.context.object)
	proceed = func() error {
		defer e.Release()
		return check("clSetUserEventStatus", l.SetUserEventStatus(handle, 0))
	}
	if err := q.After(e); err != nil {
		return nil, errors.Join(err, proceed())
	}
	return proceed, nil
}

// An Event is the state of an enqueued command.
type Event struct {
	object
	library *library
	call    string
}

// Wait returns when the command has ended, with an error if it failed.
func (e *Event) Wait(ctx context.Context) error { return e.wait(ctx, func(bool) {}) }

// wait waits for the end of the command. It calls done once: with true when the command has ended,
// even if ctx ended long before, or with false if the library can no longer report the end.
func (e *Event) wait(ctx context.Context, done func(ended bool)) error {
	handle, err := e.hold()
	if err != nil {
		return fmt.Errorf("opencl: waiting for %s: %w", e.call, err)
	}
	end := func() error {
		defer e.drop()
		ended, err := e.outcome(handle)
		done(ended)
		return err
	}
	if ctx.Done() == nil {
		return end()
	}
	ended := make(chan error, 1)
	go func() { ended <- end() }()
	if err, ok := await(ctx, ended); ok {
		return err
	}
	return fmt.Errorf("opencl: waiting for %s: %w", e.call, ctx.Err())
}

// await returns a value received from c, or false if ctx ends first. An available value is returned
// even if ctx has ended too.
func await[T any](ctx context.Context, c <-chan T) (v T, ok bool) {
	select {
	case v = <-c:
		return v, true
	case <-ctx.Done():
	}
	select {
	case v = <-c:
		return v, true
	default:
		return v, false
	}
}

// outcome waits for the end of the command without a limit, and reports whether it ended and its
// error.
func (e *Event) outcome(handle uintptr) (ended bool, err error) {
	err = check("clWaitForEvents", e.library.WaitForEvents(1, &handle))
	handlers().RestoreIfFaults() // a kernel may be compiled at its first run
	if err == nil {
		return true, nil
	}
	status, asked := askNumber[int32]("clGetEventInfo", func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
		return e.library.GetEventInfo(handle, eventStatus, size, value, bytes)
	})
	ended = asked == nil && status <= 0 // CL_COMPLETE, or an error code
	if ended && status < 0 {
		err = check(e.call, status)
	}
	return ended, fmt.Errorf("opencl: waiting for %s: %w", e.call, err)
}

// Times are moments of a command on the device's clock, whose origin is arbitrary.
type Times struct{ Queued, Submitted, Started, Ended time.Duration }

// Ran returns how long the command ran on the device.
func (t Times) Ran() time.Duration { return t.Ended - t.Started }

// Times returns the times of a command that has ended; before the end it fails.
func (e *Event) Times() (Times, error) {
	var t Times
	handle, err := e.hold()
	if err != nil {
		return t, fmt.Errorf("opencl: times of %s: %w", e.call, err)
	}
	defer e.drop()
	for what, moment := range map[uint32]*time.Duration{eventQueued: &t.Queued, eventSubmitted: &t.Submitted,
		eventStarted: &t.Started, eventEnded: &t.Ended} {
		n, err := askNumber[uint64]("clGetEventProfilingInfo", func(size uintptr, value unsafe.Pointer,
			bytes *uintptr) int32 {
			return e.library.GetEventProfilingInfo(handle, what, size, value, bytes)
		})
		if err != nil {
			return t, fmt.Errorf("opencl: times of %s: %w", e.call, err)
		}
		*moment = time.Duration(n)
	}
	return t, nil
}
