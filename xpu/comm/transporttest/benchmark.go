package transporttest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"mula/xpu/comm"
)

// Sizes are the sizes, in bytes, for which sums are timed.
var Sizes = []int{1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20}

// SizeName formats a size for the name of a benchmark.
func SizeName(bytes int) string {
	if bytes >= 1<<20 {
		return fmt.Sprintf("%dMB", bytes>>20)
	}
	return fmt.Sprintf("%dKB", bytes>>10)
}

// Benchmark times all-reduces of float32 between transports used by goroutines of this process.
func Benchmark(b *testing.B, transports []comm.Transport) {
	for _, size := range Sizes {
		b.Run(SizeName(size), func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			var ranks sync.WaitGroup
			for _, transport := range transports {
				ranks.Go(func() {
					c, x := comm.New(transport), make([]float32, size/4)
					for i := range 1 + b.N {
						if i == 1 && transport.Rank() == 0 {
							b.ResetTimer() // scratch memory is allocated now
						}
						if err := comm.AllReduce(context.Background(), c, x); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			ranks.Wait()
		})
	}
}

// Measure returns the median time of an all-reduce of float32; this process is one rank of the
// group.
func Measure(ctx context.Context, transport comm.Transport, bytes int, fast bool) (time.Duration, error) {
	part, err := transport.Split(ctx, 0, transport.Rank())
	if err != nil {
		return 0, err
	}
	c, x := comm.New(part), make([]float32, bytes/4)
	c.SetFast(fast)
	inner := max(1, min(200, (4<<20)/bytes))
	var times []time.Duration
	for round := range 10 {
		if err := c.Barrier(ctx); err != nil {
			return 0, err
		}
		start := time.Now()
		for range inner {
			if err := comm.AllReduce(ctx, c, x); err != nil {
				return 0, err
			}
		}
		if round > 0 { // the first round allocates scratch memory
			times = append(times, time.Since(start)/time.Duration(inner))
		}
	}
	slices.Sort(times)
	return times[len(times)/2], c.Close()
}
