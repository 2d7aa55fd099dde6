package train

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"mula/moe"
	"mula/train/estimate"
	"mula/xpu"
)

// What an estimate is about is what the configuration says, defaults and the plan's length included.
func TestEstimateInput(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "layout: {dp: 2, ep: 4, optimizer: so, dispatch: allgather}\nrecompute: layers\nprecision: bf16\noptimizer: {name: lion}\n")
	in, err := c.EstimateInput(mustPlan(t, plan), estimate.Aurora)
	if err != nil {
		t.Fatal(err)
	}
	lion := estimate.Mula
	lion.State = 4
	want := estimate.Input{
		Model: "mula-nano", Config: in.Config, Trainer: lion, Precision: xpu.BF16, Machine: estimate.Aurora,
		Layout: estimate.Layout{DP: 2, EP: 4, PP: 1, Optimizer: estimate.SO, Dispatch: moe.AllGather, BatchSize: 8, MicroBatchSize: 8, SequenceLength: 16,
			Recompute: moe.RecomputeLayers},
	}
	if in != want || in.Config.HiddenSize != 64 {
		t.Errorf("%+v\nwant %+v", in, want)
	}
	if r, err := estimate.Compute(in); err != nil || r.Parameters != in.Config.TotalParameters() {
		t.Errorf("%+v, %v", r, err)
	}
	c.Steps = 1 << 40
	if _, err := c.EstimateInput(mustPlan(t, plan), estimate.Aurora); err == nil {
		t.Error("a configuration that its plan is too short for was taken")
	}
}

// The ranks of a run send what an estimate of it says, to the byte, by group and operation: gradients and weights of a model.
func TestEstimateIsWhatRanksSend(t *testing.T) {
	c, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	sizes := make([]int, len(c.Tensors()))
	for i, tensor := range c.Tensors() {
		sizes[i] = int(tensor.Elements())
	}
	for _, axes := range [][2]int{{4, 1}, {2, 2}, {1, 4}, {3, 2}} {
		for _, scheme := range []Scheme{Unsharded, SO, EPSO} {
			layout := LayoutConfig{DP: axes[0], EP: axes[1], PP: 1, TP: 1, Optimizer: scheme, Dispatch: moe.AllToAll}
			type kind struct {
				group     estimate.Group
				operation xpu.Operation
			}
			var mu sync.Mutex
			got := map[kind]int64{}
			together(t, layout.Ranks(), func(world *xpu.Comm) error {
				ctx := context.Background()
				groups, err := newRanks(ctx, world, layout)
				if err != nil {
					return err
				}
				defer groups.close()
				m, err := moe.NewParallel(c, device(t, 1), groups.parallel(layout))
				if err != nil {
					return err
				}
				s := newSharding(groups, scheme, false, device(t, 1), m.Parameters(), m.Buckets())
				o, err := newShardedOptimizer(ctx, defaultOptimizer(AdamW), 100, device(t, 1), m.Parameters(), sizes, s)
				if err != nil {
					return err
				}
				of := map[estimate.Group][]*xpu.Comm{estimate.Experts: {groups.experts, groups.within}, estimate.Replicas: {groups.replicas}, estimate.Data: {groups.data}}
				for _, group := range of {
					for _, comm := range group {
						comm.ResetTraffic()
					}
				}
				for b := range m.Buckets() {
					if err := s.reduce(ctx, b); err != nil {
						return err
					}
				}
				if _, err := o.GradientNorm(ctx); err != nil {
					return err
				}
				if err := o.Step(ctx, 1e-3, 1); err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				for name, group := range of {
					for _, comm := range group {
						for _, traffic := range comm.Traffic() {
							if traffic.Bytes != 0 {
								got[kind{name, traffic.Operation}] += traffic.Bytes
							}
						}
					}
				}
				return nil
			})
			l := estimate.Layout{DP: layout.DP, EP: layout.EP, PP: 1, Optimizer: estimate.Scheme(scheme), Dispatch: layout.Dispatch, BatchSize: layout.Ranks(), MicroBatchSize: 1,
				SequenceLength: 16, Recompute: moe.RecomputeNone}
			stages, err := estimate.Stages(c, l)
			if err != nil {
				t.Fatal(err)
			}
			want := map[kind]int64{}
			for _, e := range estimate.OptimizerTraffic(stages[0].Replicated, stages[0].Divided, l, estimate.Mula) {
				want[kind{e.Group, e.Operation}] += e.Total * int64(layout.Ranks()/e.Ranks)
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("dp %d, ep %d, %s: the ranks sent %v, the estimate says %v", layout.DP, layout.EP, scheme, got, want)
			}
		}
	}
}
