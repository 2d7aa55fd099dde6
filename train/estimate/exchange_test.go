package estimate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"mula/moe"
	"mula/train/group"
	"mula/train/record"
	"mula/train/votes"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
	"mula/xpu/cpu"
)

// A tap counts what goes through a link to other ranks, and what comes from them.
type tap struct {
	comm.Transport
	sent, received *atomic.Int64
}

func (t *tap) AllToAll(ctx context.Context, send, recv [][]byte) error {
	for r := range send {
		if r != t.Rank() {
			t.sent.Add(int64(len(send[r])))
			t.received.Add(int64(len(recv[r])))
		}
	}
	return t.Transport.AllToAll(ctx, send, recv)
}

func (t *tap) AllGather(ctx context.Context, own []byte, all [][]byte) error {
	for r := range all {
		if r != t.Rank() {
			t.sent.Add(int64(len(own)))
			t.received.Add(int64(len(all[r])))
		}
	}
	return t.Transport.AllGather(ctx, own, all)
}

func (t *tap) Broadcast(ctx context.Context, root int, data []byte) error {
	if t.Rank() == root {
		t.sent.Add(int64(len(data) * (t.Size() - 1)))
	} else {
		t.received.Add(int64(len(data)))
	}
	return t.Transport.Broadcast(ctx, root, data)
}

func (t *tap) Send(ctx context.Context, to int, data []byte) error {
	t.sent.Add(int64(len(data)))
	return t.Transport.Send(ctx, to, data)
}

func (t *tap) Recv(ctx context.Context, from int, data []byte) error {
	t.received.Add(int64(len(data)))
	return t.Transport.Recv(ctx, from, data)
}

func (t *tap) Split(ctx context.Context, color, key int) (comm.Transport, error) {
	part, err := t.Transport.Split(ctx, color, key)
	if part == nil {
		return nil, err
	}
	return &tap{part, t.sent, t.received}, err
}

// run calls f on every rank of a world, and returns the bytes that all ranks have sent by each
// operation in the groups that f returns. The ranks must have received as many bytes.
func run(t interface{ Fatal(...any) }, ranks int,
	f func(ctx context.Context, world *comm.Comm) (*comm.Comm, error)) map[comm.Operation]int64 {
	var sent, received atomic.Int64
	links := local.New(ranks)
	worlds, comms := make([]*comm.Comm, ranks), make([]*comm.Comm, ranks)
	errs := make([]error, ranks)
	var all sync.WaitGroup
	for r, link := range links {
		worlds[r] = comm.New(&tap{link, &sent, &received})
		all.Go(func() {
			if comms[r], errs[r] = f(context.Background(), worlds[r]); errs[r] != nil {
				worlds[r].Close() // so that the others do not wait
			}
		})
	}
	all.Wait()
	counts := map[comm.Operation]int64{}
	total := int64(0)
	for r, c := range comms {
		if errs[r] != nil {
			t.Fatal(r, errs[r])
		}
		for _, traffic := range c.Traffic() {
			counts[traffic.Operation] += traffic.Bytes()
			total += traffic.Bytes()
		}
		worlds[r].Close()
	}
	if total != sent.Load() || sent.Load() != received.Load() {
		t.Fatal(fmt.Sprintf("%d bytes are counted, %d were sent, %d received", total, sent.Load(), received.Load()))
	}
	return counts
}

// Ranks that do what the formulas are about send what they say, to the byte, and receive as much,
// however the shards are cut.
func TestOptimizerTrafficIsCounted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dp, ep := rapid.IntRange(1, 4).Draw(t, "dp"), rapid.IntRange(1, 4).Draw(t, "ep")
		l := Layout{Shape: shape(dp, ep, 1), Optimizer: rapid.SampledFrom([]Scheme{Unsharded, SO, EPSO}).Draw(t,
			"scheme")}
		replicated, divided := rapid.IntRange(0, 300).Draw(t, "replicated"), rapid.IntRange(0, 300).Draw(t, "divided")
		for _, e := range OptimizerTraffic(Stage{Replicated: int64(replicated), Divided: int64(divided)}, l, Mula) {
			n := replicated
			switch {
			case e.Group == comm.Replicas && l.Optimizer == SO:
				n += divided
			case e.Group == comm.Replicas:
				n = divided
			}
			bounds := make([]int, e.Ranks+1) // shards of any size
			for i := 1; i < e.Ranks; i++ {
				bounds[i] = rapid.IntRange(bounds[i-1], n).Draw(t, "bound")
			}
			bounds[e.Ranks] = n
			counts := run(t, e.Ranks, func(ctx context.Context, c *comm.Comm) (*comm.Comm, error) {
				x := make([]float32, n)
				switch e.Operation {
				case comm.OpAllReduce:
					return c, comm.AllReduce(ctx, c, x)
				case comm.OpReduceScatter:
					return c, comm.ReduceScatter(ctx, c, x, bounds)
				}
				return c, comm.AllGather(ctx, c, x, bounds)
			})
			if counts[e.Operation] != e.Total {
				t.Fatalf("dp %d, ep %d, %s: %+v, but %d bytes were sent", dp, ep, l.Optimizer, e, counts[e.Operation])
			}
			if l.Size(e.Group) != e.Ranks {
				t.Fatalf("%+v: the group has %d ranks", e, l.Size(e.Group))
			}
		}
	})
}

// Exchanges of two levels send the bytes of twoLevelBytes inside hosts and between them, for even
// and uneven hosts, parts of any size, and all partial sums.
func TestTwoLevelsAreCounted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		hosts := rapid.SampledFrom([][]int{{2, 2}, {4, 4, 4}, {3, 3, 3, 3}, {4, 2}, {1, 3, 2}, {5, 1}, {2, 6, 4}, {4},
			{1, 1, 1}}).Draw(t, "hosts")
		stage := rapid.SampledFrom([]int{1, 2, 3, 4}).Draw(t, "stage")
		n := 0
		var names []string
		partial := stage
		for host, a := range hosts {
			n += a
			if a%stage != 0 {
				partial = 1
			}
			for range a {
				names = append(names, fmt.Sprint(host))
			}
		}
		if n%stage != 0 {
			stage, partial = 1, 1
		}
		x := rapid.IntRange(0, 300).Draw(t, "elements")
		bounds := make([]int, n+1)
		for r := 1; r < n; r++ {
			bounds[r] = rapid.IntRange(bounds[r-1], x).Draw(t, "bound")
		}
		bounds[n] = x
		parts, even := make([]int64, n), make([]int64, n)
		for r := range n {
			parts[r], even[r] = 4*int64(bounds[r+1]-bounds[r]), 4*int64(x*(r+1)/n-x*r/n)
		}
		comms := make([]*comm.Comm, n)
		run(t, n, func(ctx context.Context, c *comm.Comm) (*comm.Comm, error) {
			c.SetInner(stage)
			c.SetHosts(names)
			comms[c.Rank()] = c
			out, in := make([]int, n+1), make([]int, n+1) // each rank gets its part from each other rank
			for r := range n {
				out[r+1], in[r+1] = out[r]+bounds[r+1]-bounds[r], in[r]+bounds[c.Rank()+1]-bounds[c.Rank()]
				if r == c.Rank() {
					out[r+1], in[r+1] = out[r], in[r]
				}
			}
			send, recv, sums := make([]float32, out[n]), make([]float32, in[n]), make([]float32, x)
			return c, errors.Join(comm.AllToAll(ctx, c, send, out, recv, in), comm.ReduceScatter(ctx, c, sums, bounds),
				comm.AllGather(ctx, c, sums, bounds), comm.AllReduce(ctx, c, sums),
				comm.Broadcast(ctx, c, n/2, sums))
		})
		for _, o := range []comm.Operation{comm.OpAllToAll, comm.OpReduceScatter, comm.OpAllGather, comm.OpAllReduce,
			comm.OpBroadcast} {
			of := parts
			switch o {
			case comm.OpAllReduce:
				of = even
			case comm.OpBroadcast:
				of = []int64{4 * int64(x)}
			}
			inside, between := twoLevelBytes(o, hosts, partial, of)
			var got comm.Traffic
			for _, c := range comms {
				traffic := c.Traffic()[o]
				got.Inside, got.Between = got.Inside+traffic.Inside, got.Between+traffic.Between
			}
			if got.Inside != inside || got.Between != between {
				t.Errorf("%s, hosts %v, stages of %d: %d bytes inside and %d between hosts, the formula says %d and %d",
					o, hosts, stage, got.Inside, got.Between, inside, between)
			}
		}
	})
}

// A model whose ranks share the experts sends what the formulas say: with all-gather to the byte,
// with all-to-all about as much, because its router does not choose quite evenly.
func TestDispatchTrafficIsCounted(t *testing.T) {
	nano, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	layers := nano
	layers.Architecture, layers.Layers, layers.DenseSize = moe.Qwen3MoE, 4, 64
	first, last := layers, layers
	first.DenseLayers, last.DenseLayers = "0-1", "1,3"
	for _, c := range []moe.Config{nano, first, last} {
		dispatchIsCounted(t, c)
	}
}

func dispatchIsCounted(t *testing.T, c moe.Config) {
	t.Helper()
	const rows, length, micro = 2, 64, 2
	for _, dispatch := range []moe.Dispatch{moe.AllGather, moe.AllToAll} {
		for _, recompute := range []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers} {
			for _, ep := range []int{2, 4} {
				l := Layout{Shape: shape(1, ep, 1), Optimizer: EPSO, Dispatch: dispatch, BatchSize: ep * rows * micro,
					MicroBatchSize: rows, SequenceLength: length, Recompute: recompute}
				counts := run(t, ep, func(ctx context.Context, world *comm.Comm) (*comm.Comm, error) {
					device := cpu.New(1, xpu.FP32)
					defer device.Close()
					mesh, err := comm.NewMesh(ctx, world, l.Shape)
					if err != nil {
						return nil, err
					}
					m, err := moe.NewParallel(c, device, moe.Parallel{Mesh: mesh, Dispatch: dispatch})
					if err != nil {
						return nil, err
					}
					m.Init(1)
					m.SetRecompute(recompute)
					for i := range micro {
						tokens := make([]uint32, rows*(length+1))
						for t := range tokens {
							tokens[t] = uint32((t*7919 + i*31 + world.Rank()*104729) % c.VocabSize)
						}
						if _, err := m.Backward(ctx, moe.Batch{Rows: rows, SequenceLength: length, Tokens: tokens},
							moe.BackwardOptions{Targets: int64(ep * rows * micro * length)}); err != nil {
							return nil, err
						}
					}
					return mesh.Group(comm.EP), nil
				})
				for _, e := range dispatchTraffic(c, 0, l, Mula) {
					got := counts[e.Operation]
					name := fmt.Sprintf("dense layers %q, ep %d, %s, recompute %s, %s", c.DenseLayers, ep, dispatch,
						recompute, e.Name)
					if dispatch == moe.AllGather && got != e.Total {
						t.Errorf("%s: %d bytes were sent, the formula says %d", name, got, e.Total)
					}
					if ratio := float64(got) / float64(e.Total); math.Abs(ratio-1) > 0.1 {
						t.Errorf("%s: %d bytes were sent, the formula says %d", name, got, e.Total)
					}
					delete(counts, e.Operation)
				}
				for o, n := range counts {
					if n != 0 {
						t.Errorf("ep %d, %s, recompute %s: %d bytes by %s, of which no formula knows", ep, dispatch,
							recompute, n, o)
					}
				}
			}
		}
	}
}

// Ranks that share sequences send the bytes of the formula in the attention.
func TestSequenceTrafficIsCounted(t *testing.T) {
	const rows, length, micro = 2, 24, 2
	experts, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	dense := experts
	dense.Architecture, dense.Experts, dense.ExpertsPerToken, dense.KVHeads, dense.RouterAuxLossCoef = moe.Llama, 0, 0,
		2, 0
	one := dense
	one.KVHeads = 1
	for _, test := range []struct {
		c  moe.Config
		cp int
	}{{experts, 2}, {experts, 4}, {dense, 2}, {dense, 4}, {one, 2}, {one, 4}} {
		for _, recompute := range []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers} {
			l := Layout{Shape: shape(4, 1, 1), Optimizer: EPSO, Dispatch: moe.AllToAll, SequenceRanks: test.cp,
				BatchSize:      4 / test.cp * rows * micro,
				MicroBatchSize: rows, SequenceLength: length, Recompute: recompute}
			counts := run(t, 4, func(ctx context.Context, world *comm.Comm) (*comm.Comm, error) {
				device := cpu.New(1, xpu.FP32)
				defer device.Close()
				mesh, err := comm.NewMesh(ctx, world, l.Shape)
				if err != nil {
					return nil, err
				}
				sequence, err := mesh.Consecutive(ctx, comm.Data, test.cp)
				if err != nil {
					return nil, err
				}
				m, err := moe.NewParallel(test.c, device, moe.Parallel{Mesh: mesh, Sequence: sequence})
				if err != nil {
					return nil, err
				}
				m.SetRecompute(recompute)
				for range micro {
					if _, err := m.Backward(ctx, moe.Batch{Rows: rows, SequenceLength: length,
						Tokens: make([]uint32, rows*(length+1))}, moe.BackwardOptions{}); err != nil {
						return nil, err
					}
				}
				return sequence, nil
			})
			stages, err := Stages(test.c, l)
			if err != nil {
				t.Fatal(err)
			}
			e := sequenceTraffic(test.c, 0, stages[0], l, Mula)[0] // without the losses, which package train sends
			if got, want := counts[comm.OpAllToAll], e.Total*int64(4/test.cp); got != want {
				t.Errorf("cp %d, %d key heads, recompute %s: %d bytes were sent, the formula says %d", test.cp,
					test.c.KVHeads, recompute, got, want)
			}
		}
	}
}

// Ranks that share matrices send the bytes of the formula.
func TestTensorTrafficIsCounted(t *testing.T) {
	const rows, length, micro = 2, 8, 2
	experts, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	wide := experts // norms over all heads
	experts.Architecture = moe.Qwen3MoE
	dense := experts
	dense.Architecture, dense.Experts, dense.ExpertsPerToken, dense.RouterAuxLossCoef = moe.Llama, 0, 0, 0
	deepSeek := experts
	deepSeek.Architecture, deepSeek.KVHeads, deepSeek.HeadSize = moe.DeepSeekV3, deepSeek.Heads, 0
	deepSeek.KVRank, deepSeek.PlainSize, deepSeek.RotatedSize, deepSeek.ValueSize = 24, 6, 4, 8
	deepSeek.RopeInterleave, deepSeek.Groups, deepSeek.TopGroups, deepSeek.RoutingScale = true, 4, 2, 2.5
	deepSeek.SharedSize, deepSeek.DenseLayers, deepSeek.DenseSize = 2*deepSeek.IntermediateSize, "0", 40
	deepSeek.RouterAuxLossCoef = 0
	gate := experts
	gate.Architecture, gate.SharedSize = moe.Qwen2MoE, 64
	latents := deepSeek
	latents.QueryRank = 16
	for _, test := range []struct {
		c  moe.Config
		tp int
	}{{experts, 2}, {dense, 2}, {dense, 4}, {deepSeek, 2}, {latents, 2}, {wide, 4},
		{gate, 2}} {
		for _, recompute := range []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers} {
			l := Layout{Shape: shape(1, 1, 1).With(comm.TP, test.tp), Optimizer: EPSO, Dispatch: moe.AllToAll,
				BatchSize: rows * micro, MicroBatchSize: rows, SequenceLength: length, Recompute: recompute}
			counts := run(t, test.tp, func(ctx context.Context, world *comm.Comm) (*comm.Comm, error) {
				device := cpu.New(1, xpu.FP32)
				defer device.Close()
				mesh, err := comm.NewMesh(ctx, world, l.Shape)
				if err != nil {
					return nil, err
				}
				sequence, err := mesh.Split(ctx, comm.Data)
				if err != nil {
					return nil, err
				}
				m, err := moe.NewParallel(test.c, device, moe.Parallel{Mesh: mesh, Sequence: sequence,
					Heads: comm.NewSingle()})
				if err != nil {
					return nil, err
				}
				m.SetRecompute(recompute)
				for range micro {
					if _, err := m.Backward(ctx, moe.Batch{Rows: rows, SequenceLength: length,
						Tokens: make([]uint32, rows*(length+1))}, moe.BackwardOptions{}); err != nil {
						return nil, err
					}
				}
				return mesh.Group(comm.TP), nil
			})
			if _, err := Stages(test.c, l); err != nil {
				t.Fatal(err)
			}
			for _, e := range tensorTraffic(test.c, 0, l, Mula) {
				if got := counts[e.Operation]; got != e.Total || got == 0 {
					t.Errorf("tp %d, %d experts, recompute %s, %s: %d bytes were sent, the formula says %d", test.tp,
						test.c.Experts, recompute, e.Name, got, e.Total)
				}
			}
		}
	}
}

// Every rank receives the bytes of the formula for votes, for several numbers of ranks, on one host
// and on several.
func TestVotesReceived(t *testing.T) {
	for _, test := range []struct{ dp, pp, ep, perHost, virtual int }{{2, 1, 1, 0, 1}, {5, 1, 2, 0, 1},
		{4, 3, 1, 0, 1}, {4, 2, 2, 4, 1}, {6, 2, 3, 6, 1}, {12, 1, 1, 4, 1}, {8, 1, 4, 4, 1}, {4, 2, 1, 0, 2}} {
		c := moe.Config{Architecture: moe.OLMoE, Layers: 5, Experts: 9}
		if test.virtual > 1 {
			c.DenseLayers = "1"
		}
		l := Layout{Shape: shape(test.dp, test.ep, test.pp), ReduceNorm: true, SequenceLength: 8, Sources: 3,
			perHost: test.perHost, VirtualStages: test.virtual}
		l.BatchSize = 2 * l.DataRanks()
		n := l.Ranks()
		var hosts []string
		for rank := range n {
			host := "one"
			if l.perHost > 0 {
				host = fmt.Sprint(rank / l.perHost)
			}
			hosts = append(hosts, host)
		}
		shared := comm.NewHosts(hosts)
		received, errs := make([]atomic.Int64, n), make([]error, n)
		var sent atomic.Int64
		var all sync.WaitGroup
		for rank, link := range local.New(n) {
			all.Go(func() {
				ctx := context.Background()
				world := comm.New(&tap{link, &sent, &received[rank]})
				defer world.Close()
				g, err := group.New(ctx, world, l.Shape, group.Options{Hosts: shared})
				if err != nil {
					errs[rank] = err
					return
				}
				defer g.Close()
				v := votes.New(g, c, l.VirtualStages, l.BatchSize, l.Sources)
				m := record.StepMetrics{Tokens: int64(l.BatchSize * l.SequenceLength)}
				before := received[rank].Load()
				err = v.Exchange(ctx, &m, votes.Own{Tensor: -1})
				for range 2 {
					_, sumErr := g.Sum(ctx, 1)
					err = errors.Join(err, sumErr)
				}
				err = errors.Join(err, comm.AllReduce(ctx, world, make([]int64, exactSum/8)))
				if got, want := received[rank].Load()-before, votesReceived(c, l, Mula, rank); got != want {
					err = errors.Join(err, fmt.Errorf("%d bytes received, the formula says %d", got, want))
				}
				errs[rank] = errors.Join(err, world.Barrier(ctx))
			})
		}
		all.Wait()
		for rank, err := range errs {
			if err != nil {
				t.Errorf("%+v: rank %d: %v", test, rank, err)
			}
		}
	}
}

// In a step of the largest Mula model on 12,288 ranks, no rank receives more than 64 kB of votes.
func TestVotesAreSmall(t *testing.T) {
	r, err := Compute(Input{Config: preset(t, "mula-220b-a10b"), Trainer: Mula, Precision: xpu.BF16, Machine: Aurora,
		Layout: Layout{Shape: shape(128, 12, 8), Optimizer: EPSO, Dispatch: moe.AllToAll, ReduceNorm: true,
			BatchSize: 12288, MicroBatchSize: 1, SequenceLength: 2048, Recompute: moe.RecomputeNone}})
	if err != nil || r.Received == 0 || r.Received > 64000 {
		t.Errorf("%d bytes received, %v", r.Received, err)
	}
}
