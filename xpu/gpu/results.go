package gpu

import (
	"context"
	"fmt"
	"slices"

	"mula/xpu/opencl"
)

// results are numbers that commands have for the host: the device writes them to buffers of its
// own, which Wait reads and hands out.
type results struct {
	turn chan struct{} // holds one who waits

	// under Device.mu
	pending []delivery
	buffer  *opencl.Buffer // the one that is being filled
	used    int            // elements of it
	spare   *opencl.Buffer
}

// A delivery hands out the results of a command.
type delivery struct {
	buffer *opencl.Buffer
	at, n  int
	give   func(words []uint32)
}

// resultsBytes is the size of a buffer of results.
const resultsBytes = 1 << 20

// result gives memory for n numbers that the command has for the host. give is called with them
// once the command has ended, by Wait or ToHost; it must not use the device. The numbers are float
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
			r.buffer = b // that before goes with its last delivery
		}
		r.used = 0
	}
	at := r.used
	r.used += n
	r.pending = append(r.pending, delivery{r.buffer, at, n, give})
	return argument{buffer: r.buffer, at: uint64(at)}
}

// Wait waits for all commands given before, and hands out their host results.
func (d *Device) Wait(ctx context.Context) error {
	r := &d.results
	// One waits at a time: who returns must have seen the results that another was handing out.
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
	r.pending = slices.Concat(pending, r.pending) // for the next Wait; of a broken device they go with Close
	d.keepTimes()
	return err
}

// deliver hands out the results in the first of the buffers, and returns the others.
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

// release gives the buffers back.
func (r *results) release() {
	last := r.buffer
	if last != nil {
		last.Release()
	}
	for _, p := range r.pending {
		if p.buffer != last {
			last = p.buffer
			last.Release() // again, perhaps
		}
	}
	if r.spare != nil {
		r.spare.Release()
	}
}
