package estimate

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/comm"
)

func preset(t testing.TB, name string) moe.Config {
	t.Helper()
	c, err := moe.Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// near tells whether a value, rounded as it was published, is the published one.
func near(got, want, digit float64) bool { return math.Abs(got-want) <= digit/2*1.000001 }

// optimusLayout is a layout of bf16 runs with a sequence for each rank.
func optimusLayout(dp, ep, pp int, scheme Scheme) Layout {
	return Layout{Shape: shape(dp, ep, pp), Optimizer: scheme, Dispatch: moe.AllGather, BatchSize: dp * ep * pp,
		MicroBatchSize: 1, SequenceLength: 2048, Recompute: moe.RecomputeNone}
}

// The split of the weights that the arithmetic of the optimizer rests on, as it is known for the
// Mula models.
func TestSplit(t *testing.T) {
	for _, test := range []struct {
		model               string
		replicated, divided int64
	}{
		{"mula-7b-a1b", 476_710_912, 6_442_450_944},
		{"mula-20b-a2b", 749_471_744, 19_327_352_832},
		{"mula-100b-a7b", 2_142_833_664, 97_844_723_712},
		{"mula-220b-a10b", 2_772_962_304, 217_432_719_360},
		{"mula-1b", 1_279_787_008, 0},
	} {
		stages, err := Stages(preset(t, test.model), optimusLayout(1, 1, 1, SO))
		if err != nil {
			t.Fatal(err)
		}
		if len(stages) != 1 || stages[0].Replicated != test.replicated || stages[0].Divided != test.divided {
			t.Errorf("%s: %+v, want %d and %d", test.model, stages, test.replicated, test.divided)
		}
	}
}

// Memory and traffic of the layouts of the Mula runs, and of others, in GB, as derived in the notes
// on the sharded optimizer.
func TestMemoryAndTraffic(t *testing.T) {
	for _, test := range []struct {
		model                    string
		dp, ep, pp               int
		soMemory, epsoMemory     float64 // weights, gradients and state on the worst stage; 0 = not known
		soState, epsoState       float64 // the state alone, to a tenth
		soTraffic, epsoTraffic   float64 // gradients and weights on the worst stage
		trafficRatio, ratioDigit float64
	}{
		{"mula-20b-a2b", 256, 12, 1, 9.55, 9.52, 0, 0, 12.15, 9.41, 1.29, 0.01},
		{"mula-100b-a7b", 64, 12, 4, 11.10, 11.00, 0, 0, 12.69, 10.48, 1.21, 0.01},
		{"mula-220b-a10b", 32, 12, 8, 11.93, 11.77, 0, 0, 12.26, 10.62, 1.155, 0.001},
		{"mula-7b-a1b", 8, 8, 1, 7.05, 6.43, 0, 0, 6.16, 4.70, 1.31, 0.01},
		{"mula-7b-a1b", 2, 2, 1, 0, 0, 22.2, 20.8, 0, 0, 0, 0},
		{"mula-7b-a1b", 2, 4, 1, 0, 0, 12.5, 10.4, 0, 0, 0, 0},
		{"mula-20b-a2b", 4, 12, 1, 0, 0, 7.1, 5.0, 0, 0, 0, 0},
	} {
		var traffic []float64
		for i, scheme := range []Scheme{SO, EPSO} {
			r, err := Compute(Input{Model: test.model, Config: preset(t, test.model), Layout: optimusLayout(test.dp,
				test.ep, test.pp, scheme), Trainer: Optimus,
				Precision: xpu.BF16, Machine: Aurora})
			if err != nil {
				t.Fatal(err)
			}
			traffic = append(traffic, r.Sent(ForGradients, ForWeights)/1e9)
			for _, f := range []struct {
				what             string
				got, want, digit float64
			}{
				{"memory", float64(r.Memory.Model()) / 1e9, []float64{test.soMemory, test.epsoMemory}[i], 0.01},
				{"state", float64(r.Memory.Optimizer) / 1e9, []float64{test.soState, test.epsoState}[i], 0.1},
				{"traffic", traffic[i], []float64{test.soTraffic, test.epsoTraffic}[i], 0.01},
			} {
				if f.want != 0 && !near(f.got, f.want, f.digit) {
					t.Errorf("%s dp %d ep %d pp %d %s: %s %.4f GB, want %g", test.model, test.dp, test.ep, test.pp,
						scheme, f.what, f.got, f.want)
				}
			}
		}
		if ratio := traffic[0] / traffic[1]; test.trafficRatio != 0 && !near(ratio, test.trafficRatio,
			test.ratioDigit) {
			t.Errorf("%s: traffic of SO / EPSO %.4f, want %g", test.model, ratio, test.trafficRatio)
		}
	}
}

// The ratio of updated weights: 1 + (EP-1)·f over whole models, as predicted; by stage where there
// is a pipeline.
func TestSteppedRatio(t *testing.T) {
	for _, test := range []struct {
		model       string
		ep, pp      int
		whole       float64
		first, next float64 // of stages; 0 without a pipeline
	}{
		{"mula-20b-a2b", 12, 1, 1.41, 0, 0},
		{"mula-100b-a7b", 12, 4, 1.24, 1.27, 1.20},
		{"mula-220b-a10b", 12, 8, 1.14, 1.18, 1.12},
		{"mula-7b-a1b", 2, 1, 1.07, 0, 0},
		{"mula-7b-a1b", 4, 1, 1.21, 0, 0},
		{"mula-7b-a1b", 8, 1, 1.48, 0, 0},
		{"mula-7b-a1b", 16, 1, 2.03, 0, 0},
	} {
		so, epso := optimusLayout(8, test.ep, test.pp, SO), optimusLayout(8, test.ep, test.pp, EPSO)
		stages, err := Stages(preset(t, test.model), so)
		if err != nil {
			t.Fatal(err)
		}
		var all Stage
		for _, s := range stages {
			all.Replicated += s.Replicated
			all.Divided += s.Divided
		}
		got := Stepped(all, so) / Stepped(all, epso)
		f := float64(all.Replicated) / float64(all.Replicated+all.Divided*int64(test.ep))
		if !near(got, test.whole, 0.01) || math.Abs(got-(1+float64(test.ep-1)*f)) > 1e-12 {
			t.Errorf("%s ep %d: ratio %.4f, want %g and 1+(EP-1)f = %.4f", test.model, test.ep, got, test.whole,
				1+float64(test.ep-1)*f)
		}
		for i, want := range []float64{test.first, test.next} {
			if want == 0 {
				continue
			}
			s := stages[i]
			if got := Stepped(s, so) / Stepped(s, epso); !near(got, want,
				0.01) {
				t.Errorf("%s stage %d: ratio %.4f, want %g", test.model, i, got, want)
			}
		}
	}
}

// What dispatch sends, in hidden states of a rank's tokens, forward.
func TestDispatchVolume(t *testing.T) {
	for _, test := range []struct {
		model    string
		ep       int
		dispatch moe.Dispatch
		want     float64 // hidden states sent for each of the rank's tokens, there and back
	}{
		{"mula-20b-a2b", 12, moe.AllGather, 22},
		{"mula-20b-a2b", 12, moe.AllToAll, 2 * 5.67},
		{"mula-100b-a7b", 12, moe.AllToAll, 2 * 5.62},
		{"mula-220b-a10b", 12, moe.AllToAll, 2 * 5.58},
		{"mula-7b-a1b", 8, moe.AllToAll, 2 * 4.75},
		{"mula-7b-a1b", 4, moe.AllToAll, 2 * 2.74},
	} {
		c := preset(t, test.model)
		c.Layers = 1
		l := optimusLayout(1, test.ep, 1, SO)
		l.Dispatch = test.dispatch
		// forward alone; T·H of bf16
		got := sent(dispatchTraffic(c, 0, l, Optimus)) / 2 / (2048 * float64(c.HiddenSize) * 2)
		if !near(got, test.want, 0.02) {
			t.Errorf("%s ep %d %s: %.3f hidden states of a token, want %g", test.model, test.ep, test.dispatch, got,
				test.want)
		}
		l.Recompute = moe.RecomputeExperts
		if again := sent(dispatchTraffic(c, 0, l, Optimus)); math.Abs(again/sent(dispatchTraffic(c, 0,
			withoutRecompute(l), Optimus))-1.5) > 1e-6 {
			t.Errorf("%s: recomputation sends %g bytes, want half as much again", test.model, again)
		}
	}
}

func withoutRecompute(l Layout) Layout {
	l.Recompute = moe.RecomputeNone
	return l
}

// draw draws a model of two kinds and a layout that fits it.
func draw(t *rapid.T) (moe.Config, Layout) {
	heads := rapid.IntRange(1, 4).Draw(t, "heads")
	ep := rapid.IntRange(1, 8).Draw(t, "ep")
	pp := rapid.IntRange(1, 4).Draw(t, "pp")
	c := moe.Config{
		Architecture: moe.OLMoE, VocabSize: rapid.IntRange(8, 5000).Draw(t,
			"vocabulary"), HiddenSize: heads * 2 * rapid.IntRange(1, 40).Draw(t, "half head"),
		IntermediateSize: rapid.IntRange(1, 300).Draw(t, "ffn"), Layers: pp + rapid.IntRange(0, 8).Draw(t,
			"layers"), Heads: heads, KVHeads: heads,
		Experts: ep * rapid.IntRange(1, 6).Draw(t, "experts"), MaxPositions: 4096, RopeTheta: 10000, NormEps: 1e-5,
		PadTokenID: moe.NoToken, BOSTokenID: moe.NoToken,
		EOSTokenID: moe.NoToken, TieEmbeddings: rapid.Bool().Draw(t, "tied"),
	}
	c.ExpertsPerToken = rapid.IntRange(1, c.Experts).Draw(t, "top-k")
	if rapid.IntRange(0, 4).Draw(t, "dense") == 0 {
		c.Architecture, c.Experts, c.ExpertsPerToken, ep = moe.OLMo, 0, 0, 1
	}
	l := Layout{
		Shape: shape(rapid.IntRange(1, 9).Draw(t, "dp"), ep, pp), Optimizer: EPSO,
		Dispatch:       rapid.SampledFrom([]moe.Dispatch{moe.AllToAll, moe.AllGather}).Draw(t, "dispatch"),
		MicroBatchSize: rapid.IntRange(1, 3).Draw(t, "micro-batch"), SequenceLength: rapid.IntRange(1, 64).Draw(t,
			"length"),
		Recompute: rapid.SampledFrom([]moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts,
			moe.RecomputeLayers}).Draw(t, "recompute"),
	}
	l.BatchSize = l.DataRanks() * rapid.IntRange(1, 5).Draw(t, "sequences")
	return c, l
}

// The stages hold the model, no weight twice except a tied embedding. EPSO never sends or updates
// more than SO, and no stage keeps more for its weights (sum buffers excluded). Without expert
// parallelism the two schemes are equal. All ranks together update every weight once.
func TestSchemes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, l := draw(t)
		trainer := rapid.SampledFrom([]Trainer{Mula, Optimus}).Draw(t, "trainer")
		machine := Aurora
		machine.RanksPerNode.Value = float64(rapid.IntRange(1, 16).Draw(t, "ranks of a node"))
		machine.NodesPerGroup.Value = float64(rapid.IntRange(0, 3).Draw(t, "nodes of a group"))
		results := map[Scheme]*Result{}
		// bytes for the weights, by stage: the stage of Result.Memory can differ between schemes
		kept := map[Scheme][]int64{}
		for _, scheme := range []Scheme{Unsharded, SO, EPSO} {
			l.Optimizer = scheme
			r, err := Compute(Input{Model: "drawn", Config: c, Layout: l, Trainer: trainer, Precision: xpu.FP32,
				Machine: machine})
			if err != nil {
				t.Fatal(err)
			}
			results[scheme] = r
			for i := range r.Stages {
				m := StageMemory(c, l, trainer, i)
				kept[scheme] = append(kept[scheme], m.Model())
			}
			var all int64
			updated := 0.0
			for _, s := range r.Stages {
				all += s.Replicated + s.Divided*int64(l.Size(comm.EP))
				perRank := Stepped(s, l)
				if scheme == EPSO {
					updated += perRank * float64(l.DataRanks())
				}
			}
			want := c.TotalParameters()
			if c.TieEmbeddings && l.Size(comm.PP) > 1 {
				want += int64(c.VocabSize) * int64(c.HiddenSize)
			}
			if all != want {
				t.Fatalf("stages hold %d weights, the model has %d", all, want)
			}
			if scheme == EPSO && math.Abs(updated/float64(all)-1) > 1e-12 {
				t.Fatalf("%g weights are updated of %d", updated, all)
			}
			if r.StepTime <= 0 || math.IsInf(r.StepTime, 0) || math.IsNaN(r.StepTime) || r.MFU <= 0 ||
				r.MFU > machine.ComputeEfficiency.Value*1.000001 {
				t.Fatalf("step of %g s at an MFU of %g", r.StepTime, r.MFU)
			}
			tokens := r.TokensPerSecond * r.StepTime
			if math.Abs(tokens/float64(l.BatchSize*l.SequenceLength)-1) > 1e-9 {
				t.Fatalf("%g tokens in a step", tokens)
			}
		}
		so, epso := results[SO], results[EPSO]
		const rounding = 1 + 1e-12
		if epso.Sent() > so.Sent()*rounding || epso.Stepped > so.Stepped*rounding {
			t.Fatalf("EPSO: sends %g, updates %g; SO: %g, %g", epso.Sent(), epso.Stepped, so.Sent(), so.Stepped)
		}
		for i := range kept[EPSO] {
			if kept[EPSO][i] > kept[SO][i] {
				t.Fatalf("stage %d: EPSO keeps %d bytes, SO %d", i, kept[EPSO][i], kept[SO][i])
			}
		}
		if l.Size(comm.EP) == 1 && (epso.Sent()*rounding < so.Sent() || epso.Stepped*rounding < so.Stepped ||
			!slices.Equal(kept[EPSO], kept[SO])) {
			t.Fatalf("without expert parallelism EPSO differs from SO: %+v, %+v", epso, so)
		}
		if l.Size(comm.EP) > 1 && l.Size(comm.Replicas)*l.Size(comm.EP) > 1 && !(epso.Stepped < so.Stepped) {
			t.Fatalf("EPSO updates %g weights of a rank, SO %g", epso.Stepped, so.Stepped)
		}
	})
}

// The general formula of activations equals the allocations of package moe, where moe computes a
// complete model on one rank.
func TestActivations(t *testing.T) {
	predicting := preset(t, "mula-mini")
	predicting.Architecture, predicting.ClipQKV, predicting.PredictionLayers = moe.GLM4MoE, 0, 2
	for name, c := range map[string]moe.Config{"mula-tiny": preset(t, "mula-tiny"), "mula-mini": preset(t, "mula-mini"),
		"mula-1b": preset(t, "mula-1b"), "mula-7b-a1b": preset(t, "mula-7b-a1b"), "predicting": predicting} {
		for _, recompute := range []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers} {
			l := Layout{Shape: shape(1, 1, 1), Optimizer: EPSO, Dispatch: moe.AllToAll, BatchSize: 2, MicroBatchSize: 2,
				SequenceLength: 1024, Recompute: recompute}
			other := Mula
			other.Own = false
			got := float64(StageMemory(c, l, other, 0).Activations)
			want := float64(c.Memory(moe.Pass{Rows: 2, SequenceLength: 1024, Recompute: recompute}).Buffers)
			if math.Abs(got/want-1) > 0.002 {
				t.Errorf("%s, recompute %s: %.0f bytes, package moe takes %.0f", name, recompute, got, want)
			}
			if own := StageMemory(c, l, Mula, 0); float64(own.Activations) != want || own.Exchange != 0 {
				t.Errorf("%s, recompute %s: of mula %+v, package moe takes %.0f", name, recompute, own, want)
			}
		}
	}
}

// A layout that does not fit is refused with the sizes that would.
func TestRefusals(t *testing.T) {
	for _, test := range []struct {
		change func(in *Input)
		want   string
	}{
		{func(in *Input) { in.Layout.Shape = in.Layout.With(comm.EP, 5); in.Layout.BatchSize = 3072 },
			"possible: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96"},
		{func(in *Input) { in.Layout.Shape = in.Layout.With(comm.PP, 33) },
			"pp is 33, but the model has only 32 layers"},
		{func(in *Input) { in.Layout.BatchSize = 3073 }, "multiple of 3072"},
		{func(in *Input) { in.Layout.Shape = in.Layout.With(comm.Replicas, 0) }, "expert_dp is 0"},
		{func(in *Input) { in.Layout.BatchSize = 3072 << 18 }, "at most 68719476736"},
		{func(in *Input) { in.Layout.Optimizer = "zero" }, "allowed: epso, so, unsharded"},
		{func(in *Input) { in.Layout.Dispatch = "" }, `dispatch is ""; allowed: alltoall, allgather`},
		{func(in *Input) { in.Layout.Recompute = "all" }, "allowed: none, experts, layers"},
		{func(in *Input) { in.Precision = "fp8" }, "allowed: fp32, bf16"},
		{func(in *Input) { in.Layout.SequenceLength = 8192 }, "max_position_embeddings, 4096"},
		{func(in *Input) { in.Machine = Machine{Name: "none"} }, "machine none: ranks_per_node is 0"},
		{func(in *Input) { in.Config = preset(t, "mula-1b"); in.Layout.SequenceLength = 2048 }, "dense model"},
	} {
		in, err := publishedInput("mula-20b-a2b", EPSO)
		if err != nil {
			t.Fatal(err)
		}
		test.change(&in)
		if _, err := Compute(in); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("error %v, want one with %q", err, test.want)
		}
	}
	for _, model := range []string{"mula-nano", "mula-2b"} {
		if _, err := publishedInput(model, EPSO); err == nil {
			t.Errorf("%s: a published layout", model)
		}
	}
	if _, err := TrainerByName("megatron"); err == nil || !strings.Contains(err.Error(), "mula, optimus") {
		t.Error(err)
	}
	if _, err := MachineByName("auror"); err == nil || !strings.Contains(err.Error(), `did you mean "aurora"`) {
		t.Error(err)
	}
}

// simple is a machine on which times can be computed by hand: 2 ranks a node, two nodes a group.
func simple() Machine {
	one := func(v float64) Figure { return Figure{Value: v, Kind: Assumed} }
	return Machine{
		Name: "simple", RanksPerNode: one(2), Memory: one(1e12), PeakBF16: one(1e12), PeakFP32: one(5e11),
		ComputeEfficiency: one(0.5), MemoryBandwidth: one(1e9),
		NodeLink: one(4e9), NodeEfficiency: one(0.5), Network: one(2e9), NetworkEfficiency: one(0.25),
		NodesPerGroup: one(2), GlobalNetwork: one(1e9), Latency: one(0),
	}
}

// Times of exchanges, computed by hand: a rank sends 2e9 bytes/s inside its node, and half of 5e8
// bytes/s to other nodes.
func TestSecondsByHand(t *testing.T) {
	m := simple()
	for _, test := range []struct {
		what    string
		l       Layout
		e       Exchange
		latency float64
		want    float64
		how     collectives
	}{
		{"all-gather inside a node", Layout{Shape: shape(1, 2, 1)}, exchange(ForDispatch, comm.OpAllGather, comm.EP, 2,
			1,
			4e9), 0, 4e9 / 2 / 2e9, assumed},
		{"all-gather of replicas in two nodes", Layout{Shape: shape(2, 2, 1)}, exchange(ForWeights, comm.OpAllGather,
			comm.Replicas, 2, 1, 4e9), 0, 4e9 / 2 / 2.5e8, assumed},
		// z = 4e9/3; inside z/2 at 2e9, then half of z's half at 2.5e8.
		{"reduce-scatter of all in two nodes", Layout{Shape: shape(2, 2, 1)}, exchange(ForGradients,
			comm.OpReduceScatter,
			comm.Data, 4, 1, 4e9), 0, 4e9/3/2/2e9 + 4e9/3/2/2/2.5e8, assumed},
		{"all-reduce is two of them", Layout{Shape: shape(2, 2, 1)}, exchange(ForGradients, comm.OpAllReduce, comm.Data,
			4, 1,
			8e9), 0, 2 * (4e9/3/2/2e9 + 4e9/3/2/2/2.5e8), assumed},
		// A rank sends a third of its bytes within the node.
		{"all-to-all in two nodes", Layout{Shape: shape(1, 4, 1)}, exchange(ForDispatch, comm.OpAllToAll, comm.EP, 4, 1,
			12e9), 0, 1e9/2e9 + 2e9/2.5e8, assumed},
		// Four nodes are two groups: half of the messages leave theirs, for which a node has 1e9:
		// 2e9 in all, as much as the network.
		{"two groups, limited by the network", Layout{Shape: shape(8, 1, 1)}, exchange(ForWeights, comm.OpAllGather,
			comm.Replicas, 8, 1, 56e9), 0, 8e9/2/2e9 + 8e9/2*3/4/2.5e8, assumed},
		// Eight nodes are four groups: 3/4 leave, so 4/3e9 in all.
		{"four groups, limited between them", Layout{Shape: shape(16, 1, 1)}, exchange(ForWeights, comm.OpAllGather,
			comm.Replicas, 16, 1, 15*16e9), 0,
			16e9/2/2e9 + 16e9/2*7/8/(2.5e8*2/3), assumed},
		{"latency", Layout{Shape: shape(2, 2, 1)}, exchange(ForGradients, comm.OpReduceScatter, comm.Data, 4, 10, 0),
			0.001,
			10 * (1 + 1) * 0.001, assumed},
		{"latency of an all-reduce", Layout{Shape: shape(2, 2, 1)}, exchange(ForGradients, comm.OpAllReduce, comm.Data,
			4, 10,
			0), 0.001, 2 * 10 * (1 + 1) * 0.001, assumed},
		{"a flat gather in two nodes sends as an all-to-all", Layout{Shape: shape(2, 2, 1)},
			exchange(ForWeights, comm.OpAllGather, comm.Data, 4, 1, 12e9), 0, 1e9/2e9 + 2e9/2.5e8, direct},
		// A rank sends half of the vector, 1e9, inside its node, and a quarter, 5e8, to the other
		// node. Two of the four ranks are not their own relays, which costs another 5e8 inside.
		{"gather with relays", Layout{Shape: shape(2, 2, 1)}, exchange(ForWeights, comm.OpAllGather, comm.Data, 4, 1,
			6e9), 0, (1e9+5e8/2)/2e9 + 5e8/2.5e8, relayed},
		{"sum of partial sums", Layout{Shape: shape(2, 2, 1)}, exchange(ForGradients, comm.OpReduceScatter, comm.Data,
			4, 1, 6e9), 0, (1e9+5e8/2)/2e9 + 5e8/2.5e8, relayed},
		{"sum of terms", Layout{Shape: shape(4, 1, 1)}, exchange(ForGradients, comm.OpReduceScatter, comm.Data,
			4, 1, 6e9), 0, (1e9+5e8)/2e9 + 1e9/2.5e8, relayed},
		{"sum of partial sums of replicas", Layout{Shape: shape(4, 1, 1), SumReplicas: 2},
			exchange(ForGradients, comm.OpReduceScatter, comm.Data, 4, 1, 6e9), 0, (1e9+5e8/2)/2e9 + 5e8/2.5e8,
			relayed},
		{"messages with relays", Layout{Shape: shape(2, 2, 1)}, exchange(ForGradients, comm.OpReduceScatter, comm.Data,
			4, 10, 0), 0.001, 10 * 3 * 0.001, relayed},
		{"flat messages", Layout{Shape: shape(2, 2, 1)}, exchange(ForGradients, comm.OpReduceScatter, comm.Data, 4, 10,
			0),
			0.001, 10 * 3 * 0.001, direct},
	} {
		m.Latency.Value = test.latency
		if got := m.seconds(m.place(test.l, test.e.Group), test.e,
			test.how); math.Abs(got-test.want) > 1e-9*test.want {
			t.Errorf("%s: %g s, want %g", test.what, got, test.want)
		}
	}
}

// A step computed by hand: a dense model of two stages, without recomputation and with.
func TestStepByHand(t *testing.T) {
	c := preset(t, "mula-1b")
	in := Input{Model: "mula-1b", Config: c, Trainer: Mula, Precision: xpu.BF16, Machine: simple(),
		Layout: Layout{Shape: shape(1, 1, 2), Optimizer: EPSO, Dispatch: moe.AllToAll, BatchSize: 6, MicroBatchSize: 2,
			SequenceLength: 1024, Recompute: moe.RecomputeNone}}
	r, err := Compute(in)
	if err != nil {
		t.Fatal(err)
	}
	const tokens, h = 2 * 1024, 2048 // of a micro-batch
	layer := 24.0*h*h + 12*1024*h + 18*h*8192
	slow := tokens * (8*layer + 6*50304*h) / 5e11 // the second stage, which has the head
	send := 2 * tokens * h * 4 * (1.0 / 2) / 2e9  // there and back, by each of two ranks of a node; a rank's mean
	const blocks = 2*50304*h/65536 + 16*(4*h*h+3*h*8192)/65536
	// of two ranks: 2 numbers summed; sums of the second stage sent, with times, a source and the
	// state of a hash; 6 numbers broadcast; the numbers of the blocks gathered
	votes := (2*8 + (4*8+112+3*8+132)/2 + 6*8/2 + 4*blocks) / 2e9
	want := Time{Compute: 3 * slow, Stages: 3 * send, Votes: votes, Bubble: slow + send,
		Update: 28 * (8*(4*h*h+3*h*8192) + 50304*h) / 1e9}
	for _, part := range Parts() {
		if got, want := part.Of(r.Time), part.Of(want); math.Abs(got-want) > 1e-9*want {
			t.Errorf("%s: %g s, want %g", part.Name, got, want)
		}
	}
	if got := r.Time.Step(); math.Abs(got-r.StepTime) > 1e-12 || math.Abs(r.TokensPerSecond-6*1024/got) > 1e-6 {
		t.Errorf("step of %g s, %g tokens/s", r.StepTime, r.TokensPerSecond)
	}
	if want := 6 * 1024 * (16*layer + 6*50304*h) / 2; math.Abs(r.FLOPs/want-1) > 1e-12 ||
		math.Abs(r.Computed/(3*slow*5e11)-1) > 1e-12 {
		t.Errorf("%g FLOP of a rank, %g with the most; want %g and %g", r.FLOPs, r.Computed, want, 3*slow*5e11)
	}
	in.Flat = true
	if flat, err := Compute(in); err != nil || flat.StepTime < r.StepTime {
		t.Errorf("flat collectives take %g s, others %g: %v", flat.StepTime, r.StepTime, err)
	}
	in.Flat = false
	in.Layout.Recompute = moe.RecomputeLayers
	again, err := Compute(in)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := again.Time.Compute/r.Time.Compute, 1+8*layer/3/(8*layer+6*50304*h); math.Abs(got/want-1) > 1e-12 {
		t.Errorf("recomputation takes %g times as long, want %g", got, want)
	}
	if again.Memory.Activations >= r.Memory.Activations {
		t.Errorf("recomputation keeps %d bytes, without it %d", again.Memory.Activations, r.Memory.Activations)
	}
}

// Sums of gradients during the backward pass, by hand: the pass of 10 s has the head in its first 2
// s, and two layers of 4 s. Buckets wait for the pass and for each other.
func TestHidden(t *testing.T) {
	s := Stage{Layers: 2}
	for _, test := range []struct {
		what      string
		exchanges []bucketTimes
		hidden    float64
	}{
		{"nothing to send", nil, 0},
		// head in 2..3, last layer in 6..7, first layer after 10
		{"short exchanges", []bucketTimes{{head: 1, layer: 1}}, 2},
		{"the embedding comes last", []bucketTimes{{head: 1, layer: 1, embedding: 3}}, 2},
		// 2..7, 7..12, 12..17
		{"long exchanges follow each other", []bucketTimes{{head: 5, layer: 5}}, 8},
		// experts and the rest of a layer: 6..9, after 10
		{"two groups", []bucketTimes{{layer: 1}, {layer: 2}}, 3},
	} {
		if got := s.hidden(test.exchanges, 2, 10); math.Abs(got-test.hidden) > 1e-12 {
			t.Errorf("%s: %g s are hidden, want %g", test.what, got, test.hidden)
		}
	}

	// In a run, a bucket's time is its share of the weights. The hidden time is a part of the
	// exchanges, and not in the step.
	in := Input{Model: "mula-tiny", Config: preset(t, "mula-tiny"), Trainer: Mula, Precision: xpu.BF16,
		Machine: simple(),
		Layout: Layout{Shape: shape(4, 1, 1), Optimizer: EPSO, Dispatch: moe.AllToAll, BatchSize: 4,
			MicroBatchSize: 1, SequenceLength: 1024, Recompute: moe.RecomputeNone}}
	r, err := Compute(in)
	if err != nil {
		t.Fatal(err)
	}
	all := 0.0
	for _, e := range r.Traffic {
		if e.Purpose == ForGradients {
			all += r.seconds([]Exchange{e})
		}
	}
	c := in.Config
	last := all * float64(c.VocabSize*c.HiddenSize) / float64(r.Stages[0].Replicated+r.Stages[0].Divided)
	if sum := r.Time.Gradients + r.Time.Hidden; math.Abs(sum/all-1) > 1e-9 || r.Time.Hidden <= 0 ||
		r.Time.Gradients < 0.9*last {
		t.Errorf("%g s of gradients after the pass and %g s during it; want %g in all, at least %g after it",
			r.Time.Gradients, r.Time.Hidden, all, last)
	}
}

// The mean of the largest of n normal variables, in 20,000 draws.
func TestWaiting(t *testing.T) {
	m := simple()
	if w := m.waiting(10, 1000); w != 0 {
		t.Errorf("%g s without variation", w)
	}
	m.Variation.Value = 0.1
	random := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 12, 100} {
		sum := 0.0
		for range 20_000 {
			largest := math.Inf(-1)
			for range n {
				largest = max(largest, random.NormFloat64())
			}
			sum += largest
		}
		// ranks compute for 10 s, with a standard deviation of 1 s
		if got, want := m.waiting(10, n), sum/20_000; math.Abs(got-want) > 0.04 {
			t.Errorf("%d ranks wait %g s for the slowest, want %g", n, got, want)
		}
	}
}

// A checkpoint's times, by hand: 12 bytes for each weight, and a node that sends 5e8 bytes/s.
func TestCheckpointTimes(t *testing.T) {
	c := preset(t, "mula-tiny")
	in := Input{Model: "mula-tiny", Config: c, Trainer: Mula, Precision: xpu.BF16, Machine: simple(),
		Layout: Layout{Shape: shape(8, 1, 1), Optimizer: EPSO, Dispatch: moe.AllToAll, BatchSize: 8,
			MicroBatchSize: 1, SequenceLength: 1024, Recompute: moe.RecomputeNone}}
	in.Machine.NodesPerGroup.Value = 100
	n := float64(c.TotalParameters())
	for _, test := range []struct {
		fileSystem  float64
		ranks       int
		write, load float64
	}{
		{1e9, 8, 12 * n / 1e9, 12*n/1e9 + 2*4*n/5e8},
		{1e10, 8, 12 * n / (4 * 5e8), 12*n/(4*5e8) + 2*4*n/5e8}, // limited by four nodes
		{1e8, 2, 12 * n / 1e8, 12*n/1e8 + 4*n/2e9},              // inside a node
		{1e8, 1, 12 * n / 1e8, 12 * n / 1e8},
	} {
		in.Layout.Shape = shape(test.ranks, 1, 1)
		in.Machine.FileSystem.Value = test.fileSystem
		r, err := Compute(in)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Checkpoint; got == nil || got.Bytes != int64(12*n) || math.Abs(got.Write/test.write-1) > 1e-9 ||
			math.Abs(got.Load/test.load-1) > 1e-9 {
			t.Errorf("%d ranks, file system of %g bytes/s: %+v, want %g s to write and %g s to load", test.ranks,
				test.fileSystem, got, test.write, test.load)
		}
	}
	in.Machine.FileSystem.Value = 0
	if r, err := Compute(in); err != nil || r.Checkpoint != nil {
		t.Errorf("without a file system: %+v, %v", r.Checkpoint, err)
	}
}

// If one figure alone decides, a fifth less of it takes a quarter longer.
func TestSensitivities(t *testing.T) {
	in := Input{Model: "mula-tiny", Config: preset(t, "mula-tiny"), Trainer: Mula, Precision: xpu.FP32,
		Machine: simple(),
		Layout: Layout{Shape: shape(1, 1, 1), Optimizer: EPSO, Dispatch: moe.AllToAll, BatchSize: 1024,
			MicroBatchSize: 1024, SequenceLength: 1024, Recompute: moe.RecomputeNone}}
	in.Machine.MemoryBandwidth = Figure{1e15, Published, "an update takes no time"}
	all, err := Sensitivities(in, 0, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Compute(in)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(s Sensitivity) bool { return s.Figure == "compute_efficiency" })
	if i < 0 || slices.ContainsFunc(all, func(s Sensitivity) bool { return s.Figure == "memory_bandwidth" }) {
		t.Fatalf("%+v: want the assumed figures", all)
	}
	if s := all[i]; math.Abs(s.Less.StepTime/r.StepTime-1.25) > 1e-6 ||
		math.Abs(s.More.StepTime/r.StepTime-1/1.2) > 1e-6 || s.Value != 0.5 {
		t.Errorf("%+v of a step of %g s", s, r.StepTime)
	}
	for _, s := range all {
		if s.Figure != "compute_efficiency" && s.Figure != "peak_fp32" && (s.Less.StepTime != r.StepTime ||
			s.More.StepTime != r.StepTime) {
			t.Errorf("%+v of a step of %g s: one rank sends nothing", s, r.StepTime)
		}
	}
	in.Machine.ComputeEfficiency.Value = 1
	if all, err = Sensitivities(in, 0, 0, false); err != nil || math.Abs(all[i].More.StepTime/(r.StepTime/2)-1) > 1e-6 {
		t.Errorf("%+v, %v: an efficiency cannot exceed 1", all, err)
	}
}
