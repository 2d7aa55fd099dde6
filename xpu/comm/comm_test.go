package comm_test

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu/comm"
	"mula/xpu/comm/local"
)

// together runs f as every rank of a group, each a goroutine.
func together(t interface{ Errorf(string, ...any) }, size int, f func(ctx context.Context, c *comm.Comm) error) {
	var ranks sync.WaitGroup
	for r, transport := range local.New(size) {
		ranks.Go(func() {
			c := comm.New(transport)
			defer c.Close()
			if err := f(context.Background(), c); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
			c.Barrier(context.Background()) // so that no rank exits early
		})
	}
	ranks.Wait()
}

// bounds draws ascending bounds within n elements, for a size of ranks.
func bounds(t *rapid.T, name string, size, n int) []int {
	b := make([]int, size+1)
	for i := range b {
		b[i] = rapid.IntRange(0, n).Draw(t, name)
	}
	slices.Sort(b)
	return b
}

// Reductions over random parts have the bits of sums formed element by element, and count the bytes
// of the formula.
func TestReductions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 6).Draw(t, "size")
		size = rapid.SampledFrom([]int{size, size, 8, 12}).Draw(t, "larger size")
		divide := func(n int, name string) int {
			divisors := slices.DeleteFunc([]int{1, 2, 3, 4, 5, 6, 12}, func(d int) bool { return n%d != 0 })
			return rapid.SampledFrom(divisors).Draw(t, name)
		}
		inner := divide(size, "inner")
		outer := inner * divide(size/inner, "outer")
		hosts := make([]string, size)
		if rapid.Bool().Draw(t, "several hosts") {
			onHost := rapid.SampledFrom([]int{1, 2, 3, 4, 5, 6}).Draw(t, "ranks of a host")
			for r := range hosts {
				hosts[r] = fmt.Sprint(r / onHost)
			}
			if rapid.Bool().Draw(t, "any order") {
				hosts = rapid.Permutation(hosts).Draw(t, "hosts")
			}
		}
		n := rapid.IntRange(0, 5000).Draw(t, "elements")
		parts := bounds(t, "bounds", size, n)
		finite := rapid.Float64().Filter(func(v float64) bool { return !math.IsInf(v, 0) && math.Abs(v) < 1e300 })
		few := rapid.SliceOfN(finite, 7, 7).Draw(t, "values")
		term := func(rank, i int) float64 { return few[(i+3*rank)%len(few)] * float64(1+i%11) / float64(1+rank) }
		want := make([]float64, n)
		for i := range want {
			var sum func(first, n int, stages ...int) float64
			sum = func(first, n int, stages ...int) float64 {
				if n == 1 {
					return term(first, i)
				}
				total := sum(first, stages[0], stages[1:]...)
				for r := first + stages[0]; r < first+n; r += stages[0] {
					total += sum(r, stages[0], stages[1:]...)
				}
				return total
			}
			want[i] = sum(0, size, outer, inner, 1)
		}
		together(t, size, func(ctx context.Context, c *comm.Comm) error {
			c.SetInner(inner, outer)
			c.SetHosts(hosts)
			compare := func(what string, got []float64, lo, hi int) {
				for i := lo; i < hi; i++ {
					if math.Float64bits(got[i]) != math.Float64bits(want[i]) {
						t.Errorf("%s, rank %d, element %d: %v, not %v", what, c.Rank(), i, got[i], want[i])
						return
					}
				}
			}
			x, y := make([]float64, n), make([]float64, n)
			for i := range x {
				x[i] = term(c.Rank(), i)
			}
			copy(y, x)
			if err := comm.AllReduce(ctx, c, x); err != nil {
				return err
			}
			compare("all-reduce", x, 0, n)
			if err := comm.ReduceScatter(ctx, c, y, parts); err != nil {
				return err
			}
			compare("reduce-scatter", y, parts[c.Rank()], parts[c.Rank()+1])
			if err := comm.AllGather(ctx, c, y, parts); err != nil {
				return err
			}
			compare("all-gather", y, parts[0], parts[size])

			if slices.ContainsFunc(hosts, func(name string) bool { return name != "" }) {
				return nil // with two levels, package estimate tests the number of bytes
			}
			own := parts[c.Rank()+1] - parts[c.Rank()]
			even := n*(c.Rank()+1)/size - n*c.Rank()/size
			traffic := c.Traffic()
			for _, count := range []struct {
				operation comm.Operation
				elements  int
			}{
				{comm.OpReduceScatter, parts[size] - parts[0] - own},
				{comm.OpAllGather, own * (size - 1)},
				{comm.OpAllReduce, n - even + even*(size-1)},
			} {
				if got := traffic[count.operation]; got.Bytes() != int64(8*count.elements) || got.Calls != 1 {
					t.Errorf("%v, rank %d: %d bytes in %d calls, not %d in 1", count.operation, c.Rank(), got.Bytes(),
						got.Calls, 8*count.elements)
				}
			}
			return nil
		})
	})
}

// An all-to-all over random pieces is a transposition, and so is its own inverse.
func TestAllToAll(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 6).Draw(t, "size")
		lengths := rapid.SliceOfN(rapid.IntRange(0, 300), size*size, size*size).Draw(t, "lengths")
		hosts := make([]string, size)
		for r := range hosts {
			hosts[r] = rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "host")
		}
		together(t, size, func(ctx context.Context, c *comm.Comm) error {
			c.SetHosts(hosts)
			rank := c.Rank()
			out, in := make([]int, size+1), make([]int, size+1)
			for r := range size {
				out[r+1], in[r+1] = out[r]+lengths[rank*size+r], in[r]+lengths[r*size+rank]
			}
			send, recv, back := make([]uint32, out[size]), make([]uint32, in[size]), make([]uint32, out[size])
			for r := range size {
				for i := out[r]; i < out[r+1]; i++ {
					send[i] = uint32(rank<<24 | r<<16 | i - out[r])
				}
			}
			if err := comm.AllToAll(ctx, c, send, out, recv, in); err != nil {
				return err
			}
			for r := range size {
				for i := in[r]; i < in[r+1]; i++ {
					if want := uint32(r<<24 | rank<<16 | i - in[r]); recv[i] != want {
						t.Errorf("rank %d from %d: %x, not %x", rank, r, recv[i], want)
						return nil
					}
				}
			}
			if err := comm.AllToAll(ctx, c, recv, in, back, out); err != nil {
				return err
			}
			if !slices.Equal(back, send) {
				t.Errorf("rank %d: not what was sent comes back", rank)
			}
			return nil
		})
	})
}

// An exchange allocates nothing once its scratch is there.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	const rounds = 500
	var before, after runtime.MemStats
	together(t, 2, func(ctx context.Context, c *comm.Comm) error {
		x, parts := make([]float32, 1000), []int{0, 300, 1000}
		for i := range 10 + rounds {
			if i == 10 && c.Rank() == 0 {
				runtime.ReadMemStats(&before)
			}
			if err := comm.AllReduce(ctx, c, x); err != nil {
				return err
			}
			if err := comm.ReduceScatter(ctx, c, x, parts); err != nil {
				return err
			}
			if err := comm.AllGather(ctx, c, x, parts); err != nil {
				return err
			}
			if err := c.Barrier(ctx); err != nil {
				return err
			}
		}
		if c.Rank() == 0 {
			runtime.ReadMemStats(&after)
		}
		return nil
	})
	// Some belong to the runtime and to the testing package.
	if n := after.Mallocs - before.Mallocs; n > rounds/2 {
		t.Errorf("%d allocations in %d rounds", n, rounds)
	}
}

// The memory that a group keeps for sums equals SumMemory, for any length of the vectors.
func TestSumMemory(t *testing.T) {
	const n, ranks = 4 << 20, 2
	var before, after runtime.MemStats
	together(t, ranks, func(ctx context.Context, c *comm.Comm) error {
		x := make([]float32, n)
		if err := comm.AllReduce(ctx, c, x[:ranks]); err != nil {
			return err
		}
		if err := c.Barrier(ctx); err != nil {
			return err
		}
		if c.Rank() == 0 {
			runtime.ReadMemStats(&before)
		}
		if err := c.Barrier(ctx); err != nil {
			return err
		}
		if err := comm.AllReduce(ctx, c, x); err != nil {
			return err
		}
		if err := c.Barrier(ctx); err != nil {
			return err
		}
		if c.Rank() == 0 {
			runtime.ReadMemStats(&after)
		}
		return nil
	})
	want := uint64(ranks * comm.SumMemory(ranks, n/ranks, 4))
	if got := after.TotalAlloc - before.TotalAlloc; got < want || got > want+want/4 {
		t.Errorf("%d ranks allocate %d bytes for sums, SumMemory says %d", ranks, got, want)
	}
}

// The same with two levels, for equal parts.
func TestSumMemoryByHosts(t *testing.T) {
	const ranks, onHost = 6, 3
	for _, part := range []int{1, 1000, 300_000} {
		for _, partial := range []int{1, 3} {
			together(t, ranks, func(ctx context.Context, c *comm.Comm) error {
				c.SetInner(onHost / partial)
				c.SetHosts([]string{"a", "a", "a", "b", "b", "b"})
				if err := comm.AllReduce(ctx, c, make([]float32, ranks*part)); err != nil {
					return err
				}
				if got, want := c.SumMemory(), comm.SumMemoryByHosts(ranks, onHost, partial, part, 4); got != want {
					t.Errorf("parts of %d, %d partial sums: %d bytes for sums, SumMemoryByHosts says %d", part, partial,
						got, want)
				}
				return nil
			})
		}
	}
}

// A messageCounter counts the messages of a rank's all-to-alls.
type messageCounter struct {
	comm.Transport
	messages int
}

func (m *messageCounter) AllToAll(ctx context.Context, send, recv [][]byte) error {
	for r, data := range send {
		if r != m.Rank() && len(data) > 0 {
			m.messages++
		}
	}
	return m.Transport.AllToAll(ctx, send, recv)
}

// On b hosts of a ranks each, the busiest rank sends a-1 + b messages in each half of an
// all-reduce.
func TestMessagesByHosts(t *testing.T) {
	const hosts, onHost = 3, 4
	names := make([]string, hosts*onHost)
	for r := range names {
		names[r] = fmt.Sprint(r / onHost)
	}
	counts := make([]int, len(names))
	var ranks sync.WaitGroup
	for r, transport := range local.New(len(names)) {
		ranks.Go(func() {
			counter := &messageCounter{Transport: transport}
			c := comm.New(counter)
			defer c.Close()
			c.SetHosts(names)
			if err := comm.AllReduce(t.Context(), c, make([]float32, 100)); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
			counts[r] = counter.messages
			c.Barrier(t.Context()) // so that no rank exits early
		})
	}
	ranks.Wait()
	if got, want := slices.Max(counts), 2*(onHost-1+hosts); got != want {
		t.Errorf("the busiest rank sends %d messages, want %d; all ranks %v", got, want, counts)
	}
}

func TestCloseOfNil(t *testing.T) {
	var c *comm.Comm
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
