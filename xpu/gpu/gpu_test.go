package gpu

import (
	"os"
	"testing"

	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/devicetest"
	"mula/xpu/opencl"
)

// PoCL keeps its compiled kernels for all tests of this process. With a cache of programs it would
// compile every kernel again, for any size of groups.
func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "gpu")
	if err != nil {
		panic(err)
	}
	os.Setenv("POCL_CACHE_DIR", folder)
	code := m.Run()
	os.RemoveAll(folder)
	os.Exit(code)
}

// shapes lists the shapes of the kernels. PoCL needs ten times as long to compile the kernels for a
// GPU if it may optimize them.
var shapes = map[string]shape{"processor": processorShape, "gpu": {group: gpuShape.group, options: "-cl-opt-disable"}}

// someDevice is the OpenCL device that is tested.
func someDevice(t testing.TB) *opencl.Device {
	t.Helper()
	devices, err := opencl.Devices()
	if len(devices) == 0 {
		t.Skipf("no OpenCL device: %v", err)
	}
	d, err := opencl.Choose(devices, opencl.Choice{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// newTest makes a device of that shape for a test.
func newTest(t testing.TB, precision xpu.Precision, s shape) *Device {
	t.Helper()
	d, err := newDevice(t.Context(), someDevice(t), Options{Precision: precision, Threads: 2}, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

// Both shapes of the kernels, on any device. They share no program, so that PoCL compiles nothing
// twice while they run at the same time. Programs of both precisions are compiled for the first.
func TestDevice(t *testing.T) {
	longtest.SkipIfShort(t)
	someDevice(t) // PoCL fails if two ask it for its devices at once before it has any
	for name, s := range shapes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			t.Run("fp32", func(t *testing.T) { devicetest.Run(t, newTest(t, xpu.FP32, s), 1e-5) })
			t.Run("bf16", func(t *testing.T) { devicetest.Run(t, newTest(t, xpu.BF16, s), 1e-2) })
		})
	}
}

// A device gives the same bits as another of its kind, whatever was computed before.
func TestSameBits(t *testing.T) {
	longtest.SkipIfShort(t)
	for name, s := range shapes {
		t.Run(name, func(t *testing.T) { devicetest.SameBits(t, newTest(t, xpu.FP32, s), newTest(t, xpu.FP32, s)) })
	}
}

func BenchmarkDevice(b *testing.B) {
	d, err := New(b.Context(), someDevice(b), Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(d.Close)
	devicetest.Benchmark(b, d, 2)
}
