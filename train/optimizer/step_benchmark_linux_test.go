package optimizer

import (
	"context"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"mula/moe"
	"mula/train/estimate"
	"mula/train/optimizer/optimizertest"
	"mula/xpu"
	"mula/xpu/comm"
)

// BenchmarkOptimizerStep compares EPSO with SO on a model most of whose weights are not of experts:
// CPU time of all ranks, which are goroutines, by part of the step that follows the backward pass,
// alternating within one run. Next to the ratios SO / EPSO are the ratios of the estimates: updated
// weights, 1 + (EP-1)·f, and sent bytes.
func BenchmarkOptimizerStep(b *testing.B) {
	c, err := moe.Preset("mula-nano")
	if err != nil {
		b.Fatal(err)
	}
	c.VocabSize, c.HiddenSize, c.Heads, c.KVHeads, c.IntermediateSize = 8192, 256, 4, 4, 128
	sizes := make([]int, len(c.Tensors()))
	for i, tensor := range c.Tensors() {
		sizes[i] = int(tensor.Elements())
	}
	for _, ep := range []int{2, 4} {
		ranks := 2 * ep
		b.Run(fmt.Sprintf("dp=2,ep=%d", ep), func(b *testing.B) {
			const reduced, updated, gathered = 0, 1, 2
			var seconds [2][3]float64 // of SO and EPSO, by part
			both := []estimate.Scheme{estimate.SO, estimate.EPSO}
			optimizertest.Together(b, ranks, func(world *comm.Comm) error {
				ctx := context.Background()
				groups, nested, err := groupsOf(ctx, world, 2, ep)
				if err != nil {
					return err
				}
				defer groups.Close()
				m, err := moe.NewParallel(c, device(b, 1), moe.Parallel{Mesh: groups, Dispatch: moe.AllToAll})
				if err != nil {
					return err
				}
				m.Init(1)
				shardings, optimizers := make([]*Sharding, len(both)), make([]*Optimizer, len(both))
				for i, scheme := range both {
					shardings[i] = NewSharding(groups, nested, scheme, false, xpu.Float32, device(b, 1), m.Parameters(),
						m.Buckets())
					optimizers[i], err = NewSharded(ctx, defaultOptimizer(AdamW), 100, device(b, 1),
						m.Parameters(), sizes, shardings[i])
					if err != nil {
						return err
					}
				}
				var last float64
				lap := func(to *float64) error { // what all ranks have done since the last call
					if err := world.Barrier(ctx); err != nil {
						return err
					}
					if world.Rank() == 0 {
						var now unix.Timespec
						if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &now); err != nil {
							return err
						}
						t := float64(now.Nano()) / 1e9
						if to != nil {
							*to += t - last
						}
						last = t
					}
					return world.Barrier(ctx)
				}
				for round := range b.N + 1 { // the first finds its memory untouched
					for turn := range both {
						i := (turn + round) % len(both)
						s, o, part := shardings[i], optimizers[i], &seconds[i]
						if round == 0 {
							part = new([3]float64)
						}
						for _, p := range m.Parameters() {
							for j := range p.Grad.Floats() {
								p.Grad.Floats()[j] = float32(j%7-3) * 1e-3
							}
						}
						if err := lap(nil); err != nil {
							return err
						}
						for bucket := range m.Buckets() {
							if err := s.Reduce(ctx, bucket, s.device.Transfers()); err != nil {
								return err
							}
						}
						if err := lap(&part[reduced]); err != nil {
							return err
						}
						if err := o.update(ctx, 1e-4, 1); err != nil {
							return err
						}
						if err := lap(&part[updated]); err != nil {
							return err
						}
						if err := s.gatherWeights(ctx); err != nil {
							return err
						}
						if err := lap(&part[gathered]); err != nil {
							return err
						}
					}
				}
				return nil
			})

			predicted := func(scheme estimate.Scheme) (elements, bytes float64) {
				shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 2, comm.PP: 1, comm.EP: ep})
				l := estimate.Layout{Shape: shape, Optimizer: scheme,
					Dispatch: moe.AllToAll, BatchSize: ranks, MicroBatchSize: 1,
					SequenceLength: 16, Recompute: moe.RecomputeNone}
				stages, err := estimate.Stages(c, l)
				if err != nil {
					b.Fatal(err)
				}
				for _, e := range estimate.OptimizerTraffic(stages[0], l, estimate.Mula) {
					bytes += e.PerRank()
				}
				return estimate.Stepped(stages[0], l), bytes
			}
			soElements, soBytes := predicted(estimate.SO)
			epsoElements, epsoBytes := predicted(estimate.EPSO)
			so, epso := seconds[0], seconds[1]
			rounds := float64(b.N) * 1e-3
			b.ReportMetric(0, "ns/op") // of both schemes together, and by the wall: no use here
			b.ReportMetric(so[updated]/rounds, "so-update-cpu-ms")
			b.ReportMetric(epso[updated]/rounds, "epso-update-cpu-ms")
			b.ReportMetric(so[updated]/epso[updated], "update-ratio")
			b.ReportMetric(soElements/epsoElements, "update-ratio-predicted")
			b.ReportMetric((so[reduced]+so[gathered])/rounds, "so-exchange-cpu-ms")
			b.ReportMetric((epso[reduced]+epso[gathered])/rounds, "epso-exchange-cpu-ms")
			b.ReportMetric((so[reduced]+so[gathered])/(epso[reduced]+epso[gathered]), "exchange-ratio")
			b.ReportMetric(soBytes/epsoBytes, "exchange-ratio-predicted")
			b.ReportMetric((so[reduced]+so[updated]+so[gathered])/(epso[reduced]+epso[updated]+epso[gathered]),
				"step-ratio")
		})
	}
}
