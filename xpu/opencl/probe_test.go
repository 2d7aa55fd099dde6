package opencl

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"mula/internal/longtest"
)

// Both products equal the products of plain loops in float64.
func TestProducts(t *testing.T) {
	longtest.SkipIfShort(t)
	d := someDevice(t)
	b := newBench(t, d)
	program, err := b.Build(t.Context(), Source{Name: "probe.cl", Text: probeText}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Release()
	random := rand.New(rand.NewPCG(1, 2))
	for _, test := range []struct {
		kernel        string
		m, n, k       int
		rows, columns int
		local         []int
	}{
		{"product_registers", 64, 128, 48, 8, 16, []int{8, 8}},
		{"product_shared", 64, 128, 48, 4, 4, []int{16, 16}},
		{"product_shared", 128, 64, 16, 4, 4, []int{16, 16}},
	} {
		left, right, got := make([]float32, test.m*test.k), make([]float32, test.k*test.n), make([]float32,
			test.m*test.n)
		for _, x := range [][]float32{left, right} {
			for i := range x {
				x[i] = random.Float32()*2 - 1
			}
		}
		k, err := program.Kernel(test.kernel)
		if err != nil {
			t.Fatal(err)
		}
		defer k.Release()
		c := b.buffer(t, got)
		if err := b.queue.Launch(k, []int{test.n / test.columns, test.m / test.rows}, test.local, Global(c),
			Global(b.buffer(t, left)), Global(b.buffer(t, right)),
			Scalar(int32(test.n)), Scalar(int32(test.k))); err != nil {
			t.Fatal(err)
		}
		if err := Read(t.Context(), b.queue, c, 0, got); err != nil {
			t.Fatal(err)
		}
		for i := range test.m {
			for j := range test.n {
				want, size := 0.0, 0.0
				for l := range test.k {
					p := float64(left[i*test.k+l]) * float64(right[l*test.n+j])
					want, size = want+p, size+math.Abs(p)
				}
				if v := float64(got[i*test.n+j]); math.IsNaN(v) || math.Abs(v-want) > 1e-6*size {
					t.Fatalf("%s: row %d, column %d of %d×%d×%d is %g, want %g", test.kernel, i, j, test.m, test.n,
						test.k, v, want)
				}
			}
		}
	}
}

func TestProbe(t *testing.T) {
	longtest.SkipIfShort(t)
	d, cache := someDevice(t), NewCache(t.TempDir())
	rates, err := d.Probe(t.Context(), time.Millisecond, cache)
	if err != nil {
		t.Fatal(err)
	}
	if rates.Copy < 1e6 || rates.Product < 1e6 || rates.Kernel == "" {
		t.Errorf("%+v", rates)
	}
	if n := len(cache.files(t)); n != 1 {
		t.Errorf("%d files in the cache", n)
	}
	// A device that computes something else is found out.
	for name, change := range map[string]func(kernel uintptr, index uint32, value unsafe.Pointer){
		"measuring": func(_ uintptr, index uint32, value unsafe.Pointer) {
			if index == 4 { // the number of terms
				*(*int32)(value) /= 2
			}
		},
		"kernel copy gives": func(_ uintptr, index uint32, value unsafe.Pointer) {
			if index == 1 && *(*uint32)(value) == 1021 { // the period of the pattern
				*(*uint32)(value) = 1022
			}
		},
	} {
		_, err := changed(d, func(c *calls) {
			set := c.SetKernelArg
			c.SetKernelArg = func(kernel uintptr, index uint32, size uintptr, value unsafe.Pointer) int32 {
				change(kernel, index, value)
				return set(kernel, index, size, value)
			}
		}).Probe(t.Context(), time.Millisecond, cache)
		wants(t, err, name, "the device or its driver is broken")
	}
}
