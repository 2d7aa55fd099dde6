package comm_test

import (
	"testing"

	"mula/internal/alloctest"
	"mula/xpu/comm"
	"mula/xpu/comm/transporttest"
)

func TestSingle(t *testing.T) {
	transporttest.Together(t, []comm.Transport{comm.NewSingleTransport()})
}

// TestSingleAllocations: the communicators of a run of one rank add no allocation to a step.
func TestSingleAllocations(t *testing.T) {
	world, ctx := comm.NewSingle(), t.Context()
	defer world.Close()
	x, bounds := []float32{1, 2, 3}, []int{0, 3}
	for name, operation := range map[string]func() error{
		"all-reduce":     func() error { return comm.AllReduce(ctx, world, x) },
		"reduce-scatter": func() error { return comm.ReduceScatter(ctx, world, x, bounds) },
		"all-gather":     func() error { return comm.AllGather(ctx, world, x, bounds) },
		"broadcast":      func() error { return comm.Broadcast(ctx, world, 0, x) },
		"barrier":        func() error { return world.Barrier(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			var failed error
			n := alloctest.Least(func() {
				if err := operation(); err != nil {
					failed = err
				}
			})
			if failed != nil || n != 0 {
				t.Errorf("%v allocations, error %v; want none", n, failed)
			}
		})
	}
	if world.SumMemory() != 0 || x[0] != 1 || x[2] != 3 {
		t.Errorf("the sums of one rank are %v, and need %d bytes", x, world.SumMemory())
	}
}
