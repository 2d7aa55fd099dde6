package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/blend/fingerprint"
	"mula/internal/longtest"
	"mula/moe"
	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/estimate"
	"mula/train/group"
	"mula/train/optimizer"
	"mula/train/optimizer/optimizertest"
	"mula/train/record"
	"mula/xpu"
	"mula/xpu/comm"
)

// ranksConfig is a run of 20 steps that every layout of 4 ranks can do. The micro-batches are one
// rank's share at most, so that the load-balancing loss is over the same tokens in every layout;
// the run is long enough for a wrong scale of gradients to show.
func ranksConfig(t testing.TB, plan string, l LayoutConfig, more string) Config {
	t.Helper()
	for _, line := range []string{"steps: 20", "micro_batch_size: 2", "checkpoint: {every: 0}",
		"evaluate: {every: 10, samples: 5}"} {
		if name, _, _ := strings.Cut(line, ":"); !strings.Contains("\n"+more, "\n"+name+":") {
			more += line + "\n"
		}
	}
	c := testConfig(t, plan, more)
	c.Layout.CheckReplicasEvery = 5
	if l.DP > 0 {
		c.Layout.DP, c.Layout.PP, c.Layout.EP = l.DP, max(1, l.PP), l.EP
	}
	c.Layout.CP, c.Layout.TP, c.Layout.VirtualStages = max(1, l.CP), max(1, l.TP), max(1, l.VirtualStages)
	if l.Optimizer != "" {
		c.Layout.Optimizer = l.Optimizer
	}
	return c
}

// oneRank returns the groups of a run of one rank.
func oneRank(t testing.TB) *group.Group {
	t.Helper()
	r, err := group.New(t.Context(), comm.NewSingle(), comm.NewShape(nil), group.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// An outcome has the results of a run.
type runOutcome struct {
	Result
	lines   []map[string]any
	weights map[string][]float32
}

func outcomeOf(t testing.TB, c Config, r Result) runOutcome {
	t.Helper()
	m, err := moe.Open(r.Checkpoint, device(t, 1))
	if err != nil {
		t.Fatal(err)
	}
	o := runOutcome{r, metricsOf(t, c.Output), map[string][]float32{}}
	for _, p := range m.Parameters() {
		o.weights[p.Name] = p.Weight.Floats()
	}
	return o
}

func mustRunRanks(t testing.TB, c Config, o Options) runOutcome {
	t.Helper()
	return outcomeOf(t, c, mustRun(t, c, o))
}

// number returns the number with this name in a line of metrics.jsonl.
func number(line map[string]any, name string) (float64, bool) {
	if outer, inner, ok := strings.Cut(name, "."); ok {
		line, _ = line[outer].(map[string]any)
		name = inner
	}
	text, ok := line[name].(json.Number)
	if !ok {
		return 0, false
	}
	x, err := text.Float64()
	return x, err == nil
}

// apart is the largest difference of two runs in a number of metrics.jsonl, relative to its size.
func apart(t testing.TB, a, b []map[string]any, name string) float64 {
	t.Helper()
	if len(a) != len(b) {
		t.Fatalf("%d and %d lines", len(a), len(b))
	}
	var worst float64
	found := false
	for i := range a {
		x, ok := number(a[i], name)
		y, also := number(b[i], name)
		if ok != also {
			t.Fatalf("line %d: %v and %v", i, a[i], b[i])
		}
		if ok {
			found = true
			worst = max(worst, math.Abs(x-y)/max(math.Abs(x), 1e-3))
		}
	}
	if !found {
		t.Fatalf("no line has %s", name)
	}
	return worst
}

// I1, I4, I5: in every layout of 4 ranks the three schemes leave the same bytes, and the losses,
// norms and weights of one rank within the rounding of float32. A wrong factor in one kind of
// gradient moves the norms of the first steps by far more.
func TestI5Layouts(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	one := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, ""), Options{})
	for _, l := range layouts {
		var first runOutcome
		for i, scheme := range schemes {
			l.Optimizer = scheme
			got := mustRunRanks(t, ranksConfig(t, plan, l, ""), Options{})
			if i == 0 {
				first = got
			} else if got.Weights != first.Weights || got.LastLoss != first.LastLoss {
				t.Errorf("dp %d, ep %d: weights %.16s… under %s, %.16s… under %s", l.DP, l.EP, got.Weights, scheme,
					first.Weights, schemes[0])
			} else if diff := cmp.Diff(withoutLayout(first.lines), withoutLayout(got.lines)); diff != "" {
				t.Errorf("dp %d, ep %d: records under %s and %s differ:\n%s", l.DP, l.EP, schemes[0], scheme, diff)
			}
		}
		for name, most := range map[string]float64{"loss": 1e-6, "grad_norm": 1e-5, "aux_loss": 1e-6,
			"learning_rate": 0, "samples": 0,
			"z_loss": 1e-5, "eval.loss": 1e-6, "eval.mix_loss": 1e-6, "eval.margin": 1e-4, "update_ratio.experts": 1e-4,
			"update_ratio.norms": 1e-4} {
			d := apart(t, one.lines, first.lines, name)
			t.Logf("dp %d, ep %d: %s differs by %.2g", l.DP, l.EP, name, d)
			if d > most {
				t.Errorf("dp %d, ep %d: %s differs from the %[3]s of one rank by %v, at most %v is allowed", l.DP, l.EP,
					name, d, most)
			}
		}
		var worst float64
		for name, weights := range one.weights {
			for i, w := range weights {
				worst = max(worst, math.Abs(float64(w-first.weights[name][i])))
			}
		}
		t.Logf("dp %d, ep %d: weights differ by %.2g", l.DP, l.EP, worst)
		if worst > 1e-4 {
			// a thirtieth of the learning rate: where a moment is near zero, its last bits decide
			// on the step
			t.Errorf("dp %d, ep %d: weights differ from the weights of one rank by %v", l.DP, l.EP, worst)
		}
		for i := range one.lines {
			for _, name := range []string{"source_samples", "expert_tokens"} {
				if name == "expert_tokens" && i > 10 {
					continue // a token near the border between two experts may take the other one
				}
				if diff := cmp.Diff(one.lines[i][name], first.lines[i][name]); diff != "" {
					t.Errorf("dp %d, ep %d, line %d: %s:\n%s", l.DP, l.EP, i, name, diff)
				}
			}
		}
		a, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(one.Checkpoint)), fingerprint.LogFile))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(first.Checkpoint)), fingerprint.LogFile))
		if err != nil {
			t.Fatal(err)
		}
		if string(a) != string(b) {
			t.Errorf("dp %d, ep %d: fingerprints differ from those of one rank", l.DP, l.EP)
		}
	}
}

// withoutLayout are lines of metrics.jsonl without the name of the layout.
func withoutLayout(lines []map[string]any) []map[string]any {
	for _, line := range lines {
		if run, ok := line["run"].(map[string]any); ok {
			delete(run, "layout")
		}
	}
	return lines
}

// I10 in a run: the groups of gradients and weights have sent the bytes of the formulas after some
// steps, over all ranks, and nothing else was sent there: not with evaluations, checkpoints and
// comparisons of replicas.
func TestI10Run(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	const steps = 3
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for i, l := range slices.Concat(layouts, layouts) {
		for _, scheme := range schemes {
			l.Optimizer = scheme
			c := ranksConfig(t, plan, l, fmt.Sprintf("steps: %d\ncheckpoint: {every: 2}\nevaluate: {every: 1, "+
				"samples: 2}\n", steps))
			if i >= len(layouts) {
				c.Precision = mixed[i%len(mixed)]
			}
			c.Layout.CheckReplicasEvery = 1
			var mu sync.Mutex
			var got int64
			mustRun(t, c, Options{ended: func(r *group.Group) {
				mu.Lock()
				defer mu.Unlock()
				for _, c := range []*comm.Comm{r.Group(comm.Replicas), r.Group(comm.Data), r.Within} {
					for _, operation := range c.Traffic() {
						got += operation.Bytes()
					}
				}
			}})
			x := int64(2 * 8 * 3 * 64 * 32) // weights of all experts
			n := c.Model.TotalParameters() - x
			dp, ep := int64(l.DP), int64(l.EP)
			want := 8*n*(dp*ep-1) + 8*x*(dp-1)
			if scheme == estimate.SO {
				want = 8*n*(ep-1)*dp + 8*n*(dp-1)*ep + 8*x*(dp-1)
			}
			if c.Precision.Weights() == xpu.BFloat16 {
				want /= 2
			}
			if got != steps*want {
				t.Errorf("dp %d, ep %d, %s: %d bytes in %d steps, want %d", l.DP, l.EP, scheme, got, steps, steps*want)
			}
		}
	}
}

// I4 of the other optimizers, in a run: the schemes leave the same bytes.
func TestI4Optimizers(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, name := range optimizer.Names() {
		name := optimizer.Name(name)
		if name == optimizer.AdamW {
			continue
		}
		more := fmt.Sprintf("optimizer: {name: %s}\n", name)
		switch name {
		case optimizer.SophiaG:
			more = "optimizer: {name: sophiag, hessian_every: 3}\n"
		case optimizer.ScheduleFreeAdamW:
			more += "schedule: {name: constant, learning_rate: 3e-3, warmup_steps: 2}\n"
		}
		var first string
		for i, scheme := range schemes {
			c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 2, Optimizer: scheme}, more)
			c.Steps = 8
			r := mustRun(t, c, Options{})
			if i == 0 {
				first = r.Weights
			} else if r.Weights != first {
				t.Errorf("%s: weights %.16s… under %s, %.16s… under %s", name, r.Weights, scheme, first, schemes[0])
			}
		}
	}
}

// I8, I9: weights and moments are float32 wherever they are, also where products round their
// operands to bfloat16: the schemes agree, and steps far smaller than what bfloat16 can tell from 1
// move the weights of norms.
func TestI9Float32(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, precision := range []xpu.Precision{xpu.BF16, xpu.BF16Mixed, xpu.BF16Compact} {
		var first string
		for i, scheme := range schemes {
			c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 2, Optimizer: scheme},
				"steps: 6\nschedule: {learning_rate: 1e-5, warmup_steps: 2}\n")
			c.Precision = precision
			got := mustRunRanks(t, c, Options{})
			if i == 0 {
				first = got.Weights
			} else if got.Weights != first {
				t.Errorf("%s: weights %.16s… under %s, %.16s… under %s", precision, got.Weights, scheme, first,
					schemes[0])
			}
			norms := got.weights["model.norm.weight"]
			if precision.Weights() == xpu.BFloat16 {
				norms = gathered(t, got.Checkpoint)["model.norm.weight.master"]
			}
			if len(norms) == 0 || slices.Contains(norms, 1) {
				t.Fatalf("%s, %s: a weight of a norm has not moved: %v", precision, scheme, norms)
			}
		}
	}
}

// The targets that SophiaG draws equal the targets of one rank: they depend on their position in
// the step.
func TestSophiaGRanks(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "skips:\n- {from: 17, to: 19}\n")
	more := "optimizer: {name: sophiag, hessian_every: 2}\nsteps: 8\nmicro_batch_size: 1\nevaluate: {every: 0}\n"
	one := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, more), Options{})
	for _, l := range layouts[:2] {
		got := mustRunRanks(t, ranksConfig(t, plan, l, more), Options{})
		d := apart(t, one.lines, got.lines, "loss")
		t.Logf("dp %d, ep %d: losses differ by %.2g", l.DP, l.EP, d)
		if d > 1e-5 {
			t.Errorf("dp %d, ep %d: losses differ from the losses of one rank by %v", l.DP, l.EP, d)
		}
	}
}

// Gradients that are summed during the backward pass have the bits of gradients that are summed
// after it. When the pass ends, the sums of all buckets have started: the first sum of each rank is
// held until then, which does not hold the pass.
func TestOverlap(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const steps = 6
	var weights []string
	for _, late := range []bool{false, true} {
		c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 2}, "")
		c.Steps = steps
		var passed [4][steps]chan struct{} // by rank and step: the pass has ended
		for rank := range passed {
			for step := range passed[rank] {
				passed[rank][step] = make(chan struct{})
			}
		}
		weights = append(weights, mustRun(t, c, Options{
			late: late,
			BeforeSum: func(rank int, step int64, _ moe.Bucket) error {
				<-passed[rank][step]
				return nil
			},
			passed: func(r *run) {
				want := len(r.model.Buckets())
				if late {
					want = 0
				}
				if n := len(r.batch.pending); n != want {
					t.Errorf("late %v, rank %d, step %d: sums of %d buckets were started before the pass ended, "+
						"want %d", late, r.ranks.Rank(), r.state.Step, n, want)
				}
				close(passed[r.ranks.Rank()][r.state.Step])
			},
		}).Weights)
	}
	if weights[0] != weights[1] {
		t.Errorf("weights %.16s… and %.16s…", weights[0], weights[1])
	}
}

// A run that is stopped and resumes in its layout equals an unbroken run, and a stop of one rank
// stops all. Steps whose positions are partly or completely skipped, so that ranks have different
// numbers of rows and micro-batches, equal the steps of one rank.
func TestRanksResume(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	// step 2 has 1 and 7; step 3 nothing; step 5 its second half
	more := "skips:\n- {from: 17, to: 23}\n- {from: 24, to: 32}\n- {from: 40, to: 44}\n"
	plan := makePlan(t, t.TempDir(), "plan.json", more)
	one := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, "micro_batch_size: 1\n"), Options{})
	for _, l := range layouts[:2] {
		whole := mustRunRanks(t, ranksConfig(t, plan, l, "micro_batch_size: 1\n"), Options{})
		if d := apart(t, one.lines, whole.lines, "loss"); d > 1e-5 {
			t.Errorf("dp %d, ep %d: losses differ from the losses of one rank by %v", l.DP, l.EP, d)
		}
		c := ranksConfig(t, plan, l, "micro_batch_size: 1\n")
		for _, step := range []int64{2, 9} {
			mustRun(t, c, stopAfter(step))
		}
		got := mustRunRanks(t, c, Options{})
		if got.Weights != whole.Weights || got.Resumed == "" {
			t.Errorf("dp %d, ep %d: weights %.16s… after stops, %.16s… without; resumed from %q", l.DP, l.EP,
				got.Weights, whole.Weights, got.Resumed)
		}
		if diff := cmp.Diff(whole.lines, got.lines); diff != "" {
			t.Errorf("dp %d, ep %d: records differ after stops:\n%s", l.DP, l.EP, diff)
		}
	}
}

// A run that goes on in another layout goes on, with a warning, and with the losses of that layout.
func TestRanksOtherLayout(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	whole := mustRunRanks(t, ranksConfig(t, plan, LayoutConfig{}, ""), Options{})
	c := ranksConfig(t, plan, LayoutConfig{DP: 4, EP: 1}, "")
	var warnings []string
	for i, l := range []LayoutConfig{{DP: 4, EP: 1, Optimizer: estimate.SO}, {DP: 1, EP: 2, Optimizer: estimate.EPSO},
		{DP: 1, EP: 1, Optimizer: estimate.EPSO}, {DP: 2, EP: 2, Optimizer: estimate.Unsharded}} {
		c.Layout.DP, c.Layout.EP, c.Layout.Optimizer = l.DP, l.EP, l.Optimizer
		o := stopAfter(int64(4*i + 3))
		if i == 3 {
			o = Options{}
		}
		o.Warn = func(text string) { warnings = append(warnings, text) }
		mustRun(t, c, o)
	}
	got := metricsOf(t, c.Output)
	for _, name := range []string{"loss", "grad_norm"} {
		if d := apart(t, whole.lines, got, name); d > 1e-4 {
			t.Errorf("%s differs from the %[1]s of one rank by %v", name, d)
		}
	}
	changed := 0
	for _, w := range warnings {
		if strings.Contains(w, "was computed with the arithmetic of") {
			changed++
		}
	}
	if changed != 3 {
		t.Errorf("%d warnings about 3 changes of layout: %q", changed, warnings)
	}
}

// A gradient that is not finite on one rank never reaches a weight: every rank ends with an error
// that names that rank and its host, the checkpoint is from before, and the host is on record. With
// spikes.action skip the run goes on, alike on all ranks.
func TestI7NotFinite(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	t.Setenv("MULA_HOST", "node-7")
	poison := func(rank int, step int64, b moe.Bucket) error {
		if rank == 2 && step == 5 && b.Divided {
			b.Grad.Floats()[b.Grad.Elements()-1] = float32(math.NaN())
		}
		return nil
	}
	for _, l := range layouts {
		c := ranksConfig(t, plan, l, "")
		mustRun(t, c, stopAfter(4))
		before, _, err := checkpoint.Find(context.Background(), c.Output)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Run(context.Background(), c, Options{BeforeSum: poison})
		if !errors.Is(err, moe.ErrNotFinite) || !collective.Shared(err) ||
			!strings.Contains(err.Error(), "rank 2 on node-7: step 5") ||
			!strings.Contains(err.Error(), ".mlp.experts.") {
			t.Errorf("dp %d, ep %d: %v", l.DP, l.EP, err)
		}
		saved, _, err := checkpoint.Find(context.Background(), c.Output)
		if err != nil || saved.State.Step != 5 || saved.State.Weights != before.State.Weights {
			t.Errorf("dp %d, ep %d: the newest checkpoint is of step %d, %v", l.DP, l.EP, saved.State.Step, err)
		}
		failures := readLines(t, filepath.Join(c.Output, record.FailuresFile))
		if len(failures) != 1 || failures[0]["host"] != "node-7" || failures[0]["rank"] != json.Number("2") ||
			failures[0]["step"] != json.Number("5") || failures[0]["kind"] != record.FailureNotFinite {
			t.Errorf("dp %d, ep %d: failures %v", l.DP, l.EP, failures)
		}
	}
	c := ranksConfig(t, plan, layouts[1], "spikes: {action: skip}\n")
	c.Layout.CheckReplicasEvery = 1
	got := mustRunRanks(t, c, Options{BeforeSum: poison})
	for _, line := range got.lines {
		if _, skipped := line["skipped"]; skipped != (line["step"] == json.Number("5") && line["eval"] == nil) {
			t.Errorf("step %v: skipped is %v", line["step"], line["skipped"])
		}
	}
	if got.LeftOut != 8 {
		t.Errorf("%d samples are left out", got.LeftOut)
	}
}

// A run of several ranks that goes back because of a spike, to a checkpoint or to the weights of
// initialize_from, equals the run of a plan without the skipped data.
func TestRanksRollback(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	base := testConfig(t, plan, "steps: 2\n")
	mustRun(t, base, Options{})
	skips := makePlan(t, dir, "skips.json", "skips:\n- {from: 32, to: 48}\n")
	for _, every := range []int{3, 0} {
		more := fmt.Sprintf("initialize_from: %s\nspikes: {action: rollback, skip_steps: 2}\ncheckpoint: {every: %d}\n",
			base.Output, every)
		want := mustRun(t, ranksConfig(t, skips, layouts[1], more), Options{})
		c := ranksConfig(t, plan, layouts[1], more)
		got := mustRun(t, c, Options{BeforeSum: func(rank int, step int64, b moe.Bucket) error {
			if rank == 1 && step == 5 {
				b.Grad.Floats()[0] = float32(math.Inf(1))
			}
			return nil
		}})
		if got.Weights != want.Weights || got.LeftOut != 16 {
			t.Errorf("checkpoints every %d: weights %.16s… with %d samples left out, %.16s… of the plan without them",
				every, got.Weights, got.LeftOut, want.Weights)
		}
	}
}

// A rank that fails alone, in the middle of a step, ends the others with an error, and the run goes
// on from its checkpoint as if it had never been.
func TestRankDies(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, l := range layouts {
		whole := mustRun(t, ranksConfig(t, plan, l, "evaluate: {every: 0}\n"), Options{})
		c := ranksConfig(t, plan, l, "checkpoint: {every: 3}\nevaluate: {every: 0}\n")
		dies := errors.New("dies")
		var mu sync.Mutex
		n := 0
		_, err := Run(context.Background(), c, Options{BeforeSum: func(rank int, step int64, b moe.Bucket) error {
			mu.Lock()
			defer mu.Unlock()
			if rank == 1 && step == 10 {
				if n++; n == 2 {
					return dies
				}
			}
			return nil
		}})
		if !errors.Is(err, dies) || collective.Shared(err) || !strings.Contains(err.Error(), "rank 1 on ") {
			t.Fatalf("dp %d, ep %d: %v", l.DP, l.EP, err)
		}
		if r := mustRun(t, c, Options{}); r.Weights != whole.Weights || r.Resumed != checkpoint.Name(9) {
			t.Errorf("dp %d, ep %d: weights %.16s… from %s, %.16s… of a whole run", l.DP, l.EP, r.Weights, r.Resumed,
				whole.Weights)
		}
	}
}

// If a rank cannot read or compute, every rank returns its error with its name, and no rank hangs.
func TestRankRefuses(t *testing.T) {
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	for _, l := range layouts {
		c := ranksConfig(t, plan, l, "")
		done := make(chan error, 1)
		go func() {
			_, err := Run(context.Background(), c,
				Options{badTokens: func(rank int, step int64) bool { return rank == 3 && step == 2 }})
			done <- err
		}()
		if err := <-done; err == nil || !collective.Shared(err) || !strings.Contains(err.Error(), "rank 3 on ") ||
			!strings.Contains(err.Error(), "vocabulary") {
			t.Errorf("dp %d, ep %d: %v", l.DP, l.EP, err)
		}
		if failures := readLines(t, filepath.Join(c.Output, record.FailuresFile)); len(failures) != 1 ||
			failures[0]["kind"] != record.FailureError || failures[0]["rank"] != json.Number("3") {
			t.Errorf("dp %d, ep %d: failures %v", l.DP, l.EP, failures)
		}
	}
}

// A step in which no single host computed the values that are not finite blames no host: the record
// names the run.
func TestDiverged(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	poison := func(ranks ...int) func(rank int, step int64, b moe.Bucket) error {
		return func(rank int, step int64, b moe.Bucket) error {
			if slices.Contains(ranks, rank) && step == 5 {
				b.Grad.Floats()[0] = float32(math.NaN())
			}
			return nil
		}
	}
	hosts := []string{"a", "a", "b", "b"}
	for _, test := range []struct {
		name   string
		ranks  []int
		layout LayoutConfig
		more   string
		kind   string
		host   string
		rank   json.Number
	}{
		{"all ranks", []int{0, 1, 2, 3}, LayoutConfig{DP: 4, EP: 1}, "", record.FailureDiverged, "", "-1"},
		{"all ranks, with experts divided", []int{0, 1, 2, 3}, LayoutConfig{DP: 2, EP: 2}, "",
			record.FailureDiverged, "", "-1"},
		{"ranks on two hosts", []int{1, 3}, LayoutConfig{DP: 4, EP: 1}, "", record.FailureDiverged, "", "-1"},
		{"all ranks of one host", []int{2, 3}, LayoutConfig{DP: 4, EP: 1}, "", record.FailureNotFinite, "b", "2"},
		{"one rank", []int{3}, LayoutConfig{DP: 2, EP: 2}, "", record.FailureNotFinite, "b", "3"},
		{"the only rank", nil, LayoutConfig{DP: 1, EP: 1}, "schedule: {warmup_steps: 0, learning_rate: 1e30}\n",
			record.FailureDiverged, "here", "0"},
		{"a learning rate that is too high", nil, LayoutConfig{DP: 2, EP: 2},
			"schedule: {warmup_steps: 0, learning_rate: 1e30}\n", record.FailureDiverged, "", "-1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("MULA_HOST", "here")
			c := ranksConfig(t, plan, test.layout, test.more)
			options := Options{BeforeSum: poison(test.ranks...)}
			if c.Layout.Ranks() > 1 {
				options.hosts = comm.NewHosts(hosts)
			}
			if _, err := Run(t.Context(), c, options); !errors.Is(err, moe.ErrNotFinite) {
				t.Fatal(err)
			}
			failures := readLines(t, filepath.Join(c.Output, record.FailuresFile))
			if len(failures) != 1 || failures[0]["kind"] != test.kind || failures[0]["host"] != test.host ||
				failures[0]["rank"] != test.rank {
				t.Errorf("failures %v; want kind %s, host %q, rank %s", failures, test.kind, test.host, test.rank)
			}
		})
	}
}

// A condition that all ranks detect themselves ends the run with one error, which blames no rank.
func TestRanksEndAlike(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	poison := func(tensor func(b moe.Bucket) []float32, who int) func(rank int, step int64, b moe.Bucket) error {
		return func(rank int, step int64, b moe.Bucket) error {
			if (rank == who || who < 0) && step >= 5 {
				tensor(b)[0] = float32(math.NaN())
			}
			return nil
		}
	}
	gradient := func(b moe.Bucket) []float32 { return b.Grad.Floats() }
	weight := func(b moe.Bucket) []float32 { return b.Weight.Floats() }
	for _, test := range []struct {
		more, want string
		poison     func(rank int, step int64, b moe.Bucket) error
		kind       string // of the failures on record
		rank       json.Number
	}{
		{"spikes: {action: skip, max_skips: 1}\n", "spikes.max_skips (1)", poison(gradient, 2),
			record.FailureNotFinite, "2"},
		{"spikes: {action: rollback, skip_steps: 1, max_rollbacks: 1}\n", "spikes.max_rollbacks (1)",
			poison(gradient, 2), record.FailureNotFinite, "2"},
		{"evaluate: {every: 6}\n", "validation loss of source", poison(weight, -1), record.FailureDiverged, "-1"},
	} {
		c := ranksConfig(t, plan, layouts[1], test.more)
		_, err := Run(context.Background(), c, Options{BeforeSum: test.poison, late: true})
		if !collective.Shared(err) || !errors.Is(err, moe.ErrNotFinite) || !strings.Contains(err.Error(), test.want) ||
			strings.Contains(err.Error(), "rank ") {
			t.Errorf("%s: %v", test.more, err)
		}
		for _, f := range readLines(t, filepath.Join(c.Output, record.FailuresFile)) {
			if f["kind"] != test.kind || f["rank"] != test.rank {
				t.Errorf("%s: %v is on record", test.more, f)
			}
		}
	}
}

// Ranks that would not do the same are refused, and told in what they differ.
func TestRanksDiffer(t *testing.T) {
	dir := t.TempDir()
	plan, other := makePlan(t, dir, "plan.json", ""), makePlan(t, dir, "other.json", "skips:\n- {from: 3, to: 4}\n")
	for want, change := range map[string]func(c *Config){
		"this rank has plan ": func(c *Config) { c.Plan = other },
		"this rank has seed 9, but rank 0 has 0; use the same train.yaml on all ranks": func(c *Config) { c.Seed = 9 },
		"this rank has checkpoint.every 3, but rank 0 has " +
			"0": func(c *Config) { c.Checkpoint.Every = new(int64(3)) },
		"this rank has the arithmetic of " +
			"": func(c *Config) { c.Precision = xpu.BF16 },
		// its plan is too short for it
		": steps is ": func(c *Config) { c.Steps = 1 << 40 },
	} {
		c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1}, "")
		optimizertest.Together(t, 2, func(world *comm.Comm) error {
			own := c
			if world.Rank() == 1 {
				change(&own)
			}
			_, err := Run(context.Background(), own, Options{World: world})
			if err == nil || !collective.Shared(err) || !strings.Contains(err.Error(), "rank 1 on ") ||
				!strings.Contains(err.Error(), want) {
				return fmt.Errorf("%q: %w", want, err)
			}
			return nil
		})
	}
}

// Impossible layouts are refused, and the error lists the possible layouts.
func TestLayoutRefused(t *testing.T) {
	for text, want := range map[string]string{
		"layout: {pp: 0}": "layout.pp is 0; must be from 1 to ",
		"layout: {pp: 3}\nmodel: {preset: mula-nano}": "layout.pp is 3, but the model has " +
			"only 2 layers",
		"layout: {pp: 2}\nmodel: {preset: mula-1b, tie_word_embeddings: true}": "layout.pp is 2, but " +
			"model.tie_word_embeddings",
		"layout: {tp: 8}": "layout.tp is 8, which does not divide num_key_value_heads 4",
		"layout: {virtual_stages: 2}": "layout.virtual_stages is 2, but a pipeline of one stage has nothing to " +
			"interleave; must be 1, or pp above 1",
		"layout: {virtual_stages: 0}": "layout.virtual_stages is 0; must be from 1 to ",
		"layout: {pp: 2, virtual_stages: 2}\nmodel: {preset: mula-nano}": "layout.virtual_stages is 2, but the model " +
			"has only 2 layers for the 4 groups of 2 stages; at most 1",
		"layout: {expert_dp: 0}": "layout.expert_dp is 0; must be from 1 to ",
		"layout: {ep: 3}\nmodel: {preset: mula-nano}": "layout.ep is 3, which does not divide the 8 experts of a " +
			"layer; possible: 1, 2, 4, 8",
		"layout: {ep: 2}\nmodel: {preset: mula-1b}": "layout.ep is 2, but a dense model has no experts",
		"layout: {expert_dp: 3}": "batch_size is 32; must be a multiple of layout.expert_dp · " +
			"layout.ep = 3 · 1 = 3",
		"layout: {optimizer: zero}": `layout.optimizer is "zero"; allowed: epso, so, unsharded`,
		"layout: {transport: nccl}": `layout.transport is "nccl"; allowed: auto, local, tcp, mpi`,
		"layout: {sums: quick}":     `layout.sums is "quick"; allowed: exact, fast`,
		"layout: {dispatch: ring}":  `layout.dispatch is "ring"; allowed: alltoall, allgather`,
		"layout: {uniform_routing: true}\nmodel: {preset: mula-1b}": "layout.uniform_routing is true, but a dense " +
			"model has no router",
	} {
		if _, err := ParseConfig([]byte(text+"\n"), "train.yaml"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	c := defaultConfig()
	if err := c.fitsWorld(4); err == nil || err.Error() != "layout is expert_dp · ep = 1 · 1 = 1 ranks, but 4 were "+
		"started; possible: {expert_dp: 4, ep: 1}, {expert_dp: 2, ep: 2}, {expert_dp: 1, ep: 4}" ||
		!collective.Misconfigured(err) {
		t.Error(err)
	}
	c.Layout.PP = 2
	if err := c.fitsWorld(4); err == nil ||
		err.Error() != "layout is expert_dp · pp · ep = 1 · 2 · 1 = 2 ranks, but 4 "+
			"were started; possible: {expert_dp: 2, pp: 2, ep: 1}, {expert_dp: 1, pp: 2, ep: 2}" {
		t.Error(err)
	}
	c.Layout.PP = 1
	if err := c.fitsWorld(3); err == nil || !strings.Contains(err.Error(), "start 1, or ") {
		t.Error(err)
	}
	if _, err := group.Join(context.Background(), group.TCP, 1, nil); err == nil || !strings.Contains(err.Error(),
		"mula launch") {
		t.Error(err)
	}
	optimizertest.Together(t, 2, func(world *comm.Comm) error {
		_, err := Run(context.Background(), defaultConfig(), Options{World: world})
		if err == nil || !strings.Contains(err.Error(), "but 2 were started") {
			return fmt.Errorf("a world of another size: %w", err)
		}
		return nil
	})
}

// The summary of a run of many ranks has the memory of one rank.
func TestRanksMemory(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	memory := map[string]estimate.Memory{}
	for _, l := range []LayoutConfig{{DP: 1, EP: 1}, {DP: 2, EP: 2, Optimizer: estimate.EPSO}, {DP: 2, EP: 2,
		Optimizer: estimate.SO},
		{DP: 2, EP: 2, Optimizer: estimate.Unsharded}} {
		c := ranksConfig(t, plan, l, "steps: 2\n")
		mustRun(t, c,
			Options{Report: func(s Summary) {
				memory[strings.TrimSpace(fmt.Sprintf("%d %s", l.DP*l.EP,
					l.Optimizer))] = s.Memory
			}})
	}
	one, epso, so, unsharded := memory["1"], memory["4 epso"], memory["4 so"], memory["4 unsharded"]
	x := int64(2 * 8 * 3 * 64 * 32) // weights of all experts
	n := one.Weights/4 - x
	for name, check := range map[string][2]int64{
		"weights":               {epso.Weights, 4 * (n + x/2)},
		"moments of one rank":   {one.Optimizer, 8 * (n + x)},
		"moments of epso":       {epso.Optimizer, 8 * (n + x) / 4},
		"moments of so":         {so.Optimizer, 8 * (n + x/2) / 2},
		"moments of each alone": {unsharded.Optimizer, 8 * (n + x/2)},
	} {
		if check[0] != check[1] {
			t.Errorf("%s: %d bytes, want %d", name, check[0], check[1])
		}
	}
}
