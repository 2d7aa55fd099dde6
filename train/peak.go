package train

import (
	"context"
	"time"

	"mula/xpu"
)

// peakTime bounds what the measurement of a machine's peak takes.
const peakTime = 250 * time.Millisecond

// measurePeak measures how fast the device multiplies, in FLOP/s: the best time of products of square matrices of several sizes, whose entries
// are small whole numbers. It takes at most peakTime, and at most a hundredth of work, the FLOPs of what it is measured for, or two small
// products, the first of which is not timed: a driver may compile for it. For a run of seconds the figure is rough.
func measurePeak(ctx context.Context, device xpu.Device, work float64) (float64, error) {
	const smallest, largest = 64, 1024
	const repeats = 8 // of the smaller sizes, so that the larger ones, which are faster, get most of the work
	budget := work / 100
	var peak float64
	var memory [3][]float32
	defer func() {
		for _, x := range memory {
			if x != nil {
				device.Free(x)
			}
		}
	}()
	var begin time.Time
	for n := smallest; n <= largest; n *= 2 {
		flops := 2 * float64(n) * float64(n) * float64(n)
		if n > smallest && flops > budget {
			break
		}
		for i := range memory {
			if memory[i] != nil {
				device.Free(memory[i])
				memory[i] = nil
			}
			var err error
			if memory[i], err = device.Floats(n * n); err != nil {
				return 0, err
			}
		}
		a, b, c := memory[0], memory[1], memory[2]
		for i := range a {
			a[i], b[i] = float32(i%7)-3, float32(i%5)-2
		}
		device.ToDevice(a)
		device.ToDevice(b)
		if n == smallest {
			device.MatMul(false, true, n, n, n, a, n, b, n, c, n, false)
			budget -= flops
		}
		if err := device.Wait(ctx); err != nil {
			return 0, err
		}
		if n == smallest {
			begin = time.Now()
		}
		for i := 0; i == 0 || (n == largest || i < repeats) && time.Since(begin) < peakTime && flops <= budget; i++ {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			start := time.Now()
			device.MatMul(false, true, n, n, n, a, n, b, n, c, n, false)
			if err := device.Wait(ctx); err != nil {
				return 0, err
			}
			if seconds := time.Since(start).Seconds(); seconds > 0 { // a coarse clock may not see it pass
				peak = max(peak, flops/seconds)
			}
			budget -= flops
		}
		if time.Since(begin) > peakTime {
			break
		}
	}
	if peak == 0 {
		peak = 1e9 // FLOP/s, of a machine whose clock is too coarse to tell: the figure only scales what is recorded
	}
	return peak, nil
}

// flopsOfRun is the work of all steps that are left.
func (r *run) flopsOfRun() float64 {
	perStep := float64(r.config.BatchSize) * float64(r.data.SequenceLength)
	return float64(r.config.Steps-r.state.Step) * perStep * r.config.Model.FLOPsPerToken(r.data.SequenceLength)
}
