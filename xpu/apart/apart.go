// Package apart is an [xpu.Device] for tests: its memory has two sides that are truly two, as those
// of a GPU are, and another device, one with the host, computes on the device's side. What is
// computed on it has the bits of that device exactly if every reading of the host has a ToHost
// before it and every writing a ToDevice behind it, and host results are read after Wait. Where one
// is missing, numbers turn to NaN or far below zero:
//
//   - whatever a command writes on the device's side becomes NaN, or the least int32, on the host's side, until ToHost;
//   - host results are NaN, or the least int64, until Wait or ToHost;
//   - memory that is given back becomes the same, on the host's side;
//   - a command that is given memory of the host panics, and so does any after Close.
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

// Device is a device whose memory is apart from the host's. It is safe for use by several
// goroutines at once.
type Device struct {
	inner xpu.Device

	mu       sync.Mutex
	made     []allocation // by address of the host's side
	bytes    int64        // of all
	capacity int64
	results  []func() // that bring host results
	failed   error
	closed   bool
}

var _ xpu.Device = (*Device)(nil)

// An allocation is memory with its two sides.
type allocation struct {
	begin, end uintptr // of the host's side
	floats     sides[float32]
	ints       sides[int32]
}

type sides[E float32 | int32] struct{ host, device []E }

// New returns a device whose commands are carried out by inner, which must be one with the host and
// goes with it: Close closes it, too.
func New(inner xpu.Device) *Device { return &Device{inner: inner, capacity: 1 << 40} }

// SetCapacity bounds the number of bytes that Floats and Ints give, all together. Without it, that
// is a tebibyte.
func (d *Device) SetCapacity(bytes int64) { d.capacity = bytes }

// Fail makes the device fail from now on with an error, as one whose driver has lost it.
func (d *Device) Fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed == nil {
		d.failed = err
	}
}

// InUse is the number of bytes of memory that has not been given back.
func (d *Device) InUse() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.bytes
}

// Name is that of the device inside, behind "apart".
func (d *Device) Name() string { return "apart " + d.inner.Name() }

// Precision is that of the device inside.
func (d *Device) Precision() xpu.Precision { return d.inner.Precision() }

// Arithmetic is that of the device inside: the bits are the same.
func (d *Device) Arithmetic() string { return d.inner.Arithmetic() }

// Threads is that of the device inside.
func (d *Device) Threads() int { return d.inner.Threads() }

// Parallel is that of the device inside.
func (d *Device) Parallel(n int, f func(i int)) { d.inner.Parallel(n, f) }

// Close closes the device inside.
func (d *Device) Close() {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.inner.Close()
}

// open panics after Close. The caller has locked.
func (d *Device) open() {
	if d.closed {
		panic("apart: the device was used after Close")
	}
}

// Floats makes memory for n numbers; see [xpu.Memory].
func (d *Device) Floats(n int) ([]float32, error) { return allocate(d, n, d.inner.Floats) }

// Ints makes memory for n whole numbers; see [xpu.Memory].
func (d *Device) Ints(n int) ([]int32, error) { return allocate(d, n, d.inner.Ints) }

func allocate[E float32 | int32](d *Device, n int, inner func(int) ([]E, error)) ([]E, error) {
	if n < 0 {
		panic(fmt.Sprintf("apart: memory of %d elements", n))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	if d.failed != nil {
		return nil, d.failed
	}
	if int64(n) > (d.capacity-d.bytes)/4 {
		return nil, fmt.Errorf("apart: no room for %d numbers: %d of %d bytes are taken", n, d.bytes, d.capacity)
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

// Free gives memory back; see [xpu.Memory].
func (d *Device) Free(floats []float32) {
	if len(floats) > 0 {
		d.inner.Free(d.remove(address(floats), len(floats)).floats.device)
		poison(floats)
	}
}

// FreeInts gives memory back; see [xpu.Memory].
func (d *Device) FreeInts(ints []int32) {
	if len(ints) > 0 {
		d.inner.FreeInts(d.remove(address(ints), len(ints)).ints.device)
		poisonInts(ints)
	}
}

// remove takes an allocation of n elements off the list.
func (d *Device) remove(begin uintptr, n int) allocation {
	d.mu.Lock()
	defer d.mu.Unlock()
	i, found := slices.BinarySearchFunc(d.made, begin, byAddress)
	if !found || d.made[i].end != begin+uintptr(4*n) {
		panic(fmt.Sprintf("apart: %d elements are given back that are not memory of this device, whole and not yet "+
			"given back", n))
	}
	a := d.made[i]
	d.made = slices.Delete(d.made, i, i+1)
	d.bytes -= int64(4 * n)
	return a
}

// find returns the allocation that x is a part of, and the number of its first element there.
func (d *Device) find(begin uintptr, n int) (allocation, int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i, found := slices.BinarySearchFunc(d.made, begin, byAddress)
	if !found {
		i--
	}
	if i < 0 || begin+uintptr(4*n) > d.made[i].end {
		panic(fmt.Sprintf("apart: a command was given %d elements that are not memory of this device", n))
	}
	return d.made[i], int(begin-d.made[i].begin) / 4
}

// floats is the device's side of x.
func (d *Device) floats(x []float32) []float32 {
	if len(x) == 0 {
		return nil
	}
	a, at := d.find(address(x), len(x))
	return a.floats.device[at:][:len(x):len(x)]
}

// ints is the device's side of x.
func (d *Device) ints(x []int32) []int32 {
	if len(x) == 0 {
		return nil
	}
	a, at := d.find(address(x), len(x))
	return a.ints.device[at:][:len(x):len(x)]
}

func poison(host ...[]float32) {
	for _, x := range host {
		for i := range x {
			x[i] = float32(math.NaN())
		}
	}
}

func poisonInts(host ...[]int32) {
	for _, x := range host {
		for i := range x {
			x[i] = math.MinInt32
		}
	}
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

// ToHost copies slices to the host's side, and brings host results.
func (d *Device) ToHost(ctx context.Context, x ...[]float32) error {
	if err := d.Wait(ctx); err != nil {
		return err
	}
	for _, x := range x {
		copy(x, d.floats(x))
	}
	return nil
}

// IntsToHost copies slices to the host's side, and brings host results.
func (d *Device) IntsToHost(ctx context.Context, x ...[]int32) error {
	if err := d.Wait(ctx); err != nil {
		return err
	}
	for _, x := range x {
		copy(x, d.ints(x))
	}
	return nil
}

// Wait brings host results, or says why the device failed. With a context that is done it brings
// nothing, as if it had to wait longer than that.
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

// Capacity is what SetCapacity was given.
func (d *Device) Capacity() int64 { return d.capacity }

// works says whether commands are carried out.
func (d *Device) works() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open()
	return d.failed == nil
}

// later has host results brought by the next Wait.
func (d *Device) later(bring func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.results = append(d.results, bring)
}

// result is memory for host results in place of x. With computed, which is called when they are
// there, x is poisoned until the next Wait. Another goroutine may wait while the command is at it,
// and is to bring nothing.
func (d *Device) result(x []float64) (y []float64, computed func()) {
	y = make([]float64, len(x))
	return y, func() {
		for i := range x {
			x[i] = math.NaN()
		}
		d.later(func() { copy(x, y) })
	}
}
