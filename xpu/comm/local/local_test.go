package local_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"mula/xpu/comm"
	"mula/xpu/comm/local"
	"mula/xpu/comm/transporttest"
)

func TestLinks(t *testing.T) {
	for size := 1; size <= 4; size++ {
		transporttest.Together(t, local.New(size))
	}
}

// A rank that gives up in the middle of an exchange has its buffers for itself when the call
// returns, although others were copying from them: the race detector sees it otherwise.
func TestGiveUp(t *testing.T) {
	const size, rounds, large, small = 3, 40, 1 << 20, 16
	random := rand.New(rand.NewPCG(1, 2))
	// Rank 0 has its own share soon, and waits for the others to take theirs.
	content, other := bytes.Repeat([]byte{1}, large), make([]byte, large)
	send, recv := make([][][]byte, size), make([][][]byte, size)
	for rank := range size {
		send[rank], recv[rank] = make([][]byte, size), make([][]byte, size)
		for r := range size {
			send[rank][r], recv[rank][r] = make([]byte, small), make([]byte, small)
		}
		if rank > 0 {
			send[0][rank], recv[rank][0] = make([]byte, large), make([]byte, large)
		}
	}
	lost := 0
	for round := range rounds {
		transports := local.New(size)
		ctx, cancel := context.WithCancel(t.Context())
		wait := time.Duration(random.Int64N(int64(2 * time.Millisecond)))
		var wg sync.WaitGroup
		for rank, transport := range transports {
			wg.Go(func() {
				defer transport.Close()
				own := t.Context()
				if rank == 0 {
					for r := 1; r < size; r++ {
						copy(send[0][r], content)
					}
					own = ctx
				}
				if err := transport.Barrier(t.Context()); err != nil {
					t.Error(err)
				}
				if rank == 0 {
					time.AfterFunc(wait, cancel)
				}
				err := transport.AllToAll(own, send[rank], recv[rank])
				switch {
				case rank == 0:
					if err != nil {
						lost++
					}
					for r := 1; r < size; r++ {
						copy(send[0][r], other) // the race detector does not see clear
					}
				case err == nil && !bytes.Equal(recv[rank][0], content):
					t.Errorf("round %d: rank %d got what rank 0 wrote after it had given up", round, rank)
				case err != nil && !errors.Is(err, comm.ErrPeerLost):
					t.Errorf("round %d: rank %d: %v", round, rank, err)
				}
			})
		}
		wg.Wait()
		cancel()
	}
	t.Logf("rank 0 gave up in %d of %d exchanges", lost, rounds)
}

func BenchmarkAllReduce(b *testing.B) { transporttest.Benchmark(b, local.New(2)) }
