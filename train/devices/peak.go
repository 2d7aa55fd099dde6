package devices

import (
	"context"
	"time"

	"mula/xpu"
)

// peakTime limits the time of the measurement of a machine's peak.
const peakTime = 250 * time.Millisecond

// peakProduct is the shortest time of a product whose time depends on the device's speed and not on
// the latency of its start.
const peakProduct = time.Millisecond

// MeasurePeak measures the peak of the device's matrix products in FLOP/s. It uses the best time of
// products of square matrices of several sizes with small whole numbers, in the three forms of a
// training step: outputs, gradients of inputs, gradients of weights. The largest matrix has
// 1,024 rows. It has 2,048 or 4,096 rows if the product of half the size takes less than
// peakProduct and the device has enough memory. The measurement takes at most peakTime, and at most
// 1 % of the FLOPs of work, the work of the run, but at least two small products. The first product
// is not timed, because a driver may compile for it. The result is rough for a run of seconds.
func MeasurePeak(ctx context.Context, device xpu.Device, work float64) (float64, error) {
	const smallest, usual, largest = 64, 1024, 4096
	// of a size, before it is known whether there is a larger one, which is faster and gets the
	// rest of the time
	const repeats = 9
	budget := work / 100
	var peak float64
	var memory [3]xpu.Tensor
	var buffer []float32
	free := func() {
		for i, x := range memory {
			if x.Present() {
				device.Release(x)
				memory[i] = xpu.Tensor{}
			}
		}
	}
	defer free()
	var begin time.Time
	for n := smallest; n <= largest; n *= 2 {
		flops := 2 * float64(n) * float64(n) * float64(n)
		if n > smallest && flops > budget {
			break
		}
		free()
		for i := range memory {
			var err error
			if memory[i], err = device.New(xpu.Float32, n, n); err != nil && n > usual {
				return peak, nil // not enough memory for a larger size
			} else if err != nil {
				return 0, err
			}
		}
		a, b, c := memory[0], memory[1], memory[2]
		for i, modulus := range []int{7, 5} {
			x := xpu.HostBuffer(memory[i], &buffer)
			for j := range x {
				x[j] = float32(j%modulus - modulus/2)
			}
			device.Write(memory[i], x)
		}
		forms := [][2]xpu.Tensor{{a, b.T()}, {a, b}, {a.T(), b}}
		if n == smallest {
			device.MatMul(c, a, b.T(), xpu.MatMulOptions{})
			budget -= flops
		}
		if err := device.Wait(ctx); err != nil {
			return 0, err
		}
		if n == smallest {
			begin = time.Now()
		}
		fastest := peakTime
		larger := func() bool { return n < usual || n < largest && fastest < peakProduct && 8*flops <= budget }
		for i := 0; i == 0 || (i < repeats || !larger()) && time.Since(begin) < peakTime && flops <= budget; i++ {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			start, form := time.Now(), forms[i%len(forms)]
			device.MatMul(c, form[0], form[1], xpu.MatMulOptions{})
			if err := device.Wait(ctx); err != nil {
				return 0, err
			}
			took := time.Since(start)
			if fastest = min(fastest, took); took > 0 { // 0 with a coarse clock
				peak = max(peak, flops/took.Seconds())
			}
			budget -= flops
		}
		if time.Since(begin) > peakTime || !larger() {
			break
		}
	}
	if peak == 0 {
		peak = 1e9 // FLOP/s, of a machine whose clock is too coarse to tell: the figure only scales what is recorded
	}
	return peak, nil
}
