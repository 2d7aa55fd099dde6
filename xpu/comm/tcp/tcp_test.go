package tcp

import (
	"context"
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

func BenchmarkAllReduce(b *testing.B) { transporttest.Benchmark(b, joined(b, 2)) }
