// Package apart is an [xpu.Device] for tests. Like a GPU, it has separate host and device memory;
// another device, which shares memory with the host, computes on the device's side. Results have
// the right bits only if the host calls ToHost before every read and ToDevice after every write,
// and reads host results after Wait. If a call is missing, numbers become NaN or very small:
//
//   - memory that a command writes on the device's side becomes NaN, or the least int32, on the
//     host's side, until ToHost;
//   - host results are NaN, or the least int64, until Wait or ToHost;
//   - freed memory becomes NaN, or the least int32, on the host's side;
//   - a command panics if it gets memory of the host, or after Close.
package apart

import (
	"cmp"
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
	made     []allocation // sorted by address of the host's side
	bytes    int64        // total size
	capacity int64
	results  []func() // functions that set host results
	failed   error
	closed   bool
}

var _ xpu.Device = (*Device)(nil)

// An allocation is a piece of memory with its two sides.
type allocation struct {
	begin, end uintptr // addresses of the host's side
	floats     sides[float32]
	ints       sides[int32]
}

type sides[E float32 | int32] struct{ host, device []E }

// New returns a device whose commands are executed by inner, which must share memory with the host.
// Close closes inner too.
func New(inner xpu.Device) *Device { return &Device{inner: inner, capacity: 1 << 40} }

// SetCapacity limits the total number of bytes of Floats and Ints. The default is 1 TiB.
func (d *Device) SetCapacity(bytes int64) { d.capacity = bytes }

// Fail makes all later commands of the device fail with an error, as if its driver had lost it.
func (d *Device) Fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed == nil {
		d.failed = err
	}
}

// InUse returns the number of bytes that have not been freed.
func (d *Device) InUse() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.bytes
}

// Name returns "apart" and the name of the inner device.
func (d *Device) Name() string { return "apart " + d.inner.Name() }

// Precision returns the inner device's precision.
func (d *Device) Precision() xpu.Precision { return d.inner.Precision() }

// Arithmetic returns the inner device's arithmetic, because the bits are the same.
func (d *Device) Arithmetic() string { return d.inner.Arithmetic() }

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
		panic("apart: the device was used after Close")
	}
}

// Floats allocates memory for n numbers; see [xpu.Memory].
func (d *Device) Floats(n int) ([]float32, error) { return allocate(d, n, d.inner.Floats) }

// Ints allocates memory for n whole numbers; see [xpu.Memory].
func (d *Device) Ints(n int) ([]int32, error) { return allocate(d, n, d.inner.Ints) }

func allocate[E float32 | int32](d *Device, n int, inner func(int) ([]E, error)) ([]E, error) {
	if n < 0 {
		panic(fmt.Sprintf("apart: cannot allocate %d elements", n))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	if d.failed != nil {
		return nil, d.failed
	}
	if int64(n) > (d.capacity-d.bytes)/4 {
		return nil, fmt.Errorf("apart: out of memory for %d numbers: %d of %d bytes are in use", n, d.bytes, d.capacity)
	}
	twin, err := inner(n)
	if err != nil || n == 0 {
		return twin, err
	}
	s := sides[E]{make([]E, n), twin}
	a := allocation{begin: address(s.host)}
	a.end = a.begin + uintptr(4*n)
	switch s := any(s).(type) {
	case sides[float32]:
		a.floats = s
	case sides[int32]:
		a.ints = s
	}
	i, _ := slices.BinarySearchFunc(d.made, a.begin, byAddress)
	d.made = slices.Insert(d.made, i, a)
	d.bytes += int64(4 * n)
	return s.host, nil
}

func byAddress(a allocation, begin uintptr) int { return cmp.Compare(a.begin, begin) }

func address[E float32 | int32](x []E) uintptr { return uintptr(unsafe.Pointer(&x[0])) }

// Free releases memory; see [xpu.Memory].
func (d *Device) Free(floats []float32) {
	if len(floats) > 0 {
		d.inner.Free(d.remove(address(floats), len(floats)).floats.device)
		poisonFloats(floats)
	}
}

// FreeInts releases memory; see [xpu.Memory].
func (d *Device) FreeInts(ints []int32) {
	if len(ints) > 0 {
		d.inner.FreeInts(d.remove(address(ints), len(ints)).ints.device)
		poisonInts(ints)
	}
}

// remove removes an allocation of n elements from the list.
func (d *Device) remove(begin uintptr, n int) allocation {
	d.mu.Lock()
	defer d.mu.Unlock()
	i, found := slices.BinarySearchFunc(d.made, begin, byAddress)
	if !found || d.made[i].end != begin+uintptr(4*n) {
		panic(fmt.Sprintf("apart: freeing %d elements that are not a complete, allocated slice of this device", n))
	}
	a := d.made[i]
	d.made = slices.Delete(d.made, i, i+1)
	d.bytes -= int64(4 * n)
	return a
}

// find returns the allocation that contains x, and the index of x's first element in it.
func (d *Device) find(begin uintptr, n int) (allocation, int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i, found := slices.BinarySearchFunc(d.made, begin, byAddress)
	if !found {
		i--
	}
	if i < 0 || begin+uintptr(4*n) > d.made[i].end {
		panic(fmt.Sprintf("apart: a command got %d elements that are not memory of this device", n))
	}
	return d.made[i], int(begin-d.made[i].begin) / 4
}

// floats returns the device's side of x.
func (d *Device) floats(x []float32) []float32 {
	if len(x) == 0 {
		return nil
	}
	a, at := d.find(address(x), len(x))
	return a.floats.device[at:][:len(x):len(x)]
}

// ints returns the device's side of x.
func (d *Device) ints(x []int32) []int32 {
	if len(x) == 0 {
		return nil
	}
	a, at := d.find(address(x), len(x))
	return a.ints.device[at:][:len(x):len(x)]
}

// poison overwrites the host's side of tensors without gaps.
func poison(tensors ...xpu.Tensor) {
	for _, t := range tensors {
		if t.IsDiscrete() {
			continue
		}
		if t.Present() && t.DType() == xpu.Int32 {
			poisonInts(t.Ints())
		} else {
			poisonFloats(t.Floats())
		}
	}
}

func poisonFloats(x []float32) {
	for i := range x {
		x[i] = float32(math.NaN())
	}
}

func poisonInts(host ...[]int32) {
	for _, x := range host {
		for i := range x {
			x[i] = math.MinInt32
		}
	}
}

// New allocates a tensor that the host cannot see; see [xpu.Memory].
func (d *Device) New(dtype xpu.DType, shape ...int) (xpu.Tensor, error) {
	n, err := xpu.Elements(shape)
	if err != nil {
		return xpu.Tensor{}, fmt.Errorf("apart: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	if d.failed != nil {
		return xpu.Tensor{}, d.failed
	}
	if int64(n) > (d.capacity-d.bytes)/4 {
		return xpu.Tensor{}, fmt.Errorf("apart: out of memory for %d numbers: %d of %d bytes are in use", n, d.bytes,
			d.capacity)
	}
	t, err := d.inner.New(dtype, shape...)
	if err != nil {
		return xpu.Tensor{}, err
	}
	d.bytes += int64(4 * n)
	return t.Discrete(), nil
}

// Release releases a tensor; see [xpu.Memory].
func (d *Device) Release(t xpu.Tensor) {
	d.inner.Release(t)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bytes -= int64(4 * t.Elements())
}

// Write copies src to a tensor.
func (d *Device) Write(t xpu.Tensor, src []float32) {
	if d.works() {
		d.inner.Write(t, src)
	}
}

// WriteInts copies src to a tensor.
func (d *Device) WriteInts(t xpu.Tensor, src []int32) {
	if d.works() {
		d.inner.WriteInts(t, src)
	}
}

// Read waits and copies a tensor to the host.
func (d *Device) Read(ctx context.Context, dst []float32, t xpu.Tensor) error {
	if err := d.Wait(ctx); err != nil {
		return err
	}
	return d.inner.Read(ctx, dst, t)
}

// ReadInts waits and copies a tensor to the host.
func (d *Device) ReadInts(ctx context.Context, dst []int32, t xpu.Tensor) error {
	if err := d.Wait(ctx); err != nil {
		return err
	}
	return d.inner.ReadInts(ctx, dst, t)
}

// ToDevice copies x to the device's side.
func (d *Device) ToDevice(x []float32) {
	if twin := d.floats(x); d.works() {
		copy(twin, x)
	}
}

// IntsToDevice copies x to the device's side.
func (d *Device) IntsToDevice(x []int32) {
	if twin := d.ints(x); d.works() {
		copy(twin, x)
	}
}

// ToHost copies slices to the host's side, and sets host results.
func (d *Device) ToHost(ctx context.Context, x ...[]float32) error {
	if err := d.Wait(ctx); err != nil {
		return err
	}
	for _, x := range x {
		copy(x, d.floats(x))
	}
	return nil
}

// IntsToHost copies slices to the host's side, and sets host results.
func (d *Device) IntsToHost(ctx context.Context, x ...[]int32) error {
	if err := d.Wait(ctx); err != nil {
		return err
	}
	for _, x := range x {
		copy(x, d.ints(x))
	}
	return nil
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

// works reports whether commands are executed.
func (d *Device) works() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	return d.failed == nil
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
