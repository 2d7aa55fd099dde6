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
	d.writes(t)
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
	d.bytes -= int64(t.DType().Bytes() * t.Elements())
}

func poison[E any](x []E, value E) {
	for i := range x {
		x[i] = value
	}
}

// Write copies src to a tensor.
func (d *Device) Write(t xpu.Tensor, src []float32) {
	d.writes(t)
	if d.works(t) {
		d.inner.Write(t, src)
	}
}

// WriteHalves copies src to a tensor.
func (d *Device) WriteHalves(t xpu.Tensor, src []uint16) {
	if d.works(t) {
		d.inner.WriteHalves(t, src)
	}
}

// WriteInts copies src to a tensor.
func (d *Device) WriteInts(t xpu.Tensor, src []int32) {
	if d.works(t) {
		d.inner.WriteInts(t, src)
	}
}

// Read waits and copies a tensor to the host.
func (d *Device) Read(ctx context.Context, dst []float32, t xpu.Tensor) error {
	checkOwn(t)
	d.reads(t)
	if err := d.Wait(ctx); err != nil {
		return err
	}
	return d.inner.Read(ctx, dst, t)
}

// ReadHalves waits and copies a tensor to the host.
func (d *Device) ReadHalves(ctx context.Context, dst []uint16, t xpu.Tensor) error {
	checkOwn(t)
	if err := d.Wait(ctx); err != nil {
		return err
	}
	return d.inner.ReadHalves(ctx, dst, t)
}

// ReadInts waits and copies a tensor to the host.
func (d *Device) ReadInts(ctx context.Context, dst []int32, t xpu.Tensor) error {
	checkOwn(t)
	if err := d.Wait(ctx); err != nil {
		return err
	}
	return d.inner.ReadInts(ctx, dst, t)
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

// works reports whether commands are executed. It panics if an operand is memory of the host.
func (d *Device) works(operands ...xpu.Tensor) bool {
	checkOwn(operands...)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	for _, written := range d.written {
		for _, t := range operands {
			for _, w := range written {
				if overlap(t, w) {
					panic(fmt.Sprintf("discrete: transfers without Join wrote a tensor of shape %v", t.Shape()))
				}
			}
		}
	}
	return d.failed == nil
}

// reads panics if a command that is no product reads a matrix that was written for products alone.
func (d *Device) reads(tensors ...xpu.Tensor) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range tensors {
		for _, o := range d.operands {
			if overlap(t, o) {
				panic(fmt.Sprintf("discrete: a command reads a tensor of shape %v that was written for products alone",
					t.Shape()))
			}
		}
	}
}

// writes records the results of a command that are written for products alone. The other results
// are for all commands again.
func (d *Device) writes(results ...xpu.Tensor) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range results {
		d.operands = slices.DeleteFunc(d.operands, func(o xpu.Tensor) bool { return overlap(t, o) })
		if t.IsOperand() && t.Elements() > 0 {
			d.operands = append(d.operands, t)
		}
	}
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
