package gpu

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/opencl"
)

// memory lists the device's allocations.
type memory struct {
	mu    sync.Mutex // held while allocating and freeing
	bytes int64      // size of all buffers, including scratch memory
	live  map[*allocation]bool

	versions uint64 // assigned so far; guarded by Device.mu
}

// An allocation is the memory of a tensor that New returned.
type allocation struct {
	n       int // elements
	buffer  *opencl.Buffer
	version uint64 // unique version of the contents; guarded by Device.mu

	operands []operandRange // that commands wrote and no later command overwrote; guarded by Device.mu
}

// wrote assigns an allocation a new version, because a command writes to it.
func (d *Device) wrote(a *allocation) {
	d.memory.versions++
	a.version = d.memory.versions
}

// reserve allocates a buffer, if the device has enough memory or packed weights can be dropped.
// Some drivers promise more memory than there is and fail in the middle of a step. The caller has
// started a command.
func (d *Device) reserve(bytes int64) (*opencl.Buffer, error) {
	b, err := d.tryReserve(bytes)
	if err != nil && d.packed.drop(d) {
		return d.tryReserve(bytes)
	}
	return b, err
}

func (d *Device) tryReserve(bytes int64) (*opencl.Buffer, error) {
	m := &d.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	if room := d.Capacity() - m.bytes; bytes > room {
		return nil, fmt.Errorf("%s: out of memory: %d bytes requested, of %d bytes %d are available", d.device.Name,
			bytes,
			d.Capacity(), room)
	}
	b, err := d.context.NewBuffer(bytes)
	if err == nil {
		m.bytes += bytes
	}
	return b, err
}

// unreserve releases a buffer. The driver frees it when the preceding commands have ended.
func (d *Device) unreserve(b *opencl.Buffer) {
	d.memory.mu.Lock()
	d.memory.bytes -= b.Bytes()
	d.memory.mu.Unlock()
	b.Release()
}

// release releases all memory.
func (m *memory) release() {
	for a := range m.live {
		a.buffer.Release()
	}
}

// New allocates a tensor; see [mula/xpu.Memory].
func (d *Device) New(dtype xpu.DType, shape ...int) (xpu.Tensor, error) {
	n, err := xpu.Elements(shape)
	if err != nil {
		return xpu.Tensor{}, fmt.Errorf("gpu: %w", err)
	}
	c := d.begin()
	defer c.end()
	a := &allocation{n: n}
	if n > 0 {
		const word = 4 // sizes of buffers are multiples
		if a.buffer, err = d.reserve((int64(n)*int64(dtype.Bytes()) + word - 1) / word * word); err != nil {
			return xpu.Tensor{}, fmt.Errorf("gpu: %w", err)
		}
		if err := d.queue.Zero(a.buffer, 0, a.buffer.Bytes()); err != nil {
			d.unreserve(a.buffer)
			return xpu.Tensor{}, fmt.Errorf("gpu: %w", err)
		}
		d.wrote(a)
		d.memory.add(a)
	}
	return xpu.InBuffer(a, dtype, shape...), nil
}

// Release releases a tensor.
func (d *Device) Release(t xpu.Tensor) {
	c := d.begin()
	defer c.end()
	if t.Elements() == 0 {
		return
	}
	a, at := d.memory.of(t)
	if at != 0 || t.Elements() != a.n {
		panic(fmt.Sprintf("gpu: Release of %d elements from element %d on; the tensor of New has %d elements",
			t.Elements(), at, a.n))
	}
	d.memory.remove(a)
	d.packed.forget(d, a)
	d.unreserve(a.buffer)
}

// hostCopies copies numbers between tensors and the host in one of the device's queues.
type hostCopies struct {
	d       *Device
	stage   *stage
	command func() *command             // begins a command of the queue
	ready   func(context.Context) error // makes the queue wait for preceding commands, or waits for them
}

// Write copies src to a tensor; see [mula/xpu.Memory].
func (h hostCopies) Write(t xpu.Tensor, src []float32) {
	if t.DType() == xpu.BFloat16 {
		xpu.CheckCopy("Write", t, xpu.BFloat16, len(src))
		halves := make([]uint16, len(src))
		cpu.BF16(halves, src)
		write(h, t, halves)
		return
	}
	xpu.CheckCopy("Write", t, xpu.Float32, len(src))
	write(h, t, src)
}

// WriteInts does the same.
func (h hostCopies) WriteInts(t xpu.Tensor, src []int32) {
	xpu.CheckCopy("WriteInts", t, xpu.Int32, len(src))
	write(h, t, src)
}

// WriteHalves does the same.
func (h hostCopies) WriteHalves(t xpu.Tensor, src []uint16) {
	xpu.CheckCopy("WriteHalves", t, xpu.BFloat16, len(src))
	write(h, t, src)
}

// Read waits for all preceding commands, and copies a tensor to the host.
func (h hostCopies) Read(ctx context.Context, dst []float32, t xpu.Tensor) error {
	if t.DType() == xpu.BFloat16 {
		xpu.CheckCopy("Read", t, xpu.BFloat16, len(dst))
		halves := make([]uint16, len(dst))
		if err := readAfter(ctx, h, halves, t); err != nil {
			return err
		}
		cpu.Widen(dst, halves)
		return nil
	}
	xpu.CheckCopy("Read", t, xpu.Float32, len(dst))
	return readAfter(ctx, h, dst, t)
}

// ReadInts does the same.
func (h hostCopies) ReadInts(ctx context.Context, dst []int32, t xpu.Tensor) error {
	xpu.CheckCopy("ReadInts", t, xpu.Int32, len(dst))
	return readAfter(ctx, h, dst, t)
}

// ReadHalves does the same.
func (h hostCopies) ReadHalves(ctx context.Context, dst []uint16, t xpu.Tensor) error {
	xpu.CheckCopy("ReadHalves", t, xpu.BFloat16, len(dst))
	return readAfter(ctx, h, dst, t)
}

// readAfter copies a tensor to dst, after a wait for preceding commands.
func readAfter[E float32 | uint16 | int32](ctx context.Context, h hostCopies, dst []E, t xpu.Tensor) error {
	var a *allocation
	var at int64
	if len(dst) > 0 { // memory of another device panics before anything is written
		a, at = h.d.readable(t)
	}
	if err := h.ready(ctx); err != nil || len(dst) == 0 {
		return err
	}
	if err := read(ctx, h.stage, dst, a, at); err != nil {
		return h.d.broken(ctx, err)
	}
	return nil
}

// readable is memory.of for a tensor that the host reads.
func (d *Device) readable(t xpu.Tensor) (*allocation, int64) {
	c := d.begin()
	defer c.end() // it may panic
	a, at := d.memory.of(t)
	a.checkRead(at, t)
	return a, at
}

// of returns the allocation of a tensor, and the index of its first element.
func (m *memory) of(t xpu.Tensor) (*allocation, int64) {
	buffer, at := t.Buffer()
	a, _ := buffer.(*allocation) // nil for memory of another device
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.live[a] {
		panic(fmt.Sprintf("gpu: a tensor of shape %v is not memory of this device, or was released", t.Shape()))
	}
	return a, int64(at)
}

func (m *memory) add(a *allocation) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live[a] = true
}

func (m *memory) remove(a *allocation) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.live, a)
}

// Capacity returns the memory size that the driver reports.
func (d *Device) Capacity() int64 { return d.device.Memory }

// broken records an error of the device, and returns an error of ctx unchanged.
func (d *Device) broken(ctx context.Context, err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return fmt.Errorf("gpu: %w", err)
	}
	d.command.fail(err)
	return d.err
}

// Zero sets x to zero.
func (d *Device) Zero(x xpu.Tensor) {
	xpu.CheckZeroed(x)
	c := d.begin()
	defer c.end()
	each, parts := c.stretch(x.Elements())
	c.launch("zero", c.rows(parts), typed(c.writes(x)), long(x.Elements()), integer(each))
}

// stretch divides n elements into parts for the groups of a kernel that does little work per
// element.
func (c *command) stretch(n int) (each, parts int) {
	each = 8 * c.d.shape.group
	if c.d.shape.processor {
		each = 1 << 14
	}
	return each, over(n, each)
}

// Copy sets dst to x.
func (d *Device) Copy(dst, x xpu.Tensor) {
	xpu.CheckCopied(dst, x)
	c := d.begin()
	defer c.end()
	c.copy(dst, x)
}

func (c *command) copy(dst, x xpu.Tensor) {
	d := c.d
	if x.Elements() == 0 {
		return
	}
	to, toAt := d.memory.of(dst)
	from, fromAt := d.memory.of(x)
	from.checkRead(fromAt, x)
	if dst.DType() == xpu.BFloat16 || x.DType() == xpu.BFloat16 {
		if dst.DType() != x.DType() || to != from || toAt != fromAt {
			c.copyNumbers(c.writes(dst), c.reads(x), x.Elements())
		}
		return
	}
	c.wrote(to, toAt, dst)
	if d.err != nil || to == from && toAt == fromAt {
		return
	}
	if err := c.queue.Copy(to.buffer, 4*toAt, from.buffer, 4*fromAt, 4*int64(x.Elements())); err != nil {
		c.fail(err)
	}
}

// Add sets dst to x + y.
func (d *Device) Add(dst, x, y xpu.Tensor) {
	xpu.CheckAdded(dst, x, y)
	c := d.begin()
	defer c.end()
	each, parts := c.stretch(dst.Elements())
	c.launch("add", c.rows(parts), c.writes(dst), c.reads(x), c.reads(y), long(dst.Elements()), integer(each))
}

// Combine combines matrices; see [xpu.Layers].
func (d *Device) Combine(dst, x, y xpu.Tensor, a, b, diagonal float32) {
	xpu.CheckCombined(dst, x, y, diagonal)
	c := d.begin()
	defer c.end()
	each, parts := c.stretch(dst.Elements())
	c.launch("combine", c.rows(parts), c.writes(dst), c.reads(x), c.reads(y), long(dst.Elements()), integer(each),
		integer(dst.Dim(1)), number(float64(a)), number(float64(b)), number(float64(diagonal)))
}
