package gpu

import (
	"context"
	"errors"

	"mula/xpu"
	"mula/xpu/opencl"
)

// transfers is a sequence of copies in the device's second queue.
type transfers struct {
	hostCopies
	start *opencl.Event // of the commands before the copies; nil if the second queue waits for it
}

var _ xpu.Transfers = (*transfers)(nil)

// Transfers starts a sequence of copies; see [mula/xpu.Memory].
func (d *Device) Transfers() xpu.Transfers {
	c := d.begin()
	defer c.end()
	t := &transfers{}
	t.hostCopies = hostCopies{d, &d.second, t.begin, t.failed}
	if d.err != nil {
		return t
	}
	e, err := d.queue.Marker()
	if err != nil {
		c.fail(err)
		return t
	}
	t.start, d.transfers[t] = e, true
	c.given = 0
	if err := d.queue.Flush(); err != nil {
		c.fail(err)
	}
	return t
}

// begin begins a command in the second queue.
func (t *transfers) begin() *command {
	c := t.d.begin()
	c.queue = t.d.second.queue
	if t.start != nil {
		if t.d.err == nil {
			if err := c.queue.After(t.start); err != nil {
				c.fail(err)
			}
		}
		t.start.Release()
		t.start = nil
		delete(t.d.transfers, t)
	}
	return c
}

// failed returns the first error of the device. The queue waits for the commands before the copies.
func (t *transfers) failed(context.Context) error {
	c := t.begin()
	defer c.end()
	return t.d.err
}

func (t *transfers) Copy(dst, x xpu.Tensor) {
	xpu.CheckCopied(dst, x)
	c := t.begin()
	defer c.end()
	c.copy(dst, x)
}

func (t *transfers) Wait(ctx context.Context) error {
	err := t.failed(ctx)
	if err == nil {
		err = t.d.second.queue.Finish(ctx)
	}
	if err != nil {
		return t.d.broken(ctx, err)
	}
	return nil
}

// Join makes later commands of the first queue wait for the copies.
func (t *transfers) Join() {
	c := t.begin()
	defer c.end()
	d := t.d
	if d.err != nil {
		return
	}
	e, err := c.queue.Marker()
	if err != nil {
		c.fail(err)
		return
	}
	defer e.Release()
	if err := errors.Join(c.queue.Flush(), d.queue.After(e)); err != nil {
		c.fail(err)
	}
}

// Hold makes all later commands wait until the returned function is called. The copies of
// [Device.Transfers] wait only for the commands before them. Hold is for tests of copies that run
// meanwhile.
func (d *Device) Hold() (proceed func() error, err error) {
	c := d.begin()
	defer c.end()
	return d.queue.Hold()
}
