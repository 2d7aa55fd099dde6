package devices

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"mula/xpu"
	"mula/xpu/cpu"
)

// A steadyDevice multiplies at one speed, FLOP/s, on the clock of a synctest bubble: at once, or
// when a caller waits. It has no results, and its memory has the size of a device's memory.
type steadyDevice struct {
	xpu.Device
	later       bool
	pending     time.Duration
	speed, work float64

	start   time.Duration // what a product takes beside its work
	most    int           // elements of the largest tensor that the device can allocate; 0: any
	largest int           // rows of the largest product
}

func (d *steadyDevice) New(dtype xpu.DType, shape ...int) (xpu.Tensor, error) {
	if n, err := xpu.Elements(shape); err != nil || d.most > 0 && n > d.most {
		return xpu.Tensor{}, errors.Join(err, errors.New("no memory"))
	}
	return d.Device.New(dtype, shape...)
}

func (d *steadyDevice) MatMul(dst, a, _ xpu.Tensor, _ xpu.MatMulOptions) {
	m, n, k := dst.Dim(0), dst.Dim(1), a.Dim(1)
	flops := 2 * float64(m) * float64(n) * float64(k)
	if d.work == 0 {
		d.pending = time.Second // of a compiler
	}
	d.work += flops
	d.largest = max(d.largest, m)
	d.pending += d.start + time.Duration(flops/d.speed*float64(time.Second))
	if !d.later {
		_ = d.Wait(context.Background())
	}
}

func (d *steadyDevice) Wait(context.Context) error {
	time.Sleep(d.pending)
	d.pending = 0
	return nil
}

// The measurement finds the speed of the device, whatever its first product takes. It is short
// whatever the run, and shorter for a short one; one more product may have begun.
func TestMeasurePeak(t *testing.T) {
	const small, large = 2 * 64 * 64 * 64, 2 * 1024 * 1024 * 1024 // FLOPs of the smallest and of the largest product
	for _, speed := range []float64{1e8, 1e10, 1e12} {
		for _, work := range []float64{0, 1e6, 1e10, 1e20} {
			measure := func(t *testing.T, later bool) {
				d := &steadyDevice{Device: processor(t), later: later, speed: speed}
				begin := time.Now()
				peak, err := MeasurePeak(t.Context(), d, work)
				if err != nil || math.Abs(peak-speed) > 1e-2*speed {
					t.Errorf("%g FLOP/s, for %g FLOP: peak %g, %v", speed, work, peak, err)
				}
				if d.work > max(2*small, work/100) {
					t.Errorf("%g FLOP/s, for %g FLOP: took %g", speed, work, d.work)
				}
				took, most := time.Since(begin), time.Second+peakTime+time.Duration(large/speed*float64(time.Second))
				if took > most || work == 1e20 && took < peakTime/2 {
					t.Errorf("%g FLOP/s, for %g FLOP: took %v", speed, work, took)
				}
			}
			for _, later := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) { measure(t, later) })
			}
		}
	}
	// A fast device gets larger products, in which what it takes to begin one does not count; where
	// memory is short, the usual ones have to do.
	for _, test := range []struct {
		speed, work float64
		most        int
		largest     int
		peak        float64
	}{
		{1e12, 1e20, 0, 1024, 0.99 * 1e12},
		{1e13, 1e20, 0, 2048, 0.98 * 1e13},
		{1e14, 1e20, 0, 4096, 0.98 * 1e14},
		{1e14, 1e20, 1024 * 1024, 1024, 0.4 * 1e14},
		{1e14, 1e13, 0, 2048, 0.85 * 1e14}, // no work to measure more for
	} {
		synctest.Test(t, func(t *testing.T) {
			d := &steadyDevice{Device: processor(t), later: true, speed: test.speed, start: 20 * time.Microsecond,
				most: test.most}
			begin := time.Now()
			peak, err := MeasurePeak(t.Context(), d, test.work)
			if err != nil || d.largest != test.largest || !(peak >= test.peak && peak <= test.speed) {
				t.Errorf("%g FLOP/s, for %g FLOP: peak %g with products of %d rows, %v; want %g and %d rows",
					test.speed, test.work, peak, d.largest, err, test.peak, test.largest)
			}
			if took := time.Since(begin); took > time.Second+peakTime+20*time.Millisecond {
				t.Errorf("%g FLOP/s: took %v", test.speed, took)
			}
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := MeasurePeak(ctx, processor(t), 1e20); !errors.Is(err, context.Canceled) {
		t.Errorf("a done context: %v", err)
	}
	if peak, err := MeasurePeak(context.Background(), processor(t), 0); err != nil || !(peak > 0) {
		t.Errorf("on this machine: peak %g, %v", peak, err)
	}
}

// processor returns a device on the processor with one thread.
func processor(t testing.TB) xpu.Device {
	d := cpu.New(1, xpu.FP32)
	t.Cleanup(d.Close)
	return d
}
