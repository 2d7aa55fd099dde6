package train

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/train/estimate"
	"mula/train/group"
	"mula/xpu/comm"
)

// globalModel is a model with an even number of layers for two groups of two stages. Its first
// layer has no experts.
const globalModel = "model: {preset: mula-nano, model_type: qwen3_moe, num_hidden_layers: 4, head_dim: 16, " +
	"dense_layers: '0', dense_intermediate_size: 48}\naux_loss: {form: global, coefficient: 2}\n"

// The load-balancing loss over the global batch does not depend on the layout, or on the size of
// micro-batches: losses and gradients equal the values of one batch within rounding. One batch has
// the loss of MegaBlocks. Steps with skipped samples are among them, in which data ranks have
// different numbers of rows, or none.
func TestGlobalBalance(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", unevenSkips)
	steps := longtest.Rounds(3, 6)
	run := func(l LayoutConfig, rows int, more string) runOutcome {
		return mustRunRanks(t, ranksConfig(t, plan, l, fmt.Sprintf("%s%ssteps: %d\nmicro_batch_size: %d\n"+
			"evaluate: {every: 0}\n", globalModel, more, steps, rows)), Options{})
	}
	one := run(LayoutConfig{}, 8, "")
	compare := func(name string, got runOutcome, allowed float64) (most float64) {
		for _, field := range []string{"loss", "aux_loss", "grad_norm", "samples", "tokens"} {
			d := apart(t, one.lines, got.lines, field)
			if most = max(most, d); d > allowed {
				t.Errorf("%s: %s differs from one batch by %v", name, field, d)
			}
		}
		return most
	}
	c := ranksConfig(t, plan, LayoutConfig{}, strings.Replace(globalModel, "global", "megablocks", 1)+
		fmt.Sprintf("steps: %d\nmicro_batch_size: 8\nevaluate: {every: 0}\n", steps))
	compare("megablocks, one batch", mustRunRanks(t, c, Options{}), 1e-6)
	c.MicroBatchSize, c.Output = 1, t.TempDir()+"/run"
	if d := apart(t, one.lines, mustRunRanks(t, c, Options{}).lines, "aux_loss"); d < 1e-3 {
		t.Errorf("the loss of each micro-batch differs by only %v, so that this test shows nothing", d)
	}
	tests := []struct {
		layout LayoutConfig
		rows   int
		more   string
	}{
		{LayoutConfig{DP: 1, EP: 1}, 1, ""},
		{LayoutConfig{DP: 1, EP: 2, PP: 2}, 2, ""},
		{LayoutConfig{DP: 2, EP: 2}, 8, ""}, // one micro-batch, whose counts are known before the backward pass
		{LayoutConfig{DP: 2, EP: 1, CP: 2}, 4, "recompute: layers\n"},
		{LayoutConfig{DP: 1, EP: 1, PP: 2, VirtualStages: 2}, 8, ""},
		{LayoutConfig{DP: 1, EP: 2, TP: 2}, 2, ""},
		{LayoutConfig{DP: 1, EP: 1}, 3, "recompute: experts\n"},
		{LayoutConfig{DP: 1, EP: 4}, 1, ""},
		{LayoutConfig{DP: 1, EP: 4}, 8, ""},
		{LayoutConfig{DP: 1, EP: 1, PP: 2}, 1, "recompute: layers\n"},
		{LayoutConfig{DP: 2, EP: 1, PP: 2}, 8, ""},
		{LayoutConfig{DP: 2, EP: 1, PP: 2, VirtualStages: 2}, 1, ""},
		{LayoutConfig{DP: 1, EP: 4, CP: 4, PP: 2}, 8, ""},
	}
	for _, test := range tests[:longtest.Rounds(4, len(tests))] {
		name := fmt.Sprintf("%s, %d rows, %s", test.layout, test.rows, test.more)
		most := compare(name, run(test.layout, test.rows, test.more), 2e-5)
		t.Logf("%s: at most %.1e", name, most)
	}
}

// A rank whose batch is damaged ends the run. The other ranks, which add their counts with its, do
// not wait for it.
func TestGlobalBalanceFails(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	layouts := []LayoutConfig{{DP: 2, EP: 1, PP: 2}, {DP: 2, EP: 1}, {DP: 2, EP: 1, CP: 2}, {DP: 1, EP: 2},
		{DP: 2, EP: 1, PP: 2, VirtualStages: 2}}
	for _, l := range layouts[:longtest.Rounds(2, len(layouts))] {
		for _, rows := range []int{2, 8} {
			c := ranksConfig(t, plan, l, fmt.Sprintf("%ssteps: 3\nmicro_batch_size: %d\n", globalModel, rows))
			_, err := Run(t.Context(), c, Options{
				badTokens: func(rank int, step int64) bool { return rank == 1 && step == 1 }})
			if err == nil || !strings.Contains(err.Error(), "beyond the model's vocabulary") {
				t.Errorf("%+v, %d rows: %v", l, rows, err)
			}
		}
	}
}

// A run resumes with the same bits.
func TestGlobalBalanceResumes(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = globalModel + "steps: 4\nevaluate: {every: 0}\n"
	layout := LayoutConfig{DP: 1, EP: 2, PP: 2}
	whole := mustRun(t, ranksConfig(t, plan, layout, more), Options{})
	c := ranksConfig(t, plan, layout, more)
	mustRun(t, c, stopAfter(2))
	if got := mustRun(t, c, Options{}); got.Weights != whole.Weights || got.LastLoss != whole.LastLoss {
		t.Errorf("the resumed run has weights %.16s…, want %.16s…", got.Weights, whole.Weights)
	}
}

// The forward passes that count choices, and the sums of the counts, send the bytes of the
// estimate: runs with and without them differ by these bytes, for each purpose.
func TestGlobalBalanceTraffic(t *testing.T) {
	t.Parallel()
	path := makePlan(t, t.TempDir(), "plan.json", "")
	plan := mustPlan(t, path)
	tests := []struct {
		layout LayoutConfig
		rows   int
	}{{LayoutConfig{DP: 1, EP: 2, PP: 2}, 2}, {LayoutConfig{DP: 2, EP: 1, CP: 2}, 8},
		{LayoutConfig{DP: 1, EP: 2, PP: 2, VirtualStages: 2}, 2}, {LayoutConfig{DP: 2, EP: 2}, 1},
		{LayoutConfig{DP: 2, EP: 1, CP: 2, PP: 2}, 1}, {LayoutConfig{DP: 1, EP: 2, TP: 2}, 2}}
	for _, test := range tests[:longtest.Rounds(2, len(tests))] {
		for _, dispatch := range []moe.Dispatch{moe.AllGather, moe.AllToAll}[:longtest.Rounds(1, 2)] {
			more := fmt.Sprintf("%ssteps: 2\nmicro_batch_size: %d\nevaluate: {every: 0}\ncheckpoint: {every: 0}\n",
				strings.Replace(globalModel, "'0'", "'0,3'", 1), test.rows)
			sent, want := map[string]map[estimate.Purpose]float64{}, map[string]map[estimate.Purpose]float64{}
			counts := 0.0 // bytes of the numbers of tokens that all-to-alls announce, without global
			for _, form := range []string{"global", "megablocks"} {
				c := ranksConfig(t, path, test.layout, strings.Replace(more, "global", form, 1))
				c.Layout.Dispatch, c.Layout.UniformRouting = dispatch, true
				of := map[estimate.Purpose]float64{}
				var mu sync.Mutex
				mustRun(t, c, Options{ended: func(r *group.Group) {
					mu.Lock()
					defer mu.Unlock()
					add := func(purpose estimate.Purpose, group *comm.Comm) {
						if group == nil {
							return
						}
						for _, o := range group.Traffic() {
							of[purpose] += float64(o.Bytes())
						}
					}
					add(estimate.ForDispatch, r.Group(comm.EP))
					add(estimate.ForSequences, r.Heads)
					add(estimate.ForTensor, r.Group(comm.TP))
					add(estimate.ForPipeline, r.Group(comm.PP))
					add(estimate.ForPipeline, r.Back)
					add(estimate.ForVotes, r.Stage)
				}})
				in, err := c.EstimateInput(plan, simulatedMachine())
				if err != nil {
					t.Fatal(err)
				}
				r, err := estimate.Compute(in)
				if err != nil {
					t.Fatal(err)
				}
				sent[form], want[form] = of, map[estimate.Purpose]float64{}
				for _, e := range r.Traffic { // of a stage; both have the same numbers of layers
					want[form][e.Purpose] += float64(c.Steps) * float64(e.Total) * float64(c.Layout.Ranks()/e.Ranks)
				}
				l, ranks := in.Layout, float64(c.Layout.Ranks())
				counts = 4 * float64(c.Steps) * ranks * float64(l.MicroBatches()*(l.Size(comm.EP)-1)*2/l.Size(comm.PP))
			}
			for purpose := range sent["global"] {
				more := sent["global"][purpose] - sent["megablocks"][purpose]
				expected := want["global"][purpose] - want["megablocks"][purpose]
				// Uniform routing sends another number of copies of tokens, in all exchanges alike.
				if purpose == estimate.ForDispatch && dispatch == moe.AllToAll && counts > 0 {
					expected = counts + (expected-counts)*(sent["megablocks"][purpose]-counts)/
						(want["megablocks"][purpose]-counts)
				}
				if math.Abs(more-expected) > 1e-9*expected {
					t.Errorf("%+v, %d rows, %s: %v bytes more for %s, the estimate has %v more", test.layout, test.rows,
						dispatch, more, purpose, expected)
				}
			}
			same := func(p estimate.Purpose) bool { return sent["global"][p] == sent["megablocks"][p] }
			if one := test.rows == 8; one != (same(estimate.ForDispatch) && same(estimate.ForPipeline)) {
				t.Errorf("%+v, %d rows: passes that only count are missing, or not needed", test.layout, test.rows)
			}
		}
	}
}

// The sums of the choices of each sequence send the bytes and the messages of the estimate: runs
// with and without them differ by these, in the groups of ranks that share sequences.
func TestSequenceBalanceTraffic(t *testing.T) {
	t.Parallel()
	path := makePlan(t, t.TempDir(), "plan.json", "")
	plan := mustPlan(t, path)
	layouts := []LayoutConfig{{DP: 2, EP: 1, CP: 2}, {DP: 2, EP: 1, CP: 2, PP: 2, VirtualStages: 2},
		{DP: 1, EP: 2, CP: 2, PP: 2}, {DP: 2, EP: 1, TP: 2, CP: 2}}
	for _, layout := range layouts[:longtest.Rounds(1, len(layouts))] {
		type sums struct{ bytes, calls int64 }
		sent, want := map[moe.AuxForm]sums{}, map[moe.AuxForm]sums{}
		for _, form := range []moe.AuxForm{moe.AuxSequence, moe.AuxHF} {
			model := strings.NewReplacer("'0'", "'0,3'", "global", string(form)).Replace(globalModel)
			c := ranksConfig(t, path, layout, model+
				"steps: 2\nmicro_batch_size: 2\nevaluate: {every: 0}\ncheckpoint: {every: 0}\n")
			of := sums{}
			var mu sync.Mutex
			mustRun(t, c, Options{ended: func(r *group.Group) {
				mu.Lock()
				defer mu.Unlock()
				o := r.Sequence.Traffic()[comm.OpAllReduce]
				of = sums{of.bytes + o.Bytes(), of.calls + o.Calls}
			}})
			sent[form] = of
			in, err := c.EstimateInput(plan, simulatedMachine())
			if err != nil {
				t.Fatal(err)
			}
			r, err := estimate.Compute(in)
			if err != nil {
				t.Fatal(err)
			}
			of = sums{}
			for _, e := range r.Traffic { // of a stage; both have as many layers, and as many groups with experts
				if e.Purpose == estimate.ForSequences && e.Operation == comm.OpAllReduce {
					of = sums{of.bytes + c.Steps*e.Total*int64(c.Layout.Ranks()/e.Ranks),
						of.calls + c.Steps*int64(e.Calls*c.Layout.Ranks())}
				}
			}
			want[form] = of
		}
		more, expected := sums{}, sums{}
		for form, sign := range map[moe.AuxForm]int64{moe.AuxSequence: 1, moe.AuxHF: -1} {
			more = sums{more.bytes + sign*sent[form].bytes, more.calls + sign*sent[form].calls}
			expected = sums{expected.bytes + sign*want[form].bytes, expected.calls + sign*want[form].calls}
		}
		if more != expected || more.bytes == 0 {
			t.Errorf("%+v: %+v more than without, the estimate says %+v", layout, more, expected)
		}
	}
}
