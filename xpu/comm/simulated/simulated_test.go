package simulated_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"mula/xpu/comm"
	"mula/xpu/comm/simulated"
	"mula/xpu/comm/transporttest"
)

var (
	inside  = simulated.Link{Message: 1e-6, Rate: 1e9}
	between = simulated.Link{Message: 1e-5, Rate: 1e8, Delay: 3e-5}
)

// network returns hosts with the given numbers of ranks.
func network(hosts ...int) simulated.Network {
	n := simulated.Network{Inside: inside, Between: between}
	for host, ranks := range hosts {
		for range ranks {
			n.Hosts = append(n.Hosts, fmt.Sprint(host))
		}
	}
	return n
}

// run runs f on all ranks, and returns the world afterwards.
func run(t *testing.T, n simulated.Network, f func(ctx context.Context, c *comm.Comm) error) *simulated.World {
	t.Helper()
	w, hosts := simulated.New(n), n.Hosts
	var ranks sync.WaitGroup
	for rank := range hosts {
		ranks.Go(func() {
			c := comm.New(w.Transport(rank))
			c.SetHosts(hosts)
			if err := f(w.Context(t.Context(), rank), c); err != nil {
				t.Errorf("rank %d: %v", rank, err)
				c.Close()
			}
		})
	}
	ranks.Wait()
	return w
}

func TestTransport(t *testing.T) {
	for _, hosts := range [][]int{{1}, {1, 1}, {2, 1}, {2, 2}} {
		n := network(hosts...)
		w := simulated.New(n)
		var transports []comm.Transport
		for rank := range n.Hosts {
			transports = append(transports, w.Transport(rank))
		}
		transporttest.Together(t, transports)
	}
}

// cost is the time of a message of n bytes.
func cost(l simulated.Link, n float64) float64 { return l.Message + n/l.Rate }

func TestTimes(t *testing.T) {
	for _, test := range []struct {
		name  string
		hosts []int
		run   func(ctx context.Context, c *comm.Comm) error
		want  []float64 // of each rank
	}{
		{"the sender does not wait for the receiver", []int{1, 1}, func(ctx context.Context, c *comm.Comm) error {
			if c.Rank() == 0 {
				return comm.Send(ctx, c, 1, make([]byte, 500))
			}
			return comm.Recv(ctx, c, 0, make([]byte, 500))
		}, []float64{cost(between, 500), between.Delay + cost(between, 500)}},
		{"a message may arrive before it is expected", []int{2}, func(ctx context.Context, c *comm.Comm) error {
			if c.Rank() == 0 {
				return comm.Send(ctx, c, 1, make([]byte, 500))
			}
			simulated.Compute(ctx, 1)
			return comm.Recv(ctx, c, 0, make([]byte, 500))
		}, []float64{cost(inside, 500), 1}},
		{"a receiver waits for a slow sender", []int{2}, func(ctx context.Context, c *comm.Comm) error {
			if c.Rank() == 0 {
				simulated.Compute(ctx, 2)
				return comm.Send(ctx, c, 1, make([]byte, 500))
			}
			simulated.Compute(ctx, 1)
			return comm.Recv(ctx, c, 0, make([]byte, 500))
		}, []float64{2 + cost(inside, 500), 2 + cost(inside, 500)}},
		{"a receiver gets one message after another", []int{4}, func(ctx context.Context, c *comm.Comm) error {
			if c.Rank() > 0 {
				return comm.Send(ctx, c, 0, make([]byte, 500))
			}
			for from := 1; from < 4; from++ {
				if err := comm.Recv(ctx, c, from, make([]byte, 500)); err != nil {
					return err
				}
			}
			return nil
		}, []float64{3 * cost(inside, 500), cost(inside, 500), cost(inside, 500), cost(inside, 500)}},
		{"messages are received as they arrive", []int{3}, func(ctx context.Context, c *comm.Comm) error {
			if c.Rank() > 0 {
				simulated.Compute(ctx, float64(c.Rank()))
				return comm.Send(ctx, c, 0, make([]byte, 500))
			}
			return errors.Join(comm.Recv(ctx, c, 2, make([]byte, 500)), comm.Recv(ctx, c, 1, make([]byte, 500)))
		}, []float64{2 + cost(inside, 500), 1 + cost(inside, 500), 2 + cost(inside, 500)}},
		{"messages in both directions at once", []int{3}, func(ctx context.Context, c *comm.Comm) error {
			return comm.AllGather(ctx, c, make([]byte, 300), []int{0, 100, 200, 300})
		}, []float64{2 * cost(inside, 100), 2 * cost(inside, 100), 2 * cost(inside, 100)}},
		{"operations in the background", []int{2}, func(ctx context.Context, c *comm.Comm) error {
			var started []*comm.Pending
			for range 2 {
				started = append(started, c.Start(ctx, func(ctx context.Context) error {
					return comm.AllGather(ctx, c, make([]byte, 200), []int{0, 100, 200})
				}))
			}
			simulated.Compute(ctx, 1.5e-6)
			return errors.Join(started[0].Wait(), started[1].Wait())
		}, []float64{2 * cost(inside, 100), 2 * cost(inside, 100)}},
	} {
		w := run(t, network(test.hosts...), test.run)
		for rank, want := range test.want {
			if got := w.Time(rank); math.Abs(got-want) > 1e-12 {
				t.Errorf("%s: the time of rank %d is %g, want %g", test.name, rank, got, want)
			}
		}
	}
}

// The times of all ranks have the same bits in every run, whatever the order of the goroutines.
func TestTimesDoNotDependOnGoroutines(t *testing.T) {
	n := network(5, 12, 7, 12, 12)
	n.Noise, n.Seed = 0.5, 7
	times := func() (all []float64) {
		w := run(t, n, func(ctx context.Context, c *comm.Comm) error {
			part, err := c.Split(ctx, c.Rank()%3, 0)
			if err != nil {
				return err
			}
			for step := range 3 {
				simulated.Compute(ctx, float64(c.Rank()%5)*1e-5)
				for range rand.IntN(20) {
					runtime.Gosched()
				}
				pending := part.Start(ctx, func(ctx context.Context) error {
					return comm.AllReduce(ctx, part, make([]float32, 100*step+1))
				})
				if err := errors.Join(comm.AllReduce(ctx, c, make([]float32, 1000)), pending.Wait(),
					comm.Broadcast(ctx, c, step, make([]byte, 99)), c.Barrier(ctx)); err != nil {
					return err
				}
			}
			return nil
		})
		for rank := range n.Hosts {
			all = append(all, w.Time(rank))
		}
		return all
	}
	first, slowest := times(), 0.0
	for rank, again := range times() {
		slowest = max(slowest, again)
		if math.Float64bits(again) != math.Float64bits(first[rank]) {
			t.Errorf("the time of rank %d is %g, and %g in another run", rank, first[rank], again)
		}
	}
	n.Seed = 8
	if other := times(); other[0] == first[0] {
		t.Errorf("the time is %g with both seeds", other[0])
	}
	n.Noise = 0
	if quiet := times(); quiet[0] >= slowest {
		t.Errorf("the time is %g without noise, and %g with noise", quiet[0], slowest)
	}
}

// A rank counts the bytes of [comm.Comm.Traffic]. With equal hosts, an exchange of two levels sends
// one message to each other rank of the host and to each host.
func TestCounts(t *testing.T) {
	for _, hosts := range [][]int{{3, 3, 3, 3}, {4, 1, 3}} {
		n := network(hosts...)
		ranks, traffic := len(n.Hosts), make([][2]int64, len(n.Hosts))
		w := run(t, n, func(ctx context.Context, c *comm.Comm) error {
			err := errors.Join(comm.AllReduce(ctx, c, make([]int64, 5*ranks)),
				comm.Broadcast(ctx, c, 2, make([]byte, 9)))
			for _, each := range c.Traffic() {
				traffic[c.Rank()][0] += each.Inside
				traffic[c.Rank()][1] += each.Between
			}
			return err
		})
		var sent, received, sentBytes, receivedBytes int64
		for rank := range n.Hosts {
			c := w.Counts(rank)
			if got := [2]int64{c.BytesInside, c.BytesBetween}; got != traffic[rank] {
				t.Errorf("hosts %v: rank %d has counted %d bytes, its group %d", hosts, rank, got, traffic[rank])
			}
			sent, received = sent+c.MessagesInside+c.MessagesBetween, received+c.Received
			sentBytes, receivedBytes = sentBytes+c.BytesInside+c.BytesBetween, receivedBytes+c.ReceivedBytes
		}
		if sent != received || sentBytes != receivedBytes {
			t.Errorf("hosts %v: %d messages of %d bytes were sent, and %d of %d received", hosts, sent, sentBytes,
				received, receivedBytes)
		}
		// A reduction and a gather have a-1 messages of each rank inside its host, and b to or from
		// its relays; 6 ranks are their own relays. The broadcast has n-1 messages.
		const a, b = 3, 4
		if want := int64(2*(ranks*(a-1)+ranks*b-6) + ranks - 1); len(hosts) == b && sent != want {
			t.Errorf("hosts %v: %d messages, want %d", hosts, sent, want)
		}
	}
}

// In an exchange of two levels, ranks never wait for another rank that sends to the same rank: an
// all-reduce lasts as long as the messages of one rank, 2·(a-1+b) on b hosts of a ranks.
func TestMessagesDoNotCollide(t *testing.T) {
	for _, hosts := range [][]int{{4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}, {4, 4, 4, 4, 4, 4, 4, 4}} {
		n := network(hosts...)
		n.Inside, n.Between = simulated.Link{Message: 1, Rate: 1e12}, simulated.Link{Message: 1, Rate: 1e12}
		w := run(t, n, func(ctx context.Context, c *comm.Comm) error {
			return comm.AllReduce(ctx, c, make([]int64, 4*len(n.Hosts)))
		})
		last := 0.0
		for rank := range n.Hosts {
			last = max(last, w.Time(rank))
		}
		if want := float64(2 * (4 - 1 + len(hosts))); math.Round(last) > want+2 {
			t.Errorf("%d hosts: an all-reduce lasts %.2f messages, want %.0f", len(hosts), last, want)
		}
	}
}

func TestFailure(t *testing.T) {
	n := network(2, 2)
	n.Failures = []simulated.Failure{{Rank: 2, At: 3.5}}
	w := simulated.New(n)
	errs, steps := make([]error, 4), make([]int, 4)
	var ranks sync.WaitGroup
	for rank := range errs {
		ranks.Go(func() {
			ctx, transport := w.Context(t.Context(), rank), w.Transport(rank)
			part, err := transport.Split(ctx, 0, 0)
			for ; err == nil; steps[rank]++ {
				simulated.Compute(ctx, 1)
				err = part.Barrier(ctx)
			}
			errs[rank] = err
		})
	}
	ranks.Wait()
	for rank, err := range errs {
		if lost := errors.Is(err, comm.ErrPeerLost); lost == (rank == 2) || steps[rank] < 3 || steps[rank] > 4 {
			t.Errorf("rank %d ends in step %d: %v", rank, steps[rank], err)
		}
	}
}

// A group of many ranks needs little memory for each rank.
func TestMemory(t *testing.T) {
	const hosts, onHost, most = 128, 12, 20e3
	n := network()
	for rank := range hosts * onHost {
		n.Hosts = append(n.Hosts, fmt.Sprint(rank/onHost))
	}
	shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: hosts, comm.EP: onHost})
	placed := comm.NewHosts(n.Hosts)
	before := heap()
	meshes := make([]*comm.Mesh, len(n.Hosts))
	w := run(t, n, func(ctx context.Context, c *comm.Comm) (err error) {
		meshes[c.Rank()], err = comm.NewMesh(ctx, c, shape)
		if err == nil {
			meshes[c.Rank()].SetHosts(placed)
			err = comm.AllReduce(ctx, meshes[c.Rank()].Group(comm.Data), make([]int64, 100))
		}
		return err
	})
	if each := float64(heap()-before) / float64(len(n.Hosts)); each > most {
		t.Errorf("each of %d ranks keeps %.0f bytes, want at most %.0f", len(n.Hosts), each, most)
	}
	runtime.KeepAlive(w)
	runtime.KeepAlive(meshes)
}

// heap returns the number of bytes of live objects.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
