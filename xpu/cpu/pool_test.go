package cpu

import (
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"mula/xpu"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParallel(t *testing.T) {
	for threads := 1; threads <= 4; threads++ {
		d := New(threads, xpu.FP32)
		for _, n := range []int{-1, 0, 1, 2, 3, 100, 10000} {
			calls := make([]atomic.Int32, max(n, 0))
			d.Parallel(n, func(i int) { calls[i].Add(1) })
			for i := range calls {
				if c := calls[i].Load(); c != 1 {
					t.Errorf("%d threads, n %d: f(%d) was called %d times", threads, n, i, c)
				}
			}
		}
		d.Close()
		d.Close() // a second time does nothing
	}
}

// TestHelp: while the caller is in one call of f, the others are made by workers. Each call waits
// for all, which only as many threads as calls can bring about.
func TestHelp(t *testing.T) {
	const threads = 4
	d := New(threads, xpu.FP32)
	defer d.Close()
	for range 100 {
		var all sync.WaitGroup
		all.Add(threads)
		d.Parallel(threads, func(int) {
			all.Done()
			all.Wait()
		})
	}
}

// TestNested has loops in loops, from several goroutines at once, with products inside.
func TestNested(t *testing.T) {
	for threads := 1; threads <= 3; threads++ {
		d := New(threads, xpu.FP32)
		const n, k = 16, 40
		a, b := uniform(1, n*k), uniform(2, n*k)
		want := make([]float32, n*n)
		d.MatMul(xpu.Of(want, n, n), xpu.Of(a, n, k), xpu.Of(b, n, k).T(), xpu.MatMulOptions{})
		var callers sync.WaitGroup
		var count atomic.Int64
		for range 4 {
			callers.Go(func() {
				d.Parallel(5, func(int) {
					d.Parallel(7, func(int) {
						c := make([]float32, n*n)
						d.MatMul(xpu.Of(c, n, n), xpu.Of(a, n, k), xpu.Of(b, n, k).T(),
							xpu.MatMulOptions{})
						for i := range c {
							if c[i] != want[i] {
								t.Errorf("element %d is %v, want %v", i, c[i], want[i])
							}
						}
						d.Parallel(3, func(int) { count.Add(1) })
					})
				})
			})
		}
		callers.Wait()
		if count.Load() != 4*5*7*3 {
			t.Errorf("%d threads: %d calls, want %d", threads, count.Load(), 4*5*7*3)
		}
		d.Close()
	}
}

// TestConcurrentProducts has products large enough to be cut into pieces, from several goroutines
// on one device.
func TestConcurrentProducts(t *testing.T) {
	d := New(3, xpu.FP32)
	defer d.Close()
	const m, n, k = 200, 96, 300
	a, b := uniform(1, m*k), uniform(2, n*k)
	want := make([]float32, m*n)
	d.MatMul(xpu.Of(want, m, n), xpu.Of(a, m, k), xpu.Of(b, n, k).T(), xpu.MatMulOptions{})
	twice := append(append([]float32(nil), b...), b...)
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			c := make([]float32, m*n)
			for range 10 {
				d.GroupedMatMul(xpu.Of(c, m, n), xpu.Of(a, m, k),
					xpu.Of(twice, 2, n, k).T(),
					xpu.OfInts([]int32{m - 150, 150}, 2), xpu.MatMulOptions{})
				for i := range c {
					if c[i] != want[i] {
						t.Errorf("element %d is %v, want %v", i, c[i], want[i])
						return
					}
				}
			}
		})
	}
	callers.Wait()
}

// TestPanic: a panic of the caller's own call comes out of Parallel only after the others have
// returned, and the device works on.
func TestPanic(t *testing.T) {
	d := New(2, xpu.FP32)
	defer d.Close()
	caller := goroutine()
	for range 20 {
		var working atomic.Bool
		entered := make(chan bool)
		func() {
			defer func() {
				if r := recover(); r != "stop" {
					t.Errorf("recovered %v", r)
				}
				if working.Load() {
					t.Error("the worker is still in its call")
				}
			}()
			d.Parallel(2, func(int) {
				if goroutine() == caller {
					<-entered
					panic("stop")
				}
				working.Store(true)
				entered <- true
				time.Sleep(time.Millisecond)
				working.Store(false)
			})
		}()
	}
	d.Parallel(2, func(int) {})
}

// goroutine is the number of the goroutine, as its stack trace begins: "goroutine 18 [running]:".
func goroutine() string {
	var b [40]byte
	return strings.Fields(string(b[:runtime.Stack(b[:], false)]))[1]
}

func TestClosed(t *testing.T) {
	d := New(2, xpu.FP32)
	d.Close()
	defer func() {
		if recover() == nil {
			t.Error("a closed device worked")
		}
	}()
	d.Parallel(2, func(int) {})
}

func TestName(t *testing.T) {
	one, two := newDevice(&goKernels, 1), newDevice(&goKernels, 2)
	defer one.Close()
	defer two.Close()
	if one.Name() != "cpu go, 1 thread" || two.Name() != "cpu go, 2 threads" {
		t.Errorf("names %q and %q", one.Name(), two.Name())
	}
	twin := newDevice(kernelsFor(xpu.BF16)[len(kernelsFor(xpu.BF16))-1], 2)
	defer twin.Close()
	if twin.Name() != "cpu go, bf16, 2 threads" || twin.Arithmetic() != two.Arithmetic()+" bf16" ||
		twin.Precision() != xpu.BF16 {
		t.Errorf("name %q, arithmetic %q, precision %q", twin.Name(), twin.Arithmetic(), twin.Precision())
	}
	if d := New(0, xpu.FP32); d.Threads() < 1 {
		t.Errorf("%d threads", d.Threads())
	} else {
		d.Close()
	}
}

func BenchmarkParallel(b *testing.B) {
	d := New(2, xpu.FP32)
	defer d.Close()
	f := func(int) {}
	for b.Loop() {
		d.Parallel(2, f)
	}
}
