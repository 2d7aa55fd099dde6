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

// Host is what devices that compute on the processor have in common: all but products. It has the
// workers, which live until [Host.Close], memory that is the host's, and the layers, whose loops
// are spread over the workers in pieces that do not depend on their number.
//
// It keeps its scratch memory: for each command under way at the same time that has partial sums
// over tokens 256 bytes for each column, and for an attention, for each worker, the scores of 64
// queries of one head, 256 bytes for each key (twice that for its gradient).
type Host struct {
	multiplier xpu.Products
	pool       *pool
	tasks      freelist.List[task]

	mu sync.Mutex
	// number of elements of what Floats and Ints have made, by address, which keeps nothing from
	// the collector
	made map[uintptr]int
}

// NewHost returns a host with that many workers, the caller's own thread included; 0 stands for
// runtime.GOMAXPROCS(0). Attention multiplies by the products of the device that the host is a part
// of.
func NewHost(threads int, device xpu.Products) *Host {
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	return &Host{multiplier: device, pool: newPool(threads - 1), made: map[uintptr]int{}}
}

// Close stops the workers after what they are at. A method called after Close panics.
func (h *Host) Close() { h.pool.close() }

// Threads is the number of workers, the caller of a method included.
func (h *Host) Threads() int { return h.pool.size + 1 }

// Parallel calls f(0), …, f(n-1) on the workers and the calling goroutine; see [xpu.Device]. If a
// call on the calling goroutine panics, the panic goes on after the other calls under way have
// returned, and no further calls are made; on a worker it ends the program.
func (h *Host) Parallel(n int, f func(i int)) { h.pool.run(n, f) }

// Floats makes memory for n numbers; see [xpu.Memory].
func (h *Host) Floats(n int) ([]float32, error) { return allocate[float32](h, n) }

// Ints makes memory for n whole numbers; see [xpu.Memory].
func (h *Host) Ints(n int) ([]int32, error) { return allocate[int32](h, n) }

// Free gives memory back; see [xpu.Memory].
func (h *Host) Free(floats []float32) { free(h, floats) }

// FreeInts gives memory back; see [xpu.Memory].
func (h *Host) FreeInts(ints []int32) { free(h, ints) }

func allocate[E float32 | int32](h *Host, n int) ([]E, error) {
	if n < 0 {
		panic(fmt.Sprintf("cpu: memory of %d elements", n))
	}
	if n > math.MaxInt/64 || uint64(n) > 1<<45 {
		return nil, fmt.Errorf("cpu: memory for %d numbers is more than a process can have", n)
	}
	x := make([]E, n)
	if n > 0 {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.made[uintptr(unsafe.Pointer(&x[0]))] = n
	}
	return x, nil
}

func free[E float32 | int32](h *Host, x []E) {
	if len(x) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	at := uintptr(unsafe.Pointer(&x[0]))
	if n, ok := h.made[at]; !ok || n != len(x) {
		panic(fmt.Sprintf("cpu: %d elements are given back that are not memory of this device, whole and not yet "+
			"given back", len(x)))
	}
	delete(h.made, at)
}

// ToDevice does nothing: host and device are one.
func (h *Host) ToDevice([]float32) {}

// IntsToDevice does nothing.
func (h *Host) IntsToDevice([]int32) {}

// ToHost does nothing: every command is done when it returns.
func (h *Host) ToHost(context.Context, ...[]float32) error { return nil }

// IntsToHost does nothing.
func (h *Host) IntsToHost(context.Context, ...[]int32) error { return nil }

// Wait does nothing.
func (h *Host) Wait(context.Context) error { return nil }

// Capacity is 0: the host's memory is the limit.
func (h *Host) Capacity() int64 { return 0 }
