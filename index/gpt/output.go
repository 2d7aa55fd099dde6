package gpt

import (
	"context"
	"io"

	"golang.org/x/sync/semaphore"

	"mula/index/numpy"
)

const (
	// bytes per write: large enough for direct I/O to reach the speed of the disk
	chunkBytes = 8 << 20
	chunkAlign = 4096 // alignment that direct I/O requires of addresses, offsets and sizes
	// chunks that a builder keeps: up to four being filled or held, the others being written
	chunkMemory = 8
)

// output writes chunks of files in its own goroutine, while its owner fills others. The first error
// is the cause of the canceled context.
type output struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	lease  *lease
	memory *chunkPool
	jobs   chan job
	ended  chan struct{}
}

type job struct {
	file   io.WriterAt
	offset int64
	data   []byte
	chunk  []byte // the memory to release afterwards; nil for memory that is not the pool's
}

// chunkPool is the memory of the chunks. It is reused by later outputs.
type chunkPool struct {
	size    int // of a chunk
	free    chan []byte
	release []func()
}

func startOutput(ctx context.Context, lease *lease, memory *chunkPool) *output {
	o := &output{lease: lease, memory: memory, jobs: make(chan job, chunkMemory), ended: make(chan struct{})}
	o.ctx, o.cancel = context.WithCancelCause(ctx)
	go func() {
		defer close(o.ended)
		for j := range o.jobs {
			if o.ctx.Err() == nil {
				if _, err := j.file.WriteAt(j.data, j.offset); err != nil {
					o.cancel(err)
				}
			}
			if j.chunk != nil {
				memory.free <- j.chunk
			}
		}
	}()
	return o
}

// take returns the memory of a chunk, with arbitrary contents. While all chunks are being written,
// take waits and releases the pool slots, so that other builders can compute.
func (o *output) take() ([]byte, error) {
	m := o.memory
	select {
	case chunk := <-m.free:
		return chunk, nil
	default:
	}
	if len(m.release) < chunkMemory {
		chunk, release := numpy.Aligned(m.size)
		m.release = append(m.release, release)
		return chunk, nil
	}
	o.lease.end()
	defer o.lease.begin(o.ctx)
	select {
	case chunk := <-m.free:
		return chunk, nil
	case <-o.ctx.Done():
		return nil, context.Cause(o.ctx)
	}
}

// write queues data to be written at offset.
func (o *output) write(j job) {
	select {
	case o.jobs <- j:
		return
	default:
	}
	o.lease.end()
	o.jobs <- j
	o.lease.begin(o.ctx)
}

// writeImage queues a whole file that is in memory, which must not change until finish.
func (o *output) writeImage(file io.WriterAt, image []byte) {
	for at := 0; at < len(image); at += o.memory.size {
		o.write(job{file: file, offset: int64(at), data: image[at:min(at+o.memory.size, len(image))]})
	}
}

// finish waits until all is written. It returns the first error: of the writes, of ctx, or err.
func (o *output) finish(err error) error {
	if err != nil {
		o.cancel(err)
	}
	close(o.jobs)
	<-o.ended
	err = context.Cause(o.ctx)
	o.cancel(nil)
	return err
}

func (p *chunkPool) drop() {
	for _, release := range p.release {
		release()
	}
	*p = chunkPool{}
}

// lease is a builder's share of a pool that limits how many goroutines compute at once.
type lease struct {
	pool *semaphore.Weighted // nil: no limit
	held bool
}

// begin waits for a slot. If ctx is done, it returns without a slot, and the work ends soon.
func (l *lease) begin(ctx context.Context) {
	if l.pool != nil && !l.held {
		l.held = l.pool.Acquire(ctx, 1) == nil
	}
}

func (l *lease) end() {
	if l.held {
		l.held = false
		l.pool.Release(1)
	}
}

// more acquires up to n further slots without waiting, and returns how many it acquired.
func (l *lease) more(n int) int {
	if l.pool == nil {
		return n
	}
	got := 0
	for got < n && l.pool.TryAcquire(1) {
		got++
	}
	return got
}

func (l *lease) less(n int) {
	if l.pool != nil && n > 0 {
		l.pool.Release(int64(n))
	}
}
