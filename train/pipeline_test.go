package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/blend"
	"mula/internal/longtest"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/estimate"
	"mula/train/group"
	"mula/train/optimizer"
	"mula/train/optimizer/optimizertest"
	"mula/train/record"
	"mula/xpu/comm"
)

// pipelineModel has layers that 2 and 3 stages cannot divide evenly.
const pipelineModel = "model: {preset: mula-nano, num_hidden_layers: 5}\n"

// unevenSkips leave steps in which the rows of data ranks differ, one with a single row, and one
// with none.
const unevenSkips = "skips:\n- {from: 17, to: 23}\n- {from: 24, to: 32}\n- {from: 40, to: 44}\n"

func sameBits(t *testing.T, what string, want, got runOutcome) {
	t.Helper()
	if got.Weights != want.Weights || got.FirstLoss != want.FirstLoss || got.LastLoss != want.LastLoss {
		t.Errorf("%s: weights %.16s…, want %.16s…; losses %v and %v, want %v and %v", what, got.Weights, want.Weights,
			got.FirstLoss, got.LastLoss, want.FirstLoss, want.LastLoss)
	}
	if diff := cmp.Diff(withoutLayout(want.lines), withoutLayout(got.lines)); diff != "" {
		t.Errorf("%s: records differ:\n%s", what, diff)
	}
}

// The stages of a pipeline change no bit: with the same dp and ep, a run with stages has the
// losses, norms, ratios, counts, evaluations and weights of a run without stages, in all three
// schemes. If dp and ep are 1, they equal one rank. This includes steps with skipped rows, and with
// fewer micro-batches than stages. Otherwise they equal one rank within the rounding of float32.
func TestPipelineLayouts(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", unevenSkips)
	run := func(l LayoutConfig) runOutcome {
		return mustRunRanks(t, ranksConfig(t, plan, l, pipelineModel+"steps: 6\nmicro_batch_size: 1\nevaluate: "+
			"{every: 3, samples: 5}\n"), Options{})
	}
	one := run(LayoutConfig{})
	for _, test := range []struct {
		layout  LayoutConfig
		schemes []estimate.Scheme
	}{
		{LayoutConfig{DP: 1, PP: 2, EP: 1}, schemes[2:]},
		{LayoutConfig{DP: 1, PP: 3, EP: 1}, schemes[:1]},
		{LayoutConfig{DP: 1, PP: 2, EP: 2}, schemes},
		{LayoutConfig{DP: 2, PP: 2, EP: 1}, schemes},
		{LayoutConfig{DP: 2, PP: 2, EP: 2}, schemes[2:]},
		// with groups of layers: even, uneven, and with ranks that share experts
		{LayoutConfig{DP: 1, PP: 2, EP: 1, VirtualStages: 2}, schemes[:1]},
		{LayoutConfig{DP: 1, PP: 2, EP: 2, VirtualStages: 2}, schemes[2:]},
		{LayoutConfig{DP: 2, PP: 2, EP: 1, VirtualStages: 2}, schemes[1:]},
	} {
		l := test.layout
		name := fmt.Sprintf("dp %d, pp %d, ep %d, %d groups", l.DP, l.PP, l.EP, l.VirtualStages)
		want := one
		if l.DP*l.EP > 1 {
			want = run(LayoutConfig{DP: l.DP, PP: 1, EP: l.EP})
			for number, most := range map[string]float64{"loss": 1e-5, "grad_norm": 1e-4, "z_loss": 1e-4,
				"eval.loss": 1e-5, "update_ratio.experts": 1e-3} {
				if d := apart(t, one.lines, want.lines, number); d > most {
					t.Errorf("%s: %s differs from the %[2]s of one rank by %v", name, number, d)
				}
			}
		}
		for _, scheme := range test.schemes {
			l.Optimizer = scheme
			sameBits(t, name+", "+string(scheme), want, run(l))
		}
	}
}

// Every optimizer does on stages what it does without them, SophiaG with the targets that it draws;
// a dense model has nothing for a router to send.
func TestPipelineOptimizers(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, name := range optimizer.Names() {
		name := optimizer.Name(name)
		more, dp := fmt.Sprintf("optimizer: {name: %s}\n", name), 1
		switch name {
		case optimizer.AdamW:
			more = "model: {preset: mula-1b, num_hidden_layers: 3, hidden_size: 32, intermediate_size: 48, " +
				"num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 512}\nrecompute: layers\n"
		case optimizer.SophiaG:
			more, dp = "optimizer: {name: sophiag, hessian_every: 2}\n", 2
		case optimizer.ScheduleFreeAdamW:
			more += "schedule: {name: constant, learning_rate: 3e-3, warmup_steps: 2}\n"
		}
		more += "steps: 6\nevaluate: {every: 3, samples: 5}\n"
		want := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{DP: dp, EP: 1}, more), Options{})
		sameBits(t, string(name), want, mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{DP: dp, PP: 2, EP: 1}, more),
			Options{}))
	}
}

// groupsOf returns the number of groups of layers of each stage: two groups of two stages.
func groupsOf(stages int) int {
	if stages == 2 {
		return 2
	}
	return 1
}

// A checkpoint of a pipeline has every tensor once, and loads with another number of stages: a
// loaded and saved state is the same to the byte, and the next losses equal the losses of a run
// that kept its layout.
func TestPipelineResume(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = pipelineModel + "steps: 12\n"
	one := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, more), Options{})
	c := ranksConfig(t, plan, LayoutConfig{DP: 1, PP: 2, EP: 1}, more)
	for _, stop := range []struct {
		step     int64
		pp, then int
	}{{1, 2, 1}, {3, 1, 3}, {5, 3, 2}, {7, 2, 5}} {
		c.Layout.PP, c.Layout.VirtualStages = stop.pp, groupsOf(stop.pp)
		mustRun(t, c, stopAfter(stop.step))
		saved, _, err := checkpoint.Find(context.Background(), c.Output)
		if err != nil {
			t.Fatal(err)
		}
		held := map[string]int{}
		files, err := filepath.Glob(filepath.Join(saved.Dir, "model*.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range files {
			f, err := safetensors.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, tensor := range f.Tensors() {
				held[tensor.Name]++
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, tensor := range c.Model.Tensors() {
			if held[tensor.Name] != 1 {
				t.Errorf("pp %d: %s is there %d times", stop.pp, tensor.Name, held[tensor.Name])
			}
		}
		c.Layout.PP, c.Layout.VirtualStages = stop.then, groupsOf(stop.then)
		if !maps.EqualFunc(gathered(t, saved.Dir), gathered(t, reload(t, c)), slices.Equal[[]float32]) {
			t.Errorf("from pp %d to %d: another state", stop.pp, stop.then)
		}
	}
	var warnings []string
	got := mustRunRanks(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	sameBits(t, "with other stages after every stop", one, got)
	if len(warnings) > 0 {
		t.Errorf("warnings: %q", warnings)
	}

	// With another dp and ep the last bits differ.
	c = ranksConfig(t, plan, LayoutConfig{DP: 2, PP: 2, EP: 2}, more)
	mustRun(t, c, stopAfter(5))
	c.Layout.DP, c.Layout.PP, c.Layout.EP, c.Layout.VirtualStages = 2, 3, 1, 1
	got = mustRunRanks(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	for _, name := range []string{"loss", "grad_norm"} {
		if d := apart(t, one.lines, got.lines, name); d > 1e-4 {
			t.Errorf("%s differs from the %[1]s of one rank by %v", name, d)
		}
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "was computed with the arithmetic of") {
		t.Errorf("warnings: %q", warnings)
	}
}

// The bytes and calls between stages in some steps equal the estimate. Gradients and weights are
// sent only between the ranks of a stage, with the bytes of the estimate, and so are votes.
func TestPipelineBytes(t *testing.T) {
	t.Parallel()
	path := makePlan(t, t.TempDir(), "plan.json", "")
	plan, err := blend.ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []LayoutConfig{{DP: 1, PP: 2, EP: 1}, {DP: 2, PP: 3, EP: 1}, {DP: 1, PP: 2, EP: 2},
		{DP: 2, PP: 2, EP: 2}, {DP: 1, PP: 2, EP: 2, VirtualStages: 2}} {
		for _, micro := range []int{1, 3} {
			pipelineBytes(t, path, plan, l, pipelineModel, micro)
		}
	}
	// updates of correction biases are not in the estimate
	const predicts = predictingStages + "router_bias: {update_speed: 0}\n"
	pipelineBytes(t, path, plan, LayoutConfig{DP: 2, PP: 2, EP: 1, VirtualStages: 2}, predicts, 3)
	pipelineBytes(t, path, plan, LayoutConfig{DP: 2, PP: 3, EP: 1}, predicts+"aux_loss: {form: global}\n", 1)
}

// pipelineBytes compares the bytes of a run of some steps with the estimate.
func pipelineBytes(t *testing.T, path string, plan *blend.Plan, l LayoutConfig, model string, micro int) {
	t.Helper()
	const steps = 3
	c := ranksConfig(t, path, l, model+fmt.Sprintf("steps: %d\nmicro_batch_size: %d\nevaluate: {every: 0}\n", steps,
		micro))
	var mu sync.Mutex
	var bytes, calls, most, embedded, sentEmbeddings, weights, votes int64
	mustRun(t, c, Options{ended: func(r *group.Group) {
		mu.Lock()
		defer mu.Unlock()
		own := int64(0)
		for _, pipeline := range []*comm.Comm{r.Group(comm.PP), r.Back} {
			if pipeline == nil {
				continue
			}
			for _, operation := range pipeline.Traffic() {
				bytes += operation.Bytes()
				calls += operation.Calls
				own += operation.Calls
			}
		}
		most = max(most, own)
		if r.Embeddings != nil {
			for _, operation := range r.Embeddings.Traffic() {
				embedded += operation.Bytes()
				sentEmbeddings = max(sentEmbeddings, operation.Calls)
			}
		}
		for _, c := range []*comm.Comm{r.Group(comm.Replicas), r.Group(comm.Data), r.Within} {
			for _, operation := range c.Traffic() {
				weights += operation.Bytes()
			}
		}
		for _, operation := range r.Stage.Traffic() {
			votes += operation.Bytes()
		}
	}})
	in, err := c.EstimateInput(plan, estimate.Machine{})
	if err != nil {
		t.Fatal(err)
	}
	stages, err := estimate.Stages(in.Config, in.Layout)
	if err != nil {
		t.Fatal(err)
	}
	sent := estimate.PipelineTraffic(in.Config, in.Layout, in.Trainer)
	if bytes != steps*sent[0].Total*int64(l.DP*l.EP) {
		t.Errorf("%+v, micro-batches of %d: the stages sent %d bytes, the estimate says %+v", l, micro, bytes, sent)
	}
	if len(sent) != 1 || embedded != 0 {
		if len(sent) != 2 || embedded != steps*sent[1].Total*int64(l.DP*l.EP) ||
			sentEmbeddings != int64(steps*sent[1].Calls) {
			t.Errorf("%+v, micro-batches of %d: stages sent %d bytes of embeddings, one of them %d times, the "+
				"estimate says %+v", l, micro, embedded, sentEmbeddings, sent)
		}
	}
	groups := max(1, l.VirtualStages)
	each := int64(steps * sent[0].Calls)
	if calls != each*int64((groups*l.PP-1)*l.DP*l.EP)/int64(groups) || l.PP > 2 && most != each {
		t.Errorf("%+v, micro-batches of %d: the stages sent %d times, one of them %d times, the estimate says %d", l,
			micro, calls, most, each)
	}
	var want, wantVotes int64
	for i, stage := range stages {
		for _, e := range estimate.OptimizerTraffic(stage, in.Layout, in.Trainer) {
			want += e.Total * int64(l.DP*l.EP/e.Ranks)
		}
		for _, e := range estimate.StageVotes(in.Config, i, in.Layout, in.Trainer) {
			wantVotes += e.Total
		}
	}
	if weights != steps*want {
		t.Errorf("%+v: %d bytes of gradients and weights, the estimate says %d", l, weights, steps*want)
	}
	if votes != steps*wantVotes {
		t.Errorf("%+v: %d bytes of votes in the stages, the estimate says %d", l, votes, steps*wantVotes)
	}
}

// The votes between all ranks in a step have the bytes and calls of the estimate.
// [TestPipelineBytes] has the votes between the ranks of a stage.
func TestVoteBytes(t *testing.T) {
	t.Parallel()
	const from, to = 1, 3 // steps
	path := makePlan(t, t.TempDir(), "plan.json", "")
	plan, err := blend.ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range []LayoutConfig{{DP: 2, PP: 1, EP: 2}, {DP: 2, PP: 3, EP: 1}, {DP: 4, PP: 1, EP: 2},
		{DP: 2, PP: 3, EP: 1, Norm: reduceNorms}} {
		model := pipelineModel
		if i == 3 {
			model = predictingStages + "router_bias: {update_speed: 0}\n"
		}
		c := ranksConfig(t, path, l, model+fmt.Sprintf("steps: %d\nevaluate: {every: 0}\n", to+1))
		if i == 1 {
			c.Model.ExpertCapacity = 1.5 // whose dropped choices are in the votes
		}
		c.Layout.CheckReplicasEvery = 0
		if l.Norm != "" {
			c.Layout.Norm = l.Norm
		}
		worlds := make([]*comm.Comm, c.Layout.Ranks())
		got := map[comm.Operation]comm.Traffic{}
		var mu sync.Mutex
		seen := map[[2]int64]bool{} // rank, step
		// The first bucket of a step comes after the exchanges before the passes and before those
		// after them.
		count := func(rank int, step int64, _ moe.Bucket) error {
			mu.Lock()
			defer mu.Unlock()
			if key := [2]int64{int64(rank), step}; seen[key] || step != from && step != to {
				return nil
			} else {
				seen[key] = true
			}
			sign := int64(1)
			if step == from {
				sign = -1
			}
			for _, o := range worlds[rank].Traffic() {
				sum := got[o.Operation]
				got[o.Operation] = comm.Traffic{Operation: o.Operation, Calls: sum.Calls + sign*o.Calls,
					Inside: sum.Inside + sign*o.Inside}
			}
			return nil
		}
		optimizertest.Together(t, len(worlds), func(world *comm.Comm) error {
			mu.Lock()
			worlds[world.Rank()] = world
			mu.Unlock()
			_, err := Run(t.Context(), c, Options{World: world, BeforeSum: count})
			return err
		})
		in, err := c.EstimateInput(plan, estimate.Machine{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range estimate.WorldVotes(in.Config, in.Layout, in.Trainer) {
			sent := got[e.Operation]
			if sent.Bytes() != (to-from)*e.Total ||
				e.Operation != comm.OpSend && sent.Calls != int64((to-from)*e.Calls*e.Ranks) {
				t.Errorf("%+v: %s: %d bytes in %d calls in %d steps, the estimate says %+v for each", l, e.Name,
					sent.Bytes(), sent.Calls, to-from, e)
			}
			delete(got, e.Operation)
		}
		for operation, sent := range got {
			if sent.Bytes() != 0 {
				t.Errorf("%+v: %s: %d bytes that are not in the estimate", l, operation, sent.Bytes())
			}
		}
	}
}

// What is not finite on one stage goes on to others: the stage that made it is named, all end
// together, and no weight has changed; or all skip the step.
func TestPipelineNotFinite(t *testing.T) {
	longtest.SkipIfShort(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	t.Setenv("MULA_HOST", "node-7")
	for _, test := range []struct {
		rank   int
		layout LayoutConfig
		// rather than a gradient: the next step's hidden states are not finite, and the last stage
		// is the first to have a loss
		weight bool
		want   string
		model  string
	}{
		{2, LayoutConfig{DP: 2, PP: 2, EP: 1}, false, "the gradient is", pipelineModel},
		{1, LayoutConfig{DP: 1, PP: 2, EP: 1}, false, "the gradient is", pipelineModel},
		{1, LayoutConfig{DP: 1, PP: 3, EP: 1}, true, "the loss is", pipelineModel},
		{2, LayoutConfig{DP: 1, PP: 3, EP: 1}, true, "the loss is", pipelineModel},
		{1, LayoutConfig{DP: 1, PP: 2, EP: 1, VirtualStages: 2}, false, "the gradient is", pipelineModel},
		{0, LayoutConfig{DP: 1, PP: 2, EP: 1, VirtualStages: 2}, true, "the loss is", pipelineModel},
		{0, LayoutConfig{DP: 1, PP: 2, EP: 1}, true, "the loss is", predictingStages},
		{1, LayoutConfig{DP: 1, PP: 2, EP: 1}, true, "the loss is", predictingStages},
	} {
		fault := Options{BeforeSum: func(rank int, step int64, b moe.Bucket) error {
			if rank != test.rank || b.Divided {
				return nil
			}
			if test.weight && step == 4 {
				b.Weight.Floats()[0] = float32(math.NaN())
			} else if !test.weight && step == 5 {
				b.Grad.Floats()[b.Grad.Elements()-1] = float32(math.NaN())
			}
			return nil
		}}
		c := ranksConfig(t, plan, test.layout, test.model+"steps: 8\nevaluate: {every: 0}\n")
		_, err := Run(context.Background(), c, fault)
		if !errors.Is(err, moe.ErrNotFinite) || !collective.Shared(err) ||
			!strings.Contains(err.Error(), fmt.Sprintf("rank %d on node-7: step 5: %s", test.rank, test.want)) {
			t.Errorf("%+v: %v", test, err)
		}
		if failures := readLines(t, filepath.Join(c.Output, record.FailuresFile)); len(failures) != 1 ||
			failures[0]["rank"] != json.Number(fmt.Sprint(test.rank)) {
			t.Errorf("%+v: failures %v", test, failures)
		}
		if test.weight {
			continue
		}
		c = ranksConfig(t, plan, test.layout, test.model+"steps: 8\nevaluate: {every: 0}\nspikes: {action: skip}\n")
		if got := mustRun(t, c, fault); got.LeftOut != 8 {
			t.Errorf("%+v: %d samples are left out", test, got.LeftOut)
		}
	}
}

// A stage that ends in the middle of a step ends the others with an error, and the run resumes from
// its checkpoint without a difference.
func TestPipelineStageDies(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, l := range []LayoutConfig{{DP: 2, PP: 2, EP: 1}, {DP: 1, PP: 2, EP: 2, VirtualStages: 2}} {
		whole := mustRun(t, ranksConfig(t, plan, l, pipelineModel+"steps: 8\nevaluate: {every: 0}\n"), Options{})
		for _, victim := range []int{0, l.DP*l.PP*l.EP - 1} {
			c := ranksConfig(t, plan, l, pipelineModel+"steps: 8\ncheckpoint: {every: 3}\nevaluate: {every: 0}\n")
			dies := errors.New("dies")
			_, err := Run(context.Background(), c, Options{BeforeSum: func(rank int, step int64, b moe.Bucket) error {
				if rank == victim && step == 4 {
					return dies
				}
				return nil
			}})
			if !errors.Is(err, dies) || collective.Shared(err) ||
				!strings.Contains(err.Error(), fmt.Sprintf("rank %d on ", victim)) {
				t.Fatalf("%+v: %v", l, err)
			}
			if r := mustRun(t, c, Options{}); r.Weights != whole.Weights || r.Resumed != checkpoint.Name(3) {
				t.Errorf("%+v: weights %.16s… from %s, %.16s… of a whole run", l, r.Weights, r.Resumed, whole.Weights)
			}
		}
	}
}

// If one stage cannot compute, every stage returns its error with its name, and no stage hangs,
// whichever stage it is.
func TestPipelineStageRefuses(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, l := range []LayoutConfig{{DP: 1, PP: 3, EP: 1}, {DP: 1, PP: 2, EP: 2},
		{DP: 1, PP: 2, EP: 2, VirtualStages: 2}} {
		for rank := range l.DP * l.PP * l.EP {
			model := pipelineModel
			if l.VirtualStages > 1 {
				model = predictingStages
			}
			c := ranksConfig(t, plan, l, model+"micro_batch_size: 1\nsteps: 4\n")
			_, err := Run(context.Background(), c, Options{badTokens: func(r int, step int64) bool {
				return r == rank &&
					step == 2
			}})
			if err == nil || !collective.Shared(err) || !strings.Contains(err.Error(), fmt.Sprintf("rank %d on ",
				rank)) ||
				!strings.Contains(err.Error(), "vocabulary") {
				t.Errorf("%+v, rank %d: %v", l, rank, err)
			}
			failures := readLines(t, filepath.Join(c.Output, record.FailuresFile))
			if len(failures) != 1 || failures[0]["rank"] != json.Number(fmt.Sprint(rank)) {
				t.Errorf("%+v, rank %d: failures %v", l, rank, failures)
			}
		}
	}
}

// The summary has what the stage takes that takes most, and how long stages wait.
func TestPipelineSummary(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	summary := func(l LayoutConfig) (s Summary) {
		c := ranksConfig(t, plan, l, pipelineModel+"steps: 2\nmicro_batch_size: 1\n")
		mustRun(t, c, Options{Report: func(made Summary) { s = made }})
		return s
	}
	one, three := summary(LayoutConfig{}), summary(LayoutConfig{DP: 1, PP: 3, EP: 1})
	if one.Bubble != 0 || one.MicroBatches != 8 || three.Bubble != 0.2 || three.MicroBatches != 8 {
		t.Errorf("bubbles %v and %v", one.Bubble, three.Bubble)
	}
	layer := int64(8*3*64*32 + 8*64 + 4*64*64 + 4*64) // experts, router, attention, norms
	if want := 4 * (2*layer + 512*64 + 64); three.Memory.Weights != want || three.Memory.Optimizer != 2*want {
		t.Errorf("weights %d and moments %d of the largest stage, want %d and twice that", three.Memory.Weights,
			three.Memory.Optimizer, want)
	}
	if three.Memory.Total() >= one.Memory.Total() {
		t.Errorf("a stage takes %d bytes, all of it %d", three.Memory.Total(), one.Memory.Total())
	}
}
