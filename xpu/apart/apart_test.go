package apart_test

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"mula/xpu"
	"mula/xpu/apart"
	"mula/xpu/cpu"
	"mula/xpu/devicetest"
)

func device(t *testing.T, precision xpu.Precision) *apart.Device {
	d := apart.New(cpu.New(2, precision))
	t.Cleanup(d.Close)
	return d
}

func floats(t *testing.T, d xpu.Device, x ...float32) xpu.Tensor {
	t.Helper()
	y, err := d.New(xpu.Float32, len(x))
	if err != nil {
		t.Fatal(err)
	}
	d.Write(y, x)
	return y
}

func TestDevice(t *testing.T) { devicetest.Run(t, device(t, xpu.FP32), 1e-5) }

// TestSameBits: what is computed on the other side has the bits of the device inside.
func TestSameBits(t *testing.T) {
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		inner := cpu.New(1, precision)
		defer inner.Close()
		devicetest.SameBits(t, inner, device(t, precision))
	}
}

// TestNoView checks that the host cannot see the memory, nor parts of it.
func TestNoView(t *testing.T) {
	d := device(t, xpu.FP32)
	x := floats(t, d, 1, 2, 3, 4)
	for _, view := range []xpu.Tensor{x, x.Rows(1, 3), x.Reshape(2, 2).T(), x.Reshape(2, 2).Index(1)} {
		if view.Host() != nil {
			t.Errorf("the host sees a tensor of shape %v", view.Shape())
		}
	}
	var buffer []float32
	got, err := xpu.Numbers(t.Context(), d, x.Rows(1, 3), &buffer)
	if err != nil || !slices.Equal(got, []float32{2, 3}) || &got[0] != &buffer[0] {
		t.Errorf("Numbers returns %v, %v", got, err)
	}
}

// mirrored allocates a slice with a counterpart on the device.
func mirrored(t *testing.T, d xpu.Device, x ...float32) []float32 {
	t.Helper()
	y, err := d.Floats(len(x))
	if err != nil {
		t.Fatal(err)
	}
	copy(y, x)
	d.ToDevice(y)
	return y
}

// TestSides: each side of a slice sees the other side's data after a copy, and not before.
func TestSides(t *testing.T) {
	d := device(t, xpu.FP32)
	x, sum := mirrored(t, d, 1, 2, 3, 4), mirrored(t, d, 0, 0)
	add := func() { d.Add(xpu.Of(sum, 2), xpu.Of(x, 2), xpu.Of(x[2:], 2)) }
	nan := func(x ...float32) (n int) {
		for _, v := range x {
			if v != v {
				n++
			}
		}
		return n
	}
	x[0] = 100 // and no ToDevice
	add()
	if nan(sum...) != 2 || nan(x...) != 0 {
		t.Errorf("after a command the host has %v and %v", x, sum)
	}
	if err := d.ToHost(t.Context(), sum); err != nil {
		t.Fatal(err)
	}
	if sum[0] != 4 || sum[1] != 6 {
		t.Errorf("the sum is %v", sum)
	}
	d.ToDevice(x[:1])
	add()
	if err := d.ToHost(t.Context(), sum, x); err != nil {
		t.Fatal(err)
	}
	if sum[0] != 103 || x[0] != 100 {
		t.Errorf("after ToDevice the device has %v", sum)
	}
	// For a product that skips columns, the host keeps the columns between.
	c := mirrored(t, d, 7, 7, 7, 7, 7)
	d.MatMul(xpu.Of(c[1:], 4).Strided(2, 1, 2), xpu.Of(x, 2, 1), xpu.Of(x, 1, 1), xpu.MatMulOptions{})
	if nan(c[1], c[3]) != 2 || nan(c...) != 2 {
		t.Errorf("the host has %v", c)
	}
	d.Free(x)
	if nan(x...) != 4 {
		t.Errorf("freed memory is still %v", x)
	}
	for name, f := range map[string]func(){
		"an operand of the host":   func() { d.Add(xpu.Of(sum, 2), xpu.Of(sum, 2), xpu.Of(make([]float32, 2), 2)) },
		"ToDevice":                 func() { d.ToDevice(make([]float32, 2)) },
		"freeing foreign memory":   func() { d.Free(make([]float32, 2)) },
		"freeing a part of memory": func() { d.Free(sum[1:]) },
	} {
		func() {
			defer func() {
				if r, _ := recover().(string); !strings.HasPrefix(r, "apart: ") {
					t.Errorf("%s: panicked with %q", name, r)
				}
			}()
			f()
		}()
	}
}

// TestHostResults: they are not there before Wait.
func TestHostResults(t *testing.T) {
	d := device(t, xpu.FP32)
	sums := []float64{1}
	d.SumSquares([]xpu.Tensor{floats(t, d, 3, 4)}, sums)
	if !math.IsNaN(sums[0]) {
		t.Errorf("before Wait the sum is %v", sums)
	}
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if sums[0] != 25 {
		t.Errorf("the sum is %v", sums)
	}
}

// waiting is a device whose sums of squares take until they are let go on.
type waiting struct {
	xpu.Device
	begun, goOn chan struct{}
}

func (w waiting) SumSquares(stretches []xpu.Tensor, sums []float64) {
	close(w.begun)
	<-w.goOn
	w.Device.SumSquares(stretches, sums)
}

// TestWaitDuringCommand: a goroutine that waits while another's command is under way takes nothing
// of its results, which are whole after its own wait.
func TestWaitDuringCommand(t *testing.T) {
	inner := waiting{cpu.New(1, xpu.FP32), make(chan struct{}), make(chan struct{})}
	d := apart.New(inner)
	defer d.Close()
	x, sums, done := floats(t, d, 3, 4), make([]float64, 1), make(chan struct{})
	go func() {
		defer close(done)
		d.SumSquares([]xpu.Tensor{x}, sums)
	}()
	<-inner.begun
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(inner.goOn)
	<-done
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if sums[0] != 25 {
		t.Errorf("the sum is %g, want 25", sums[0])
	}
}

// TestFail: a device that has failed does nothing more, and returns its error at every Wait.
func TestFail(t *testing.T) {
	d := device(t, xpu.FP32)
	x := floats(t, d, 1, 2)
	lost := errors.New("the device is lost")
	d.Fail(lost)
	d.Fail(errors.New("another"))
	d.Add(x, x, x)
	for range 2 {
		if err := errors.Join(d.Wait(t.Context()), d.Read(t.Context(), make([]float32, 2), x)); !errors.Is(err,
			lost) || strings.Contains(err.Error(), "another") {
			t.Errorf("the error is %v", err)
		}
	}
	if _, err := d.New(xpu.Float32, 1); !errors.Is(err, lost) {
		t.Errorf("New returns %v", err)
	}
	d.Release(x)
}

func TestCapacity(t *testing.T) {
	d := device(t, xpu.FP32)
	d.SetCapacity(64)
	x := floats(t, d, make([]float32, 10)...)
	if _, err := d.New(xpu.Int32, 7); err == nil {
		t.Error("68 of 64 bytes were given")
	}
	if n, err := d.New(xpu.Int32, 6); err != nil || d.InUse() != 64 || d.Capacity() != 64 {
		t.Errorf("of 64 bytes %d are in use: %v", d.InUse(), err)
	} else {
		d.Release(n)
	}
	if d.Release(x); d.InUse() != 0 {
		t.Errorf("%d bytes are in use", d.InUse())
	}
}
