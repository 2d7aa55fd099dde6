package estimate

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"mula/internal/machine"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
	"mula/xpu/cpu"
)

// LocalName is the name of the machine that Local measures.
const LocalName = "local"

// probeTime is the approximate duration of each probe.
const probeTime = 150 * time.Millisecond

// Local measures this machine for a run whose ranks are goroutines of one process and share its
// threads (0: GOMAXPROCS). It takes about a second. Other work on the machine slows the probes
// down.
func Local(ctx context.Context, ranks, threads int) (Machine, error) {
	if ranks < 1 || ranks > 1<<12 {
		return Machine{}, fmt.Errorf("%d ranks on this machine; a probe must have between 1 and %d", ranks, 1<<12)
	}
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	own := max(1, threads/ranks)
	share := min(1, float64(threads)/float64(ranks)) // fraction of a thread, if there are more ranks than threads
	m := Machine{
		Name:              LocalName,
		RanksPerNode:      Figure{float64(ranks), Derived, "all ranks are in one process"},
		ComputeEfficiency: Figure{0.5, Assumed, "rate of a model's passes, relative to large products"},
		ProductRows:       Figure{256, Derived, "of mula's processor kernels"},
		NodeEfficiency:    Figure{1, Derived, "node_link was measured with a collective"},
		Network:           Figure{1, Derived, "not used: all ranks are in one process"},
		NetworkEfficiency: Figure{1, Derived, "not used: all ranks are in one process"},
		Latency:           Figure{20e-6, Assumed, "waking up a goroutine"},
	}
	m.Memory = Figure{16e9 / float64(ranks), Assumed, "the system does not report its memory size"}
	if total := float64(machine.TotalMemory()); total > 0 {
		m.Memory = Figure{total / float64(ranks), Measured, "MemTotal of /proc/meminfo, divided by the ranks"}
	}
	for _, p := range []struct {
		precision xpu.Precision
		to        *Figure
	}{{xpu.FP32, &m.PeakFP32}, {xpu.BF16, &m.PeakBF16}} {
		device := cpu.New(own, p.precision)
		rate, err := ProbeProducts(ctx, device)
		device.Close()
		if err != nil {
			return Machine{}, err
		}
		*p.to = Figure{rate * share, Measured, fmt.Sprintf("the best product of matrices of 1024×1024 on %d threads",
			own)}
	}
	rate, err := ProbeCopies(ctx, threads)
	if err != nil {
		return Machine{}, err
	}
	m.MemoryBandwidth = Figure{rate / float64(ranks), Measured, fmt.Sprintf("the best copy on %d threads, read and "+
		"written, divided by the ranks", threads)}
	rate, err = probeExchange(ctx)
	if err != nil {
		return Machine{}, err
	}
	m.NodeLink = Figure{rate * share, Measured, "the best all-gather of two goroutines"}
	return m, nil
}

// best repeats f for about probeTime, at least three times, and returns the shortest duration in
// seconds.
func best(ctx context.Context, f func() error) (float64, error) {
	var times []float64
	for begin := time.Now(); len(times) < 3 || time.Since(begin) < probeTime; {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		start := time.Now()
		if err := f(); err != nil {
			return 0, err
		}
		times = append(times, max(time.Since(start).Seconds(), 1e-9)) // a coarse clock may report 0
	}
	return slices.Min(times), nil
}

// ProbeProducts measures a device for about a sixth of a second. It returns the highest rate of
// products of 1024×1024 matrices, in FLOP/s.
func ProbeProducts(ctx context.Context, device xpu.Device) (float64, error) {
	const n = 1024
	var memory [3]xpu.Tensor
	var buffer []float32
	for i, modulus := range []int{7, 5, 1} { // the third is the product, and starts with zeros
		x, err := device.New(xpu.Float32, n, n)
		if err != nil {
			return 0, err
		}
		defer device.Release(x)
		values := xpu.HostBuffer(x, &buffer)
		for j := range values {
			values[j] = float32(j%modulus - modulus/2)
		}
		device.Write(x, values)
		memory[i] = x
	}
	a, b, c := memory[0], memory[1], memory[2]
	seconds, err := best(ctx, func() error {
		device.MatMul(c, a, b.T(), xpu.MatMulOptions{})
		return device.Wait(ctx)
	})
	return 2 * n * n * n / seconds, err
}

// ProbeCopies measures the memory for about a sixth of a second. It returns the highest rate at
// which threads, at most 8, copy memory, in bytes/s. Reads and writes both count.
func ProbeCopies(ctx context.Context, threads int) (float64, error) {
	const n = 16 << 20 // bytes per thread, more than its caches hold
	threads = min(threads, 8)
	from, to := make([][]byte, threads), make([][]byte, threads)
	for i := range from {
		from[i], to[i] = make([]byte, n), make([]byte, n)
	}
	seconds, err := best(ctx, func() error {
		var all sync.WaitGroup
		for i := range from {
			all.Go(func() { copy(to[i], from[i]) })
		}
		all.Wait()
		return nil
	})
	return 2 * n * float64(threads) / seconds, err
}

func probeExchange(ctx context.Context) (float64, error) {
	const n = 4 << 20 // numbers of a rank
	links := local.New(2)
	var all sync.WaitGroup
	var rate float64
	failed := make([]error, 2)
	for r, link := range links {
		all.Go(func() {
			group := comm.New(link)
			defer group.Close()
			x := make([]float32, 2*n)
			seconds := 0.0
			for i := range 6 { // both repeat equally often; the first touches the memory
				start := time.Now()
				if err := comm.AllGather(ctx, group, x, []int{0, n, 2 * n}); err != nil {
					failed[r] = err
					return
				}
				if s := max(time.Since(start).Seconds(), 1e-9); i == 1 || i > 1 && s < seconds {
					seconds = s
				}
			}
			if r == 0 {
				rate = 4 * n / seconds
			}
		})
	}
	all.Wait()
	for _, err := range failed {
		if err != nil {
			return 0, err
		}
	}
	return rate, nil
}
