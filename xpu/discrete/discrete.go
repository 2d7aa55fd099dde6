// Package discrete is an [xpu.Device] for tests. Like a GPU, it has memory that the host cannot
// read: [xpu.Tensor.Host] returns nil for its tensors. Another device, which shares memory with the
// host, executes its commands, so that the results have the other device's bits. It finds these
// mistakes of its callers:
//
//   - a command panics if it gets memory of the host, or after Close;
//   - host results are NaN, or the least int64, until Wait or Read;
//   - released memory becomes NaN, or the least int32;
//   - a command panics if it gets memory that transfers have written, before their Join;
//   - a command panics if it reads a matrix that was written for products alone, see
//     [xpu.Tensor.AsOperand].
package discrete

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"unsafe"

	"mula/xpu"
)

// Device is a device whose memory is separate from the host's. It is safe for use by several
// goroutines at once.
type Device struct {
	inner xpu.Device

	mu       sync.Mutex
	bytes    int64 // size of all tensors
	capacity int64
	results  []func() // functions that set host results
	written  map[*transfers][]xpu.Tensor
	operands []xpu.Tensor // matrices that were written for products alone
	failed   error
	closed   bool
}

var _ xpu.Device = (*Device)(nil)

// New returns a device whose commands are executed by inner, which must share memory with the host.
// Close closes inner too.
func New(inner xpu.Device) *Device {
	return &Device{inner: inner, capacity: 1 << 40, written: map[*transfers][]xpu.Tensor{}}
}

// SetCapacity limits the total number of bytes of all tensors. The default is 1 TiB.
func (d *Device) SetCapacity(bytes int64) { d.capacity = bytes }

// Fail makes all later commands of the device fail with an error, as if its driver had lost it.
func (d *Device) Fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed == nil {
		d.failed = err
	}
}

// InUse returns the number of bytes that have not been released.
func (d *Device) InUse() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.bytes
}

// Name returns "discrete" and the name of the inner device.
func (d *Device) Name() string { return "discrete " + d.inner.Name() }

// Precision returns the inner device's precision.
func (d *Device) Precision() xpu.Precision { return d.inner.Precision() }

// Arithmetic returns the inner device's arithmetic, because the bits are the same.
func (d *Device) Arithmetic() string { return d.inner.Arithmetic() }

// ProductRows returns the inner device's number of rows.
func (d *Device) ProductRows() int { return d.inner.ProductRows() }

// Threads returns the inner device's number of threads.
func (d *Device) Threads() int { return d.inner.Threads() }

// Parallel calls the inner device's Parallel.
func (d *Device) Parallel(n int, f func(i int)) { d.inner.Parallel(n, f) }

// Close closes the inner device.
func (d *Device) Close() {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.inner.Close()
}

// open panics after Close. The caller holds the lock.
func (d *Device) open() {
	if d.closed {
		panic("discrete: the device was used after Close")
	}
}

// New allocates a tensor that the host cannot see; see [xpu.Memory].
func (d *Device) New(dtype xpu.DType, shape ...int) (xpu.Tensor, error) {
	n, err := xpu.Elements(shape)
	if err != nil {
		return xpu.Tensor{}, fmt.Errorf("discrete: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	if d.failed != nil {
		return xpu.Tensor{}, d.failed
	}
	if int64(n) > (d.capacity-d.bytes)/int64(dtype.Bytes()) {
		return xpu.Tensor{}, fmt.Errorf("discrete: out of memory for %d numbers: %d of %d bytes are in use", n, d.bytes,
			d.capacity)
	}
	t, err := d.inner.New(dtype, shape...)
	if err != nil {
		return xpu.Tensor{}, err
	}
	d.bytes += int64(dtype.Bytes() * n)
	return t.Discrete(), nil
}

// Release releases a tensor; see [xpu.Memory].
func (d *Device) Release(t xpu.Tensor) {
	checkOwn(t)
	d.inner.Release(t)
	switch t.DType() {
	case xpu.Int32:
		poison(t.Ints(), math.MinInt32)
	case xpu.BFloat16:
		poison(t.Halves(), 0x7fc0) // NaN
	default:
		poison(t.Floats(), float32(math.NaN()))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.record(nil, writes{t})
	d.bytes -= int64(t.DType().Bytes() * t.Elements())
}

func poison[E any](x []E, value E) {
	for i := range x {
		x[i] = value
	}
}

// Write copies src to a tensor.
func (d *Device) Write(t xpu.Tensor, src []float32) {
	if d.works(nil, writes{t}) {
		d.inner.Write(t, src)
	}
}

// WriteHalves copies src to a tensor.
func (d *Device) WriteHalves(t xpu.Tensor, src []uint16) {
	if d.works(nil, writes{t}) {
		d.inner.WriteHalves(t, src)
	}
}

// WriteInts copies src to a tensor.
func (d *Device) WriteInts(t xpu.Tensor, src []int32) {
	if d.works(nil, writes{t}) {
		d.inner.WriteInts(t, src)
	}
}

// Read waits and copies a tensor to the host.
func (d *Device) Read(ctx context.Context, dst []float32, t xpu.Tensor) error {
	d.checkRead(t)
	if err := d.Wait(ctx); err != nil {
		return err
	}
	return d.inner.Read(ctx, dst, t)
}

// ReadHalves waits and copies a tensor to the host.
func (d *Device) ReadHalves(ctx context.Context, dst []uint16, t xpu.Tensor) error {
	d.checkRead(t)
	if err := d.Wait(ctx); err != nil {
		return err
	}
	return d.inner.ReadHalves(ctx, dst, t)
}

// ReadInts waits and copies a tensor to the host.
func (d *Device) ReadInts(ctx context.Context, dst []int32, t xpu.Tensor) error {
	d.checkRead(t)
	if err := d.Wait(ctx); err != nil {
		return err
	}
	return d.inner.ReadInts(ctx, dst, t)
}

// checkRead panics if the host must not read the tensor.
func (d *Device) checkRead(t xpu.Tensor) {
	checkOwn(t)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.record(reads{t}, nil)
}

// Wait sets host results, or returns the error of a failed device. With a done context it sets
// nothing, as if the wait took longer.
func (d *Device) Wait(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	if d.failed != nil {
		return d.failed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, bring := range d.results {
		bring()
	}
	d.results = d.results[:0]
	return nil
}

// Capacity returns the limit set with SetCapacity.
func (d *Device) Capacity() int64 { return d.capacity }

// The tensors that a command reads, and its results. A result that the command also reads is in
// both.
type (
	reads  []xpu.Tensor
	writes []xpu.Tensor
)

// works records a command and reports whether it is executed. operands are the tensors that may
// have been written for products alone: operands of products, and tensors that the command does not
// use. works panics if the command must not get one of the tensors.
func (d *Device) works(r reads, w writes, operands ...xpu.Tensor) bool {
	all := slices.Concat[[]xpu.Tensor](r, w, operands)
	checkOwn(all...)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	for _, written := range d.written {
		for _, t := range all {
			if overlapsAny(t, written) {
				panic(fmt.Sprintf("discrete: transfers without Join wrote a tensor of shape %v", t.Shape()))
			}
		}
	}
	d.record(r, w)
	return d.failed == nil
}

// record panics if a command reads a matrix that was written for products alone, and records the
// results that are written for products alone. The other results are for all commands again. The
// caller holds the lock.
func (d *Device) record(r reads, w writes) {
	for _, t := range r {
		if overlapsAny(t, d.operands) {
			panic(fmt.Sprintf("discrete: a command reads a tensor of shape %v that was written for products alone",
				t.Shape()))
		}
	}
	for _, t := range w {
		d.operands = slices.DeleteFunc(d.operands, func(o xpu.Tensor) bool { return overlap(t, o) })
		if t.IsOperand() && t.Elements() > 0 {
			d.operands = append(d.operands, t)
		}
	}
}

// overlapsAny reports whether a tensor shares memory with one of others.
func overlapsAny(t xpu.Tensor, others []xpu.Tensor) bool {
	return slices.ContainsFunc(others, func(o xpu.Tensor) bool { return overlap(t, o) })
}

// overlap reports whether two tensors share memory, gaps included.
func overlap(x, y xpu.Tensor) bool {
	xBegin, xEnd := span(x)
	yBegin, yEnd := span(y)
	return xBegin < yEnd && yBegin < xEnd
}

// span returns the addresses of the first byte of a tensor, and of the first byte after it.
func span(t xpu.Tensor) (begin, end uintptr) {
	if t.Elements() == 0 {
		return 0, 0
	}
	bytes := func(first unsafe.Pointer, elements int) (begin, end uintptr) {
		return uintptr(first), uintptr(first) + uintptr(elements*t.DType().Bytes())
	}
	switch t.DType() {
	case xpu.Int32:
		return bytes(unsafe.Pointer(&t.Ints()[0]), len(t.Ints()))
	case xpu.BFloat16:
		return bytes(unsafe.Pointer(&t.Halves()[0]), len(t.Halves()))
	}
	return bytes(unsafe.Pointer(&t.Floats()[0]), len(t.Floats()))
}

// checkOwn panics if an operand with elements is memory of the host.
func checkOwn(operands ...xpu.Tensor) {
	for _, t := range operands {
		if t.Elements() > 0 && !t.IsDiscrete() {
			panic(fmt.Sprintf("discrete: a tensor of shape %v is not memory of this device", t.Shape()))
		}
	}
}

// later makes the next Wait call bring, which sets host results.
func (d *Device) later(bring func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.results = append(d.results, bring)
}

// result returns memory for host results in place of x. computed must be called when they are
// complete; x is poisoned from then until the next Wait. Another goroutine may wait during the
// command; that Wait does not set these results.
func (d *Device) result(x []float64) (y []float64, computed func()) {
	y = make([]float64, len(x))
	return y, func() {
		for i := range x {
			x[i] = math.NaN()
		}
		d.later(func() { copy(x, y) })
	}
}
