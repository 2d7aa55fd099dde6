package train

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/train/estimate"
	"mula/train/group"
	"mula/train/optimizer"
	"mula/train/optimizer/optimizertest"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// An estimate uses the configuration, with its defaults and the plan's length.
func TestEstimateInput(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan,
		"layout: {expert_dp: 2, ep: 4, optimizer: so, dispatch: allgather}\nrecompute: layers\nprecision: "+
			"bf16\noptimizer: "+
			"{name: lion}\n")
	in, err := c.EstimateInput(mustPlan(t, plan), estimate.Aurora)
	if err != nil {
		t.Fatal(err)
	}
	lion := estimate.Mula
	lion.State, lion.MomentBytes = 4, 4
	want := estimate.Input{
		Model: "mula-nano", Config: in.Config, Trainer: lion, Precision: xpu.BF16, Machine: estimate.Aurora,
		Layout: estimate.Layout{Shape: LayoutConfig{DP: 2, EP: 4, PP: 1}.shape(), Optimizer: estimate.SO,
			Dispatch: moe.AllGather, SumReplicas: 1, SequenceRanks: 1, VirtualStages: 1, BatchSize: 8,
			MicroBatchSize: 8, SequenceLength: 16,
			Recompute: moe.RecomputeLayers, Activations: xpu.Float32, Sources: len(mustPlan(t, plan).Sources)},
	}
	in.Trainer.TensorState = nil // a function
	if !reflect.DeepEqual(in, want) || in.Config.HiddenSize != 64 {
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

// The ranks of a run send what an estimate of it says, to the byte, by group and operation:
// gradients and weights of a model.
func TestEstimateIsWhatRanksSend(t *testing.T) {
	c, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	sizes := make([]int, len(c.Tensors()))
	for i, tensor := range c.Tensors() {
		sizes[i] = int(tensor.Elements())
	}
	for i, axes := range [][2]int{{4, 1}, {2, 2}, {1, 4}, {3, 2}, {4, 1}, {2, 2}, {3, 2}, {2, 2}} {
		precision, sent, trainer := xpu.FP32, xpu.Float32, estimate.Mula
		if i >= 4 {
			precision, sent = xpu.BF16Mixed, xpu.BFloat16
			if i == 7 {
				precision = xpu.BF16Compact
			}
			trainer = trainer.Mixed(precision, sent)
		}
		for _, scheme := range []estimate.Scheme{estimate.Unsharded, estimate.SO, estimate.EPSO} {
			layout := LayoutConfig{DP: axes[0], EP: axes[1], PP: 1, TP: 1, Optimizer: scheme, Dispatch: moe.AllToAll}
			type kind struct {
				group     comm.Axes
				operation comm.Operation
			}
			var mu sync.Mutex
			got := map[kind]int64{}
			optimizertest.Together(t, layout.Ranks(), func(world *comm.Comm) error {
				ctx := context.Background()
				groups, err := group.New(ctx, world, layout.shape(), (&Config{Layout: layout}).groupOptions(nil))
				if err != nil {
					return err
				}
				defer groups.Close()
				d := cpu.New(1, precision)
				defer d.Close()
				m, err := moe.NewParallel(c, d, layout.parallel(groups))
				if err != nil {
					return err
				}
				s := optimizer.NewSharding(groups.Mesh, groups.Nested, scheme, false, sent, d, m.Parameters(),
					m.Buckets())
				o, err := optimizer.NewSharded(ctx, defaultOptimizer(optimizer.AdamW), 100, d,
					m.Parameters(), sizes, s)
				if err != nil {
					return err
				}
				of := map[comm.Axes][]*comm.Comm{comm.EP: {groups.Group(comm.EP), groups.Within},
					comm.Replicas: {groups.Group(comm.Replicas)}, comm.Data: {groups.Group(comm.Data)}}
				for _, each := range of {
					for _, member := range each {
						member.ResetTraffic()
					}
				}
				for b := range m.Buckets() {
					transfers := m.Device().Transfers()
					if err := s.Reduce(ctx, b, transfers); err != nil {
						return err
					}
					transfers.Join()
				}
				if _, err := o.GradientNorm(ctx); err != nil {
					return err
				}
				if err := o.Step(ctx, 1e-3, 1); err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				for name, each := range of {
					for _, member := range each {
						for _, traffic := range member.Traffic() {
							if traffic.Bytes() != 0 {
								got[kind{name, traffic.Operation}] += traffic.Bytes()
							}
						}
					}
				}
				return nil
			})
			l := estimate.Layout{Shape: layout.shape(), Optimizer: scheme,
				Dispatch: layout.Dispatch, BatchSize: layout.Ranks(), MicroBatchSize: 1,
				SequenceLength: 16, Recompute: moe.RecomputeNone}
			stages, err := estimate.Stages(c, l)
			if err != nil {
				t.Fatal(err)
			}
			want := map[kind]int64{}
			for _, e := range estimate.OptimizerTraffic(stages[0], l, trainer) {
				want[kind{e.Group, e.Operation}] += e.Total * int64(layout.Ranks()/e.Ranks)
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("dp %d, ep %d, %s, %s: the ranks sent %v, the estimate says %v", layout.DP, layout.EP, scheme,
					precision, got, want)
			}
		}
	}
}

// The buffers in which ranks sum gradients have the size that the estimate and the summary count:
// no rank keeps more, and the rank with the most weights keeps exactly that.
func TestSumBytesAreTheCommunicators(t *testing.T) {
	c, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	large := c // whose embedding and experts are several blocks
	large.VocabSize, large.HiddenSize, large.IntermediateSize, large.Experts = 6000, 128, 96, 16
	for _, axes := range [][3]int{{2, 1, 1}, {2, 1, 2}, {1, 1, 4}, {3, 1, 2}, {2, 2, 1}} {
		for _, scheme := range []estimate.Scheme{estimate.Unsharded, estimate.SO, estimate.EPSO} {
			for _, model := range []moe.Config{c, large} {
				for _, name := range []optimizer.Name{optimizer.AdamW, optimizer.Muon} {
					if name == optimizer.Muon && scheme != estimate.EPSO {
						continue
					}
					layout := LayoutConfig{DP: axes[0], PP: axes[1], EP: axes[2], TP: 1, Optimizer: scheme,
						Dispatch: moe.AllToAll}
					config := defaultConfig()
					config.Model.Config, config.Layout, config.Optimizer.Name = model, layout, name
					var mu sync.Mutex
					most := make([]int64, layout.PP)
					optimizertest.Together(t, layout.Ranks(), func(world *comm.Comm) error {
						ctx := context.Background()
						groups, err := group.New(ctx, world, layout.shape(), config.groupOptions(nil))
						if err != nil {
							return err
						}
						defer groups.Close()
						m, err := moe.NewParallel(model, device(t, 1), layout.parallel(groups))
						if err != nil {
							return err
						}
						s := optimizer.NewSharding(groups.Mesh, groups.Nested, scheme, name.NeedsWholeTensors(),
							xpu.Float32, device(t, 1), m.Parameters(), m.Buckets())
						for b := range m.Buckets() {
							transfers := m.Device().Transfers()
							if err := s.Reduce(ctx, b, transfers); err != nil {
								return err
							}
							transfers.Join()
						}
						mu.Lock()
						defer mu.Unlock()
						stage := groups.OwnIndex(comm.PP)
						most[stage] = max(most[stage],
							groups.Group(comm.Replicas).SumMemory()+groups.Group(comm.Data).SumMemory()+
								groups.Within.SumMemory())
						return nil
					})
					for stage, got := range most {
						want := estimate.SumBytes(model, config.estimateLayout(16), config.estimateTrainer(), stage)
						slack := int64(0)
						if model.VocabSize == c.VocabSize || scheme == estimate.SO {
							// parts of many tensors are cut somewhat below what they may be
							slack = want / 4
						}
						if got > want || got < want-slack {
							t.Errorf("dp %d, pp %d, ep %d, %s, %s, vocabulary %d: a rank of stage %d keeps %d bytes "+
								"for sums, the estimate says %d", layout.DP, layout.PP, layout.EP, scheme, name,
								model.VocabSize, stage, got, want)
						}
					}
				}
			}
		}
	}
}

// The memory of a run equals the allocations of its ranks, in every layout, with every scheme,
// level of recomputation and precision: the device counts its allocations, and each group its
// buffers for sums. The experts get equally many tokens.
func TestMemoryIsMeasured(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	every := longtest.Rounds(4, 1) // usually a quarter of all combinations, with all pairs of settings
	for at, l := range []LayoutConfig{{DP: 1, PP: 1, EP: 1}, {DP: 2, PP: 1, EP: 1}, {DP: 1, PP: 1, EP: 2},
		{DP: 2, PP: 1, EP: 2}, {DP: 1, PP: 2, EP: 1}, {DP: 2, PP: 2, EP: 1}, {DP: 1, PP: 2, EP: 2},
		{DP: 2, PP: 2, EP: 2}, {DP: 2, PP: 1, EP: 1, CP: 2}, {DP: 2, PP: 2, EP: 2, CP: 4}} {
		for i, recompute := range moe.Recomputes() {
			for j, precision := range xpu.Precisions() {
				for k, scheme := range estimate.Schemes() {
					if (at+i+j+k)%every != 0 {
						continue
					}
					l.Optimizer = estimate.Scheme(scheme)
					more := fmt.Sprintf("steps: 2\nrecompute: %s\nprecision: %s\n", recompute, precision)
					name := []optimizer.Name{optimizer.AdamW, optimizer.Muon, optimizer.Lion}[(i+j+k)%3]
					if name.NeedsWholeTensors() && xpu.Precision(precision).Gradients() == xpu.BFloat16 {
						name = optimizer.ScheduleFreeAdamW
						more += "schedule: {name: constant}\n"
					}
					moments := ""
					if name == optimizer.AdamW && k%2 == 0 {
						moments = ", moments: bf16"
					}
					activations := xpu.Float32
					if l.CP <= 1 && (i+k)%2 == 1 {
						activations = xpu.BFloat16
					}
					more += fmt.Sprintf("optimizer: {name: %s%s}\nactivations: %s\n", name, moments, activations)
					c := ranksConfig(t, plan, l, more)
					c.Layout.UniformRouting = true
					c.Layout.Dispatch = []moe.Dispatch{moe.AllToAll, moe.AllGather}[(i+j+k)%2]
					measureMemory(t, c)
				}
			}
		}
	}
}

// So does the memory of stages with several groups of layers. Their batches under way may be of any
// group.
func TestMemoryOfGroups(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const nano = "steps: 2\nmodel: {preset: mula-nano, num_hidden_layers: 12}\n"
	const predicts = predictingStages + "steps: 2\nevaluate: {every: 0}\n"
	for _, test := range []struct {
		layout LayoutConfig
		model  string
	}{{LayoutConfig{DP: 1, PP: 2, EP: 1, VirtualStages: 2}, nano},
		{LayoutConfig{DP: 1, PP: 2, EP: 2, VirtualStages: 3}, nano},
		{LayoutConfig{DP: 2, PP: 2, EP: 1, CP: 2, VirtualStages: 2}, nano},
		{LayoutConfig{DP: 1, PP: 2, EP: 2, VirtualStages: 2}, deepSeek},
		{LayoutConfig{DP: 1, PP: 3, EP: 2}, predicts},
		{LayoutConfig{DP: 2, PP: 2, EP: 1, CP: 2, VirtualStages: 2}, predicts},
		{LayoutConfig{DP: 1, PP: 2, EP: 1, TP: 2}, predicts}} {
		for _, recompute := range moe.Recomputes() {
			c := ranksConfig(t, plan, test.layout, fmt.Sprintf("%srecompute: %s\nmicro_batch_size: 1\n", test.model,
				recompute))
			c.Layout.UniformRouting = true
			measureMemory(t, c)
		}
	}
}

// So does the memory of ranks that share sequences, if they are more than the key and value heads.
func TestMemoryOfParts(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for i, test := range []struct {
		model string
		LayoutConfig
	}{
		{oneKeyHead, LayoutConfig{DP: 4, EP: 1, CP: 4}}, {twoKeyHeads, LayoutConfig{DP: 4, EP: 1, CP: 4}},
		{tensorDense, LayoutConfig{DP: 4, EP: 1, TP: 2, CP: 4}},
	} {
		recompute := moe.Recomputes()[i%len(moe.Recomputes())]
		measureMemory(t, ranksConfig(t, plan, test.LayoutConfig, fmt.Sprintf("%ssteps: 2\nrecompute: %s\n", test.model,
			recompute)))
	}
}

// So does the memory of ranks that share matrices.
func TestTensorMemory(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for i, test := range []struct {
		model string
		LayoutConfig
	}{
		{tensorDense, LayoutConfig{DP: 1, EP: 1, TP: 2}}, {tensorDense, LayoutConfig{DP: 2, EP: 1, TP: 2}},
		{tensorDense, LayoutConfig{DP: 2, EP: 1, TP: 2, CP: 2}},
		{tensorDense, LayoutConfig{DP: 1, EP: 1, TP: 4, PP: 2, VirtualStages: 2}},
		{tensorExperts, LayoutConfig{DP: 1, EP: 2, TP: 2}}, {tensorExperts, LayoutConfig{DP: 2, EP: 1, TP: 2}},
		{tensorLatents, LayoutConfig{DP: 1, EP: 2, TP: 2}}, {tensorLatents, LayoutConfig{DP: 2, EP: 1, TP: 2, PP: 2}},
		{tensorLatents, LayoutConfig{DP: 2, EP: 1, TP: 2, CP: 2}},
		{tensorWide, LayoutConfig{DP: 1, EP: 2, TP: 2}}, {tensorWide, LayoutConfig{DP: 2, EP: 1, TP: 2, CP: 2}},
		{tensorWide, LayoutConfig{DP: 1, EP: 1, TP: 4, PP: 2}},
		{tensorGate, LayoutConfig{DP: 1, EP: 2, TP: 2}}, {tensorGate, LayoutConfig{DP: 2, EP: 1, TP: 2, PP: 2}},
	} {
		model, l := test.model, test.LayoutConfig
		for j, recompute := range moe.Recomputes() {
			if longtest.Rounds(0, 1) == 0 && j != i%len(moe.Recomputes()) {
				continue
			}
			l.Optimizer = []estimate.Scheme{estimate.EPSO, estimate.Unsharded, estimate.SO}[(i+j)%3]
			name := []optimizer.Name{optimizer.AdamW, optimizer.Lion, optimizer.AdamW}[j]
			if j == 0 { // with float32 gradients
				name = []optimizer.Name{optimizer.Muon, optimizer.Lamb}[i%2]
			}
			more := fmt.Sprintf("%ssteps: 2\nrecompute: %s\nprecision: %s\noptimizer: {name: %s}\n", model, recompute,
				xpu.Precisions()[j%len(xpu.Precisions())], name)
			if l.CP <= 1 && j%2 == 1 {
				more += "activations: bf16\n"
			}
			c := ranksConfig(t, plan, l, more)
			c.Layout.UniformRouting = c.Model.Experts > 0
			measureMemory(t, c)
		}
	}
}

// measureMemory compares the memory of each stage of a run with the allocations of its ranks.
func measureMemory(t *testing.T, c Config) {
	t.Helper()
	var mu sync.Mutex
	var resolved Config
	onDevice, sums := make([]int64, c.Layout.PP), make([]int64, c.Layout.PP) // by stage: sum, and maximum
	mustRun(t, c, onDiscrete(Options{
		Report: func(s Summary) { resolved = s.Config },
		passed: func(r *run) {
			mu.Lock()
			defer mu.Unlock()
			if r.state.Step == c.Steps-1 {
				onDevice[r.ranks.OwnIndex(comm.PP)] += r.device.(*discrete.Device).InUse()
			}
		},
		ended: func(r *group.Group) {
			mu.Lock()
			defer mu.Unlock()
			own := &sums[r.OwnIndex(comm.PP)]
			sums := r.Group(comm.Replicas).SumMemory() + r.Within.SumMemory()
			switch nested := c.Layout.Optimizer == estimate.SO; {
			case r.Size(comm.TP) == 1:
				sums += r.Group(comm.Data).SumMemory()
			case nested: // other groups add only losses
				sums += r.WithinTensor.SumMemory() + r.Across.SumMemory()
			default:
				sums += r.Group(comm.Data).SumMemory() + r.Group(comm.Slices).SumMemory()
			}
			*own = max(*own, sums)
		},
	}, nil))
	for stage := range c.Layout.PP {
		layout := resolved.estimateLayout(16)
		want := estimate.StageMemory(c.Model.Config, layout, resolved.estimateTrainer(), stage)
		name := fmt.Sprintf("layout %s, dispatch %s, recompute %s, activations %s, precision %s, optimizer %s, "+
			"moments %q, stage %d", c.Layout, c.Layout.Dispatch, c.Recompute, c.Activations, c.Precision,
			c.Optimizer.Name, c.Optimizer.Moments, stage)
		got := onDevice[stage] / int64(layout.DataRanks())
		if got > want.OnDevice() || got < want.OnDevice()*95/100 {
			t.Errorf("%s: %d bytes of the device are allocated, the estimate is %d", name, got, want.OnDevice())
		}
		host := estimate.SumBytes(c.Model.Config, layout, resolved.estimateTrainer(), stage)
		if sums[stage] > host || sums[stage] < host/2 {
			t.Errorf("%s: %d bytes are allocated for sums, the estimate is %d", name, sums[stage], host)
		}
	}
}

// Mula-7B at dp 2 has 4 MiB for sums: 1 MiB of each of two ranks, for replicated weights and for
// experts.
func TestMemoryOfSums(t *testing.T) {
	plan := mustPlan(t, makePlan(t, t.TempDir(), "plan.json", ""))
	c, err := testConfig(t, "plan.json", "layout: {expert_dp: 2}\nmodel: {preset: mula-7b-a1b}\n").resolve(plan)
	if err != nil {
		t.Fatal(err)
	}
	in, err := c.EstimateInput(plan, estimate.Aurora)
	if err != nil {
		t.Fatal(err)
	}
	r, err := estimate.Compute(in)
	if err != nil {
		t.Fatal(err)
	}
	if got := summarize(c, plan, nil).Memory; got != r.Memory || got.Exchange != 4<<20 {
		t.Errorf("the summary has %+v, the estimate %+v; want 4 MiB for sums", got, r.Memory)
	}
}
