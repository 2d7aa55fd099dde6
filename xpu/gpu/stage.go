package gpu

import (
	"context"
	"fmt"
	"unsafe"

	"mula/xpu"
	"mula/xpu/opencl"
)

// Sizes of the memory of a stage. Two pieces of a read are under way at the same time.
const (
	stageBytes = 8 << 20
	stagePiece = stageBytes / 4
	stageAlign = 1 << 12
	stageSpans = 256 // limits the number of events
)

// A stage is pinned memory of the host, through which a queue copies numbers from and to the
// device. The memory is a ring of the spans of the copies under way.
type stage struct {
	queue  *opencl.Queue
	memory *opencl.Pinned
	turn   chan struct{} // held by the goroutine that copies

	// Guarded by turn:
	next   int64  // first byte of the next span
	spans  []span // under way, in the order of the queue
	before int    // number of spans that have ended
}

// A span is the memory of one copy, and the event of its end.
type span struct {
	begin, end int64
	event      *opencl.Event
}

func newStage(q *opencl.Queue) (s stage, err error) {
	s.queue, s.turn = q, make(chan struct{}, 1)
	s.memory, err = q.NewPinned(stageBytes)
	return s, err
}

// release releases the memory; the stage may be zero.
func (s *stage) release() {
	for _, p := range s.spans {
		p.event.Release()
	}
	if s.memory != nil {
		s.memory.Release()
	}
}

// reserve returns the first byte of n bytes of memory, at most stagePiece, that no copy uses.
func (s *stage) reserve(ctx context.Context, n int64) (int64, error) {
	n = (n + stageAlign - 1) / stageAlign * stageAlign
	if s.next+n > stageBytes {
		s.next = 0
	}
	begin, end := s.next, s.next+n
	last := -1 // of the spans that must have ended
	for i, p := range s.spans {
		if p.begin < end && begin < p.end || i < len(s.spans)-(stageSpans-1) {
			last = i
		}
	}
	if err := s.wait(ctx, s.before+last); err != nil {
		return 0, err
	}
	s.next = end
	return begin, nil
}

// started adds the span of a copy of n bytes, and returns its number.
func (s *stage) started(begin, n int64, e *opencl.Event) (number int) {
	s.spans = append(s.spans, span{begin, begin + n, e})
	return s.before + len(s.spans) - 1
}

// wait waits for the end of a span, and of all spans before it.
func (s *stage) wait(ctx context.Context, number int) error {
	for s.before <= number {
		err := s.spans[0].event.Wait(ctx)
		if err != nil && ctx.Err() != nil {
			return err // the copy may still be under way
		}
		s.spans[0].event.Release()
		s.spans = s.spans[:copy(s.spans, s.spans[1:])]
		s.before++
		if err != nil {
			return err
		}
	}
	return nil
}

// write copies src to a tensor.
func write[E float32 | uint16 | int32](h hostCopies, t xpu.Tensor, src []E) {
	d, s := h.d, h.stage
	c := h.command()
	if len(src) == 0 {
		c.end()
		return
	}
	a, at := func() (*allocation, int64) {
		defer c.end() // it may panic
		return d.memory.of(t)
	}()
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	data := bytesOf(src)
	first := at
	at *= int64(unsafe.Sizeof(src[0]))
	for len(data) > 0 {
		n := min(int64(len(data)), stagePiece)
		from, err := s.reserve(context.Background(), n)
		if err == nil {
			copy(s.memory.Bytes()[from:], data[:n])
		}
		c := h.command()
		c.wrote(a, first, t)
		if d.err == nil && err == nil {
			var e *opencl.Event
			if e, err = s.queue.Upload(a.buffer, at, s.memory, from, n); err == nil {
				s.started(from, n, e)
			}
		}
		if err != nil {
			c.fail(err)
		}
		failed := d.err != nil
		c.end()
		if failed {
			return
		}
		data, at = data[n:], at+n
	}
}

// read copies elements of an allocation, from element at on, to dst, after all preceding commands
// of the queue.
func read[E float32 | uint16 | int32](ctx context.Context, s *stage, dst []E, a *allocation, at int64) error {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return fmt.Errorf("waiting for the memory of copies: %w", ctx.Err())
	}
	data := bytesOf(dst)
	at *= int64(unsafe.Sizeof(dst[0]))
	number, from, last := 0, int64(0), []byte(nil) // of the piece under way
	for len(data) > 0 || last != nil {
		n := min(int64(len(data)), stagePiece)
		nextNumber, nextFrom, next := 0, int64(0), []byte(nil)
		if n > 0 {
			begin, err := s.reserve(ctx, n)
			if err != nil {
				return err
			}
			e, err := s.queue.Download(s.memory, begin, a.buffer, at, n)
			if err != nil {
				return err
			}
			nextNumber, nextFrom, next = s.started(begin, n, e), begin, data[:n]
			data, at = data[n:], at+n
			if err := s.queue.Flush(); err != nil {
				return err
			}
		}
		if last != nil {
			if err := s.wait(ctx, number); err != nil {
				return err
			}
			copy(last, s.memory.Bytes()[from:])
		}
		number, from, last = nextNumber, nextFrom, next
	}
	return nil
}

// bytesOf returns the memory of x.
func bytesOf[E float32 | uint16 | int32](x []E) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(*new(E))))
}
