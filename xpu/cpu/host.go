package cpu

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"unsafe"

	"mula/internal/freelist"
	"mula/xpu"
)

// Host is the common part of devices that compute on the processor: everything but products. It has
// the workers, which run until [Host.Close], memory shared with the host, and the layers. The loops
// of the layers are divided among the workers in chunks that do not depend on the number of
// workers.
//
// It keeps its scratch memory: for each concurrent command with partial sums over tokens, 256 bytes
// for each column; for an attention, per worker, the scores of 64 queries of one head, 256 bytes
// for each key (512 for its gradient); for the norm and the update of gradients of BFloat16, per
// worker, a block in float32; for activations of BFloat16, a row in float32.
type Host struct {
	multiplier xpu.Products
	pool       *pool
	tasks      freelist.List[task]
	buffers    freelist.List[[]float32] // of a block or of a row at most

	mu sync.Mutex
	// number of elements of each tensor of New, by address, which keeps nothing from the garbage
	// collector
	made map[uintptr]int
}

// NewHost returns a host with the given number of workers, including the caller's thread; 0 means
// runtime.GOMAXPROCS(0). Attention uses the products of device, the device that contains the host.
func NewHost(threads int, device xpu.Products) *Host {
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	return &Host{multiplier: device, pool: newPool(threads - 1), made: map[uintptr]int{}}
}

// Close stops the workers after their current work. A method called after Close panics.
func (h *Host) Close() { h.pool.close() }

// ProductRows returns 256: the workers divide the columns of a product, too.
func (h *Host) ProductRows() int { return 256 }

// Threads returns the number of workers, including the caller of a method.
func (h *Host) Threads() int { return h.pool.size + 1 }

// Parallel calls f(0), …, f(n-1) on the workers and the calling goroutine; see [xpu.Device]. If a
// call on the calling goroutine panics, no further calls start, and the panic continues after the
// running calls have returned. A panic on a worker ends the program.
func (h *Host) Parallel(n int, f func(i int)) { h.pool.run(n, f) }

func allocate[E float32 | uint16 | int32](h *Host, n int) ([]E, error) {
	if n > math.MaxInt/64 || uint64(n) > 1<<45 {
		return nil, fmt.Errorf("cpu: memory for %d numbers exceeds the limit of a process", n)
	}
	x := make([]E, n)
	if n > 0 {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.made[uintptr(unsafe.Pointer(&x[0]))] = n
	}
	return x, nil
}

func free[E float32 | uint16 | int32](h *Host, x []E) {
	if len(x) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	at := uintptr(unsafe.Pointer(&x[0]))
	if n, ok := h.made[at]; !ok || n != len(x) {
		panic(fmt.Sprintf("cpu: Release of %d elements that are not a complete tensor of this device's New", len(x)))
	}
	delete(h.made, at)
}

// New allocates a tensor; see [xpu.Memory].
func (h *Host) New(dtype xpu.DType, shape ...int) (xpu.Tensor, error) {
	n, err := xpu.Elements(shape)
	if err != nil {
		return xpu.Tensor{}, fmt.Errorf("cpu: %w", err)
	}
	switch dtype {
	case xpu.Float32:
		x, err := allocate[float32](h, n)
		if err != nil {
			return xpu.Tensor{}, err
		}
		return xpu.Of(x, shape...), nil
	case xpu.Int32:
		x, err := allocate[int32](h, n)
		if err != nil {
			return xpu.Tensor{}, err
		}
		return xpu.OfInts(x, shape...), nil
	case xpu.BFloat16:
		x, err := allocate[uint16](h, n)
		if err != nil {
			return xpu.Tensor{}, err
		}
		return xpu.OfHalves(x, shape...), nil
	}
	return xpu.Tensor{}, fmt.Errorf("cpu: unknown type %s", dtype)
}

// Release releases memory; see [xpu.Memory].
func (h *Host) Release(t xpu.Tensor) {
	switch {
	case t.Elements() == 0:
	case t.DType() == xpu.Int32:
		free(h, t.Ints())
	case t.DType() == xpu.BFloat16:
		free(h, t.Halves())
	default:
		free(h, t.Floats())
	}
}

// Write copies src to t; see [xpu.Memory].
func (h *Host) Write(t xpu.Tensor, src []float32) {
	if t.DType() == xpu.BFloat16 {
		xpu.CheckCopy("Write", t, xpu.BFloat16, len(src))
		BF16(t.Halves(), src)
		return
	}
	xpu.CheckCopy("Write", t, xpu.Float32, len(src))
	move(t.Floats(), src)
}

// WriteHalves copies src to t.
func (h *Host) WriteHalves(t xpu.Tensor, src []uint16) {
	xpu.CheckCopy("WriteHalves", t, xpu.BFloat16, len(src))
	move(t.Halves(), src)
}

// WriteInts copies src to t.
func (h *Host) WriteInts(t xpu.Tensor, src []int32) {
	xpu.CheckCopy("WriteInts", t, xpu.Int32, len(src))
	move(t.Ints(), src)
}

// Read copies t to dst.
func (h *Host) Read(_ context.Context, dst []float32, t xpu.Tensor) error {
	if t.DType() == xpu.BFloat16 {
		xpu.CheckCopy("Read", t, xpu.BFloat16, len(dst))
		Widen(dst, t.Halves())
		return nil
	}
	xpu.CheckCopy("Read", t, xpu.Float32, len(dst))
	move(dst, t.Floats())
	return nil
}

// ReadHalves copies t to dst.
func (h *Host) ReadHalves(_ context.Context, dst []uint16, t xpu.Tensor) error {
	xpu.CheckCopy("ReadHalves", t, xpu.BFloat16, len(dst))
	move(dst, t.Halves())
	return nil
}

// ReadInts copies t to dst.
func (h *Host) ReadInts(_ context.Context, dst []int32, t xpu.Tensor) error {
	xpu.CheckCopy("ReadInts", t, xpu.Int32, len(dst))
	move(dst, t.Ints())
	return nil
}

// move copies src to dst, if they are not the same memory.
func move[E float32 | uint16 | int32](dst, src []E) {
	if unsafe.SliceData(dst) != unsafe.SliceData(src) {
		copy(dst, src)
	}
}

// Wait does nothing.
func (h *Host) Wait(context.Context) error { return nil }

// Transfers returns copies that have ended when their methods return, like all commands.
func (h *Host) Transfers() xpu.Transfers { return transfers{h} }

type transfers struct{ *Host }

func (transfers) Join() {}

// Capacity returns 0: the only limit is the host's memory.
func (h *Host) Capacity() int64 { return 0 }
