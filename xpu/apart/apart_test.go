package apart_test

import (
	"errors"
	"math"
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

func floats(t *testing.T, d xpu.Device, x ...float32) []float32 {
	t.Helper()
	y, err := d.Floats(len(x))
	if err != nil {
		t.Fatal(err)
	}
	copy(y, x)
	d.ToDevice(y)
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

// TestSides: what one side writes the other sees when it was brought there, and not before.
func TestSides(t *testing.T) {
	d := device(t, xpu.FP32)
	x, sum := floats(t, d, 1, 2, 3, 4), floats(t, d, 0, 0)
	nan := func(x ...float32) (n int) {
		for _, v := range x {
			if v != v {
				n++
			}
		}
		return n
	}
	x[0] = 100 // and no ToDevice
	d.Add(sum, x[:2], x[2:])
	if nan(sum...) != 2 || nan(x...) != 0 {
		t.Errorf("after a command the host has %v and %v", x, sum)
	}
	if err := d.ToHost(t.Context(), sum[1:]); err != nil {
		t.Fatal(err)
	}
	if sum[1] != 6 || nan(sum[0]) != 1 {
		t.Errorf("after ToHost of the second element the host has %v", sum)
	}
	if err := d.ToHost(t.Context(), sum); err != nil {
		t.Fatal(err)
	}
	if sum[0] != 4 {
		t.Errorf("the device saw what was not given to it: %v", sum)
	}
	d.ToDevice(x[:1])
	d.Add(sum, x[:2], x[2:])
	if err := d.ToHost(t.Context(), sum, x); err != nil {
		t.Fatal(err)
	}
	if sum[0] != 103 || x[0] != 100 {
		t.Errorf("after ToDevice the device has %v", sum)
	}
	// For a product that skips columns, the host keeps the columns between.
	c := floats(t, d, 7, 7, 7, 7, 7)
	d.MatMul(xpu.Of(c[1:], len(c[1:])).Strided(2, 1, 2), xpu.Of(x, 2, 1), xpu.Of(x, 1, 1),
		xpu.MatMulOptions{})
	if nan(c[1], c[3]) != 2 || nan(c...) != 2 {
		t.Errorf("the host has %v", c)
	}
	d.Free(x)
	if nan(x...) != 4 {
		t.Errorf("memory that was given back is still %v", x)
	}
}

// TestHostResults: they are not there before Wait.
func TestHostResults(t *testing.T) {
	d := device(t, xpu.FP32)
	sums := []float64{1}
	d.SumSquares([][]float32{floats(t, d, 3, 4)}, sums)
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

func (w waiting) SumSquares(stretches [][]float32, sums []float64) {
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
		d.SumSquares([][]float32{x}, sums)
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

func TestForeignMemory(t *testing.T) {
	d := device(t, xpu.FP32)
	x := floats(t, d, 1, 2)
	ids, err := d.Ints(1)
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func(){
		"an operand of the host":             func() { d.Add(x, x, make([]float32, 2)) },
		"a result of the host":               func() { d.Copy(make([]float32, 2), x) },
		"ToDevice":                           func() { d.ToDevice(make([]float32, 2)) },
		"whole numbers of the host":          func() { d.Embed(x, x, make([]int32, 1), 1) },
		"giving back what is not its own":    func() { d.Free(make([]float32, 2)) },
		"giving back a part":                 func() { d.Free(x[1:]) },
		"ids that the host has not as given": func() { ids[0] = 1; d.EmbedGrad(x, x[:1], ids, 1, -1) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if r, _ := recover().(string); !strings.HasPrefix(r, "apart: ") {
					t.Errorf("panicked with %q", r)
				}
			}()
			f()
		})
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
		if err := errors.Join(d.Wait(t.Context()), d.ToHost(t.Context(), x), d.IntsToHost(t.Context())); !errors.Is(err,
			lost) || strings.Contains(err.Error(), "another") {
			t.Errorf("the error is %v", err)
		}
	}
	if _, err := d.Floats(1); !errors.Is(err, lost) {
		t.Errorf("Floats gives %v", err)
	}
	d.Free(x)
}

func TestCapacity(t *testing.T) {
	d := device(t, xpu.FP32)
	d.SetCapacity(64)
	x := floats(t, d, make([]float32, 10)...)
	if _, err := d.Ints(7); err == nil {
		t.Error("68 of 64 bytes were given")
	}
	if n, err := d.Ints(6); err != nil || d.InUse() != 64 || d.Capacity() != 64 {
		t.Errorf("of 64 bytes %d are in use: %v", d.InUse(), err)
	} else {
		d.FreeInts(n)
	}
	if d.Free(x); d.InUse() != 0 {
		t.Errorf("%d bytes are in use", d.InUse())
	}
}
