package gpu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"mula/internal/testwait"
	"mula/xpu"
	"mula/xpu/opencl"
)

// give is a command that gives x to the host, multiplied by nothing.
func give(d *Device, x xpu.Tensor, take func(words []uint32)) {
	c := d.begin()
	defer c.end()
	zero := c.take(x.Elements())
	each, parts := c.stretch(x.Elements())
	c.launch("add", c.rows(parts), zero, c.reads(x), c.reads(x), long(x.Elements()), integer(each))
	c.launch("add", c.rows(parts), c.result(x.Elements(), take), zero, c.reads(x), long(x.Elements()), integer(each))
}

// Host results come with the next Wait, each with its own numbers, also if they fill several
// buffers or one needs a buffer of its own.
func TestResults(t *testing.T) {
	d := newTest(t, xpu.FP32, processorShape)
	const many = resultsBytes/4 + 1
	x := make([]float32, many)
	for i := range x {
		x[i] = float32(i % 1000)
	}
	onDevice := upload(t, d, x)
	for round := range 2 {
		got := 0
		for i, n := range []int{5, 1000, many, 7, resultsBytes/4 - 1000, 2000, 1} {
			give(d, onDevice.Rows(0, n), func(words []uint32) {
				if len(words) != n || i != got {
					t.Errorf("round %d: result %d has %d numbers; want result %d with %d", round, i, len(words), got, n)
				}
				got++
				for i, w := range words {
					if math.Float32frombits(w) != 3*x[i] {
						t.Errorf("round %d: number %d of %d is %v, want %v", round, i, n, math.Float32frombits(w),
							3*x[i])
						break
					}
				}
			})
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := d.Wait(ctx); !errors.Is(err, context.Canceled) || got > 0 {
			t.Errorf("Wait with a done context: %v, and %d results", err, got)
		}
		if err := d.Wait(t.Context()); err != nil || got != 7 {
			t.Errorf("Wait: %v, and %d results", err, got)
		}
	}
}

// The first error of the driver stays, and nothing is done after it.
func TestBrokenDevice(t *testing.T) {
	d := newTest(t, xpu.FP32, processorShape)
	x, err := d.New(xpu.Float32, 3)
	if err != nil {
		t.Fatal(err)
	}
	give(d, x, func([]uint32) { t.Error("a result of a broken device") })
	queue, err := d.context.NewQueue(false)
	if err != nil {
		t.Fatal(err)
	}
	working := d.queue
	d.queue = queue
	queue.Release() // every call fails now
	d.Add(x, x, x)
	d.queue = working // too late
	d.Add(x, x, x)
	d.Zero(x)
	d.Write(x, make([]float32, 3))
	first := d.Wait(t.Context())
	if !errors.Is(first, opencl.ErrReleased) || !strings.Contains(first.Error(), "kernel add") {
		t.Fatalf("Wait: %v", first)
	}
	if err := d.Read(t.Context(), make([]float32, 3), x); err != first {
		t.Errorf("Read: %v, want %v", err, first)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 50 {
		if err := d.Wait(ended); err != first && !errors.Is(err, context.Canceled) {
			t.Fatalf("Wait with a done context: %v, want %v", err, first)
		}
	}
	one := func(i int) xpu.Tensor { return x.Rows(i, i+1).Reshape(1, 1) }
	d.MatMul(one(2), one(0), one(1), xpu.MatMulOptions{})
	if err := d.Wait(t.Context()); err != first {
		t.Errorf("Wait: %v, want %v", err, first)
	}
}

// What a device has made goes with it.
func TestClose(t *testing.T) {
	before := opencl.Live()
	for _, broken := range []bool{false, true} {
		d, err := newDevice(t.Context(), someDevice(t), Options{Threads: 1, Profile: true}, processorShape)
		if err != nil {
			t.Fatal(err)
		}
		x, err := d.New(xpu.Float32, 1000)
		if err != nil {
			t.Fatal(err)
		}
		if d.Name() != "opencl "+d.device.Name+", 1 thread" ||
			!strings.HasPrefix(d.Arithmetic(), "opencl "+d.device.Name+" driver ") || d.Precision() != xpu.FP32 {
			t.Errorf("%s, %s, %s", d.Name(), d.Arithmetic(), d.Precision())
		}
		give(d, x, func([]uint32) {})
		if err := d.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if p := d.Profile(); len(p) != 1 || p[0].Kernel != "add" || p[0].Launches != 2 || p[0].Time <= 0 {
			t.Errorf("profile %+v", p)
		}
		give(d, x, func([]uint32) {})
		if broken {
			d.command.fail(errors.New("lost"))
			if err := d.Wait(t.Context()); err == nil || err.Error() != "gpu: lost" {
				t.Errorf("Wait: %v", err)
			}
		}
		d.Close()
		d.Close()
		func() {
			defer func() {
				if recover() == nil {
					t.Error("Zero after Close does not panic")
				}
			}()
			d.Zero(x)
		}()
	}
	// Commands that the test did not wait for may still run.
	testwait.Until(t, "all OpenCL objects are released", func() bool { return opencl.Live() == before })
}

// All precisions that round operands have the same arithmetic.
func TestArithmetic(t *testing.T) {
	names := map[string]bool{}
	for _, precision := range []xpu.Precision{xpu.BF16, xpu.BF16Mixed, xpu.BF16Compact} {
		d := &Device{device: someDevice(t), precision: precision, shape: processorShape}
		names[d.Arithmetic()] = true
	}
	if d := someDevice(t); len(names) != 1 || !names[fmt.Sprintf("opencl %s driver %s bf16", d.Name, d.DriverVersion)] {
		t.Errorf("%v", names)
	}
}

func TestWrongOptions(t *testing.T) {
	device := someDevice(t)
	for _, o := range []Options{{Precision: "fp8"}, {Threads: -1}} {
		if _, err := New(t.Context(), device, o); err == nil || !strings.HasPrefix(err.Error(), "gpu: ") {
			t.Errorf("%+v: %v", o, err)
		}
	}
	small := *device
	// enough for all kernels except the kernels of attention, which are compiled at their first
	// launch
	small.MaxWorkGroup = attendItems / 2
	if _, err := newDevice(t.Context(), &small, Options{}, gpuShape); err == nil ||
		!strings.Contains(err.Error(), "the maximum work-group size is 128") {
		t.Errorf("a device of small groups: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := New(ctx, device, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("with a done context: %v", err)
	}
}

// Memory is counted: what is freed can be had again, and packed copies and scratch memory count,
// too.
func TestRoom(t *testing.T) {
	d := newTest(t, xpu.FP32, processorShape)
	start := d.memory.bytes
	x, err := d.New(xpu.Float32, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if d.memory.bytes != start+4<<20 {
		t.Errorf("%d bytes more, want %d", d.memory.bytes-start, 4<<20)
	}
	half, err := d.New(xpu.BFloat16, 1<<20+1)
	if err != nil {
		t.Fatal(err)
	}
	if want := start + 6<<20 + 4; d.memory.bytes != want {
		t.Errorf("with a tensor of bf16 %d bytes, want %d", d.memory.bytes, want)
	}
	d.Release(half)
	d.Release(x)
	if d.memory.bytes != start {
		t.Errorf("%d bytes are left", d.memory.bytes-start)
	}
	small := *d.device
	small.Memory = 1 << 20
	d.device = &small
	if x, err := d.New(xpu.Float32, 1<<20); err == nil ||
		!strings.Contains(err.Error(), "out of memory: 4194304 bytes requested, of 1048576 bytes") {
		t.Errorf("%d elements, %v", x.Elements(), err)
	}
	// A command without room for its scratch memory breaks the device.
	y, err := d.New(xpu.Float32, 1<<17)
	if err != nil {
		t.Fatal(err)
	}
	small.Memory = d.memory.bytes + 1000
	d.MatMul(y.Rows(1<<16+4, 1<<16+4+1<<14).Reshape(1, 1<<14), y.Rows(0, 4).Reshape(1, 4),
		y.Rows(4, 1<<16+4).Reshape(4, 1<<14), xpu.MatMulOptions{})
	if err := d.Wait(t.Context()); err == nil || !strings.Contains(err.Error(), "scratch memory") {
		t.Errorf("Wait: %v", err)
	}
}

// Programs go through the cache of the options, with all their kernels.
func TestCache(t *testing.T) {
	d := newTest(t, xpu.FP32, processorShape)
	folder := t.TempDir()
	d.cache = opencl.NewCache(folder)
	memory := d.program("memory.cl", "")
	want := slices.Sorted(slices.Values(memory.kernels))
	for range 2 {
		kernels, err := d.build(t.Context(), memory)
		if got := slices.Sorted(maps.Keys(kernels)); err != nil || !slices.Equal(got, want) {
			t.Fatalf("the kernels are %q, want %q; error %v", got, want, err)
		}
		for _, k := range kernels {
			k.Release()
		}
		if files, err := os.ReadDir(folder); err != nil || len(files) != 1 {
			t.Errorf("%d files in the cache, %v", len(files), err)
		}
	}
}

func BenchmarkLaunch(b *testing.B) {
	d := newTest(b, xpu.FP32, processorShape)
	x, err := d.New(xpu.Float32, 64)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		d.Add(x, x, x)
	}
	if err := d.Wait(b.Context()); err != nil {
		b.Fatal(err)
	}
}
