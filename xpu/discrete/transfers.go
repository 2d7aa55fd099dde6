package discrete

import (
	"context"
	"slices"

	"mula/xpu"
)

// transfers are copies of a device. They set no host results of other commands.
type transfers struct{ d *Device }

// Transfers starts a sequence of copies; see [xpu.Memory].
func (d *Device) Transfers() xpu.Transfers {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	return &transfers{d}
}

// works records a copy and reports whether it is executed.
func (t *transfers) works(r reads, w writes) bool {
	checkOwn(slices.Concat[[]xpu.Tensor](r, w)...)
	t.d.mu.Lock()
	defer t.d.mu.Unlock()
	t.d.open()
	t.d.record(r, w)
	t.d.written[t] = append(t.d.written[t], w...)
	return t.d.failed == nil
}

func (t *transfers) Write(x xpu.Tensor, src []float32) {
	if t.works(nil, writes{x}) {
		t.d.inner.Write(x, src)
	}
}

func (t *transfers) WriteHalves(x xpu.Tensor, src []uint16) {
	if t.works(nil, writes{x}) {
		t.d.inner.WriteHalves(x, src)
	}
}

func (t *transfers) WriteInts(x xpu.Tensor, src []int32) {
	if t.works(nil, writes{x}) {
		t.d.inner.WriteInts(x, src)
	}
}

func (t *transfers) Copy(dst, x xpu.Tensor) {
	if t.works(reads{x}, writes{dst}) {
		t.d.inner.Copy(dst, x)
	}
}

func (t *transfers) Read(ctx context.Context, dst []float32, x xpu.Tensor) error {
	t.d.checkRead(x)
	if err := t.Wait(ctx); err != nil {
		return err
	}
	return t.d.inner.Read(ctx, dst, x)
}

func (t *transfers) ReadHalves(ctx context.Context, dst []uint16, x xpu.Tensor) error {
	t.d.checkRead(x)
	if err := t.Wait(ctx); err != nil {
		return err
	}
	return t.d.inner.ReadHalves(ctx, dst, x)
}

func (t *transfers) ReadInts(ctx context.Context, dst []int32, x xpu.Tensor) error {
	t.d.checkRead(x)
	if err := t.Wait(ctx); err != nil {
		return err
	}
	return t.d.inner.ReadInts(ctx, dst, x)
}

func (t *transfers) Wait(ctx context.Context) error {
	t.d.mu.Lock()
	defer t.d.mu.Unlock()
	t.d.open()
	if t.d.failed != nil {
		return t.d.failed
	}
	return ctx.Err()
}

func (t *transfers) Join() {
	t.d.mu.Lock()
	defer t.d.mu.Unlock()
	delete(t.d.written, t)
}
