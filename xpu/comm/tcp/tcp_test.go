package tcp

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"mula/xpu/comm"
	"mula/xpu/comm/transporttest"
)

// joined returns the transports of a world on this machine, by rank.
func joined(t testing.TB, size int) []comm.Transport {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	transports := make([]comm.Transport, size)
	var ranks sync.WaitGroup
	for r := range size {
		ranks.Go(func() {
			o := Options{Address: listener.Addr().String(), Rank: r, Size: size, Secret: "s3cret"}
			var err error
			if r == 0 && size > 1 {
				transports[r], err = join(ctx, o, listener)
			} else {
				transports[r], err = Join(ctx, o)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	ranks.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return transports
}

func TestLinks(t *testing.T) {
	for size := 1; size <= 4; size++ {
		transporttest.Together(t, joined(t, size))
	}
}

// TestFailureDuringSplit lets a new group fail at one rank while the other ranks may still open it.
// The race detector must find nothing, and the calls of the other ranks must fail.
func TestFailureDuringSplit(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	ended, end := context.WithCancel(ctx)
	end()
	var ranks sync.WaitGroup
	for _, world := range joined(t, 3) {
		ranks.Go(func() {
			defer world.Close()
			for round := range 200 {
				group, err := world.Split(ctx, 0, world.Rank())
				if err != nil {
					t.Errorf("round %d, rank %d: split: %v", round, world.Rank(), err)
					return
				}
				calls, want := ctx, comm.ErrPeerLost
				if world.Rank() == 1 {
					calls, want = ended, context.Canceled
				}
				if err := group.Barrier(calls); !errors.Is(err, want) {
					t.Errorf("round %d, rank %d: the barrier returns %v, want %v", round, world.Rank(), err, want)
				}
				group.Close()
			}
		})
	}
	ranks.Wait()
}

func BenchmarkAllReduce(b *testing.B) { transporttest.Benchmark(b, joined(b, 2)) }
