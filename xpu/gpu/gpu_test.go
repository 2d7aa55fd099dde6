package gpu

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
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

// shapes lists the shapes of the kernels that a device can run. A CPU has both. A GPU may have less
// local memory than the kernels for a processor need.
func shapes(device *opencl.Device) map[string]shape {
	if device.Type != opencl.CPU {
		return map[string]shape{"gpu": gpuShape}
	}
	return map[string]shape{"processor": processorShape, "gpu": emulation("", "")}
}

// emulation is the shape of the kernels for a GPU, for a CPU. It emulates the matrix instructions
// of a file. PoCL needs ten times as long to compile the kernels if it may optimize them.
func emulation(file, emulate string) shape {
	s := gpuShape
	s.options, s.emulated, s.emulate = "-cl-opt-disable", file, emulate
	s.tile = tensorTile{down: 2, across: 2, high: 1, wide: 2, pieces: 4, stages: 3}
	return s
}

// someDevice is the OpenCL device that is tested: the best one, or of a type.
func someDevice(t testing.TB, of ...opencl.Type) *opencl.Device {
	t.Helper()
	devices, err := opencl.Devices()
	if len(of) > 0 {
		devices = slices.DeleteFunc(devices, func(d *opencl.Device) bool { return !slices.Contains(of, d.Type) })
	}
	if len(devices) == 0 {
		t.Skipf("no OpenCL device (type: %v): %v", of, err)
	}
	d, err := opencl.Choose(devices, opencl.Choice{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// newTest makes a device of that shape for a test.
func newTest(t testing.TB, precision xpu.Precision, s shape, of ...opencl.Type) *Device {
	t.Helper()
	d, err := newDevice(t.Context(), someDevice(t, of...), Options{Precision: precision, Threads: 2}, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

// All shapes of the kernels that the device can run. They share no program, so that PoCL compiles
// nothing twice while they run at the same time. Programs that do not depend on the precision are
// the same, so they are tested once.
func TestDevice(t *testing.T) {
	longtest.SkipIfShort(t)
	for name, s := range shapes(someDevice(t)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			common := devicetest.Common
			if longtest.Rounds(0, 1) > 0 {
				common |= devicetest.HalfActivations // usually tested with bf16 alone
			}
			t.Run("fp32", func(t *testing.T) { devicetest.Run(t, newTest(t, xpu.FP32, s), 1e-5, common) })
			t.Run("bf16", func(t *testing.T) {
				devicetest.Run(t, newTest(t, xpu.BF16, s), 1e-2,
					devicetest.Rounding|devicetest.HalfProducts|devicetest.HalfActivations)
			})
		})
	}
}

// A device gives the same bits as another of its kind, whatever was computed before.
func TestSameBits(t *testing.T) {
	longtest.SkipIfShort(t)
	for name, s := range shapes(someDevice(t)) {
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

// A product of many terms is the sum of its chains, with the same bits however many are computed at
// the same time.
func TestChains(t *testing.T) {
	longtest.SkipIfShort(t)
	const m, n, gap = 3, 70, 5
	s, found := shapes(someDevice(t))["gpu"]
	if !found {
		t.Fatal("no shape for a GPU")
	}
	few := s
	few.chains = 2 * m * n
	one := s
	one.chains = 0
	devices := []*Device{newTest(t, xpu.FP32, s), newTest(t, xpu.FP32, few), newTest(t, xpu.FP32, one)}
	r := rand.New(rand.NewPCG(1, 0))
	for _, k := range []int{sumTerms, sumTerms + 1, 2*sumTerms + 7, 5 * sumTerms} {
		a, b, before := normal(r, m*k), normal(r, k*n), normal(r, m*(n+gap))
		for form := range 8 {
			transA, transB, accumulate := form&1 != 0, form&2 != 0, form&4 != 0
			options := xpu.MatMulOptions{Accumulate: accumulate}
			what := fmt.Sprintf("%d terms, form %d", k, form)
			var first []float32
			for i, d := range devices {
				left, right, result := upload(t, d, a), upload(t, d, b), upload(t, d, before)
				lda, ldb := k, n
				if transA {
					lda = m
				}
				if transB {
					ldb = k
				}
				d.MatMul(result.Strided(m, n, n+gap), devicetest.Stored(left, m, k, lda, transA),
					devicetest.Stored(right, k, n, ldb, transB), options)
				got := numbersOf(t, d, result)
				for _, x := range []xpu.Tensor{left, right, result} {
					d.Release(x)
				}
				if i > 0 {
					if !slices.Equal(got, first) {
						t.Errorf("%s: other bits with at most %d elements of chains", what, d.shape.chains)
					}
					continue
				}
				first = got
				for at, old := range before {
					row, column := at/(n+gap), at%(n+gap)
					if column >= n {
						if got[at] != old {
							t.Fatalf("%s: element %d,%d beyond the row was written", what, row, column)
						}
						continue
					}
					var want sum
					for l := range k {
						x, y := a[row*k+l], b[l*n+column]
						if transA {
							x = a[l*m+row]
						}
						if transB {
							y = b[column*k+l]
						}
						want.add(float64(x), float64(y))
					}
					if !accumulate {
						old = 0
					}
					want.near(t, fmt.Sprintf("%s: element %d,%d", what, row, column), got[at], old)
				}
			}
		}
	}
}
