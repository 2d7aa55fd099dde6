package gpu

import (
	"context"
	"fmt"
	"slices"

	"mula/xpu/opencl"
)

// results are numbers that commands return to the host: the device writes them to separate buffers,
// and Wait reads and delivers them.
type results struct {
	turn chan struct{} // held by the waiting goroutine

	// Guarded by Device.mu:
	pending []delivery
	buffer  *opencl.Buffer // the buffer being filled
	used    int            // used elements of buffer
	spare   *opencl.Buffer
}

// A delivery delivers the results of a command.
type delivery struct {
	buffer *opencl.Buffer
	at, n  int
	give   func(words []uint32)
}

// resultsBytes is the size of a buffer of results.
const resultsBytes = 1 << 20

// result returns memory for n numbers that the command returns to the host. Once the command has
// ended, Wait or ToHost calls give with them; give must not use the device. The numbers are float
// or int, as the kernel writes them: math.Float32frombits, or int32.
func (c *command) result(n int, give func(words []uint32)) argument {
	d, r := c.d, &c.d.results
	nothing := argument{buffer: d.nothing, at: none}
	if d.err != nil || n == 0 {
		return nothing
	}
	if r.buffer == nil || int64(r.used+n) > r.buffer.Bytes()/4 {
		if r.buffer == nil && r.spare != nil && int64(n) <= r.spare.Bytes()/4 {
			r.buffer, r.spare = r.spare, nil
		} else {
			b, err := d.reserve(max(resultsBytes, 4*int64(n)))
			if err != nil {
				c.fail(fmt.Errorf("results of %d numbers: %w", n, err))
				return nothing
			}
			r.buffer = b // the previous buffer is released with its last delivery
		}
		r.used = 0
	}
	at := r.used
	r.used += n
	r.pending = append(r.pending, delivery{r.buffer, at, n, give})
	return argument{buffer: r.buffer, at: uint64(at)}
}

// Wait waits for all preceding commands, and delivers their host results.
func (d *Device) Wait(ctx context.Context) error {
	r := &d.results
	// One goroutine waits at a time: when Wait returns, results delivered by another must be
	// visible.
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return fmt.Errorf("gpu: waiting: %w", ctx.Err())
	}
	c := d.begin()
	pending, err := r.pending, d.err
	r.pending, r.buffer, r.used = nil, nil, 0
	c.end()
	if err == nil {
		err = d.queue.Finish(ctx)
	}
	for err == nil && len(pending) > 0 {
		pending, err = d.deliver(ctx, pending)
	}
	if err != nil {
		err = d.broken(ctx, err)
	}
	c = d.begin()
	defer c.end()
	r.pending = slices.Concat(pending, r.pending) // for the next Wait; on a broken device Close releases them
	d.keepTimes()
	return err
}

// deliver delivers the results in the first buffer, and returns the other deliveries.
func (d *Device) deliver(ctx context.Context, pending []delivery) ([]delivery, error) {
	b, n, begin := pending[0].buffer, 1, pending[0].at
	for n < len(pending) && pending[n].buffer == b {
		n++
	}
	words := make([]uint32, pending[n-1].at+pending[n-1].n-begin)
	if err := opencl.Read(ctx, d.queue, b, int64(begin), words); err != nil {
		return pending, err
	}
	for _, p := range pending[:n] {
		p.give(words[p.at-begin : p.at-begin+p.n])
	}
	c := d.begin()
	defer c.end()
	if r := &d.results; r.spare == nil && b.Bytes() == resultsBytes {
		r.spare = b
	} else {
		d.unreserve(b)
	}
	return pending[n:], nil
}

// release releases the buffers.
func (r *results) release() {
	last := r.buffer
	if last != nil {
		last.Release()
	}
	for _, p := range r.pending {
		if p.buffer != last {
			last = p.buffer
			last.Release() // may be a repeated call
		}
	}
	if r.spare != nil {
		r.spare.Release()
	}
}
