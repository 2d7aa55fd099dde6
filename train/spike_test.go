package train

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/blend/plantest"
	"mula/internal/atomicfile"
	"mula/internal/longtest"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/shards"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/record"
	"mula/train/report"
	"mula/train/rundir"
	"mula/train/spikes"
)

// spikyPlan builds a plan over text of few ids, with ranges of other ids that a model that has
// learned the text does not expect: one step of 8 samples each, at the given steps. skips are the
// skips of the plan.
func spikyPlan(t testing.TB, dir, name string, skips []blend.Range, garbage ...int64) string {
	t.Helper()
	for i, source := range []string{"text", "garbage"} {
		prefix := filepath.Join(dir, source)
		if _, err := os.Stat(prefix + ".idx"); err == nil {
			continue
		}
		w, err := shards.Create(prefix, shards.UInt16, shards.TokenizerInfo{SHA256: strings.Repeat("ab", 32),
			VocabSize: 300, EOD: 0, ClassTable: "test", Specials: "text"})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Abort()
		rng := rand.New(rand.NewPCG(9, uint64(i)))
		for doc := range 80 {
			tokens := make([]uint32, 67)
			for j := range tokens {
				tokens[j] = 1 + rng.Uint32N(6) + uint32(i)*290
			}
			if err := w.Append(tokens, shards.DocumentOrigin{ID: fmt.Sprint(source, doc), File: "made",
				Line: int64(doc) + 1}); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var stages, skipped strings.Builder
	at := int64(0)
	for _, step := range garbage {
		if step > at {
			fmt.Fprintf(&stages, "- {samples: %d, weights: {text: 1}}\n", 8*(step-at))
		}
		stages.WriteString("- {samples: 8, weights: {garbage: 1}}\n")
		at = step + 1
	}
	for _, s := range skips {
		fmt.Fprintf(&skipped, "- {from: %d, to: %d}\n", s.From, s.To)
	}
	config := "sequence_length: 16\nseed: 5\nsources:\n- {name: text, shards: [text.idx]}\n- {name: garbage, " +
		"shards: [garbage.idx]}\nsamples: 336\nstages:\n" + stages.String() +
		"- {samples: rest, weights: {text: 1}}\n"
	if len(skips) > 0 {
		config += "skips:\n" + skipped.String()
	}
	return plantest.Seal(t, dir, name, config)
}

// spikyConfig is a run of 40 steps that learns the text in a few of them.
const spikyConfig = crashConfig +
	"steps: 40\nschedule: {learning_rate: 2e-2, warmup_steps: 2}\nevaluate: {every: 0}\ncheckpoint: {every: " +
	"5}\nlog: {update_ratio_every: 3}\n"

func spikesYAML(action string) string {
	return fmt.Sprintf("spikes: {action: %s, window: 8, skip_steps: 4}\n", action)
}

// linesWith returns the lines of metrics.jsonl that have a member.
func linesWith(t testing.TB, output, member string) []map[string]any {
	t.Helper()
	return slices.DeleteFunc(readLines(t, filepath.Join(output, rundir.MetricsFile)),
		func(l map[string]any) bool { return l[member] == nil })
}

// sameTraining compares the training data and the results of two runs: one run skipped data because
// of spikes, and the plan of the other run skips it.
func sameTraining(t testing.TB, what, skipping, planned string) {
	t.Helper()
	a, b := readLines(t, filepath.Join(skipping, fingerprint.LogFile)), readLines(t,
		filepath.Join(planned, fingerprint.LogFile))
	if diff := cmp.Diff(b[1:], a[1:]); diff != "" {
		t.Errorf("%s: fingerprints (-plan +run):\n%s", what, diff)
	}
	var states [2]checkpoint.State
	for i, output := range []string{skipping, planned} {
		c, _, err := checkpoint.Find(context.Background(), output)
		if err != nil {
			t.Fatal(err)
		}
		states[i] = c.State
		states[i].Cursor.Plan, states[i].Spikes, states[i].Config = "", nil, nil
	}
	if diff := cmp.Diff(states[1], states[0]); diff != "" {
		t.Errorf("%s: states (-plan +run):\n%s", what, diff)
	}
}

// skipsOf reads a skips.yaml as a part of a blend.yaml.
func skipsOf(t testing.TB, output string) []blend.Range {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(output, rundir.SkipsFile))
	if err != nil {
		t.Fatal(err)
	}
	c, err := blend.ParseConfig(append([]byte("sequence_length: 16\nsources: [{name: a, shards: [a]}]\n"), data...),
		rundir.SkipsFile, ".")
	if err != nil {
		t.Fatal(err)
	}
	return c.Skips
}

// flip changes a bit of a file.
func flip(t testing.TB, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-1] ^= 1
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// A run that skips a spike is the run along a plan that skips that step. Without spikes it is the
// run that does not look for them.
func TestSpikeSkip(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := testConfig(t, spikyPlan(t, dir, "plan.json", nil, 20, 30), spikyConfig+spikesYAML("skip"))
	var warnings []string
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	lines := linesWith(t, c.Output, "skipped")
	if len(lines) != 2 || fmt.Sprint(lines[0]["step"]) != "20" || fmt.Sprint(lines[1]["step"]) != "30" ||
		len(warnings) != 2 || !strings.Contains(warnings[0], "step 20 skipped: loss ") {
		t.Fatalf("skipped %v, warnings %q", lines, warnings)
	}
	var m record.StepMetrics
	text, _ := json.Marshal(lines[0])
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	if s := m.Skipped; s.What != "loss" || s.Value != m.Loss || !(s.Value > s.Limit) ||
		math.Abs(s.Mean+6*s.Deviation-s.Limit) > 1e-12 || m.UpdateRatio != nil || m.Samples != 8 {
		t.Errorf("the line %s", text)
	}
	want := []blend.Range{{From: 160, To: 168}, {From: 240, To: 248}}
	if diff := cmp.Diff(want, skipsOf(t, c.Output)); diff != "" {
		t.Errorf("skips (-want +got):\n%s", diff)
	}
	planned := testConfig(t, spikyPlan(t, dir, "skips.json", want, 20, 30), spikyConfig)
	mustRun(t, planned, Options{})
	sameTraining(t, "skip", c.Output, planned.Output)
	r, err := report.Read(c.Output)
	if err != nil || r.Spans[20].Skipped == nil || r.Spans[20].Tokens != 0 || r.Spans[21].Skipped != nil {
		t.Errorf("the report reads %v, %v", r, err)
	}

	unmarred := spikyPlan(t, dir, "unmarred.json", nil, 40)
	look, not := testConfig(t, unmarred, spikyConfig+spikesYAML("skip")), testConfig(t, unmarred, spikyConfig)
	if a, b := mustRun(t, look, Options{}), mustRun(t, not, Options{}); a.Weights != b.Weights {
		t.Error("looking for spikes changes a run that has none")
	}
	if _, err := os.Stat(filepath.Join(look.Output, rundir.SkipsFile)); err == nil {
		t.Error("a run without spikes left skips.yaml")
	}
}

// A run that goes back equals the run of a plan that skips the same steps, and it names these
// steps.
func TestSpikeRollback(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	c := testConfig(t, spikyPlan(t, dir, "plan.json", nil, 20, 33), spikyConfig+spikesYAML("rollback"))
	var warnings []string
	var steps []int64
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) },
		Progress: func(p Progress) { steps = append(steps, p.Step) }})
	want := []blend.Range{{From: 17 * 8, To: 21 * 8}, {From: 30 * 8, To: 34 * 8}}
	if len(warnings) != 2 || !strings.Contains(warnings[0], "returns to step-00000015") ||
		!strings.Contains(warnings[1], "returns to step-00000030") ||
		!strings.Contains(warnings[1], "positions 240 to 271, of steps 30 to 33: rollback 2 of at most 10") {
		t.Errorf("warnings %q", warnings)
	}
	// Steps 0 to 19, again from 15 to 32, again from 30.
	if n := len(steps); n != 20+18+10 || steps[20] != 15 || steps[38] != 30 {
		t.Errorf("steps %v", steps)
	}
	var rollbacks []spikes.Rollback
	for _, line := range linesWith(t, c.Output, "rollback") {
		text, _ := json.Marshal(line)
		var l metricsLine
		if err := json.Unmarshal(text, &l); err != nil || *l.Step*8 != l.Rollback.LeftOut.From ||
			l.Rollback.Spike.What != "loss" {
			t.Errorf("%s: %v", text, err)
		}
		rollbacks = append(rollbacks, *l.Rollback)
	}
	saved, _, err := checkpoint.Find(context.Background(), c.Output)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(saved.State.Spikes.Rollbacks, rollbacks); diff != "" || len(rollbacks) != 2 ||
		rollbacks[1].Step != 33 {
		t.Errorf("rollbacks (-checkpoint +metrics):\n%s", diff)
	}
	for _, got := range [][]blend.Range{skipsOf(t, c.Output), saved.State.Spikes.Skips,
		{rollbacks[0].LeftOut, rollbacks[1].LeftOut}} {
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("skips (-want +got):\n%s", diff)
		}
	}
	planned := testConfig(t, spikyPlan(t, dir, "skips.json", want, 20, 33), spikyConfig)
	mustRun(t, planned, Options{})
	sameTraining(t, "rollback", c.Output, planned.Output)

	// If only the step of the spike is skipped, going back equals not making its update.
	more := "spikes: {action: %s, window: 8, skip_steps: 1}\n"
	skip, back := testConfig(t, c.Plan, spikyConfig+fmt.Sprintf(more, "skip")), testConfig(t, c.Plan,
		spikyConfig+fmt.Sprintf(more, "rollback"))
	if a, b := mustRun(t, skip, Options{}), mustRun(t, back, Options{}); a.Weights != b.Weights {
		t.Error("skip_steps: 1 is not skip")
	}

	// The result does not depend on where checkpoints are, nor on how many are kept, nor on stops.
	// One to go back to is kept.
	for checkpoints, where := range map[string]string{"{every: 3, keep: 1}": "step-00000015",
		"{every: 0}": "step 0", "{every: 19, keep: 9}": "step 0"} {
		other := testConfig(t, c.Plan,
			strings.Replace(spikyConfig, "{every: 5}", checkpoints, 1)+spikesYAML("rollback"))
		var warnings []string
		mustRun(t, other, Options{Warn: func(text string) { warnings = append(warnings, text) }})
		if len(warnings) != 2 || !strings.Contains(warnings[0], "returns to "+where) {
			t.Errorf("checkpoint: %s: warnings %q", checkpoints, warnings)
		}
		sameRun(t, "checkpoint: "+checkpoints, c.Output, other.Output)
	}
	// A damaged checkpoint is replaced by an older one, before newer ones are removed.
	warnings = nil
	damaged := testConfig(t, c.Plan,
		strings.Replace(spikyConfig, "{every: 5}", "{every: 5, keep: 9}", 1)+spikesYAML("rollback"))
	mustRun(t, damaged, Options{Warn: func(text string) { warnings = append(warnings, text) },
		Progress: func(p Progress) {
			if p.Step == 18 && len(warnings) == 0 {
				flip(t, filepath.Join(damaged.Output, checkpoint.DirName, checkpoint.Name(15), "optimizer.safetensors"))
			}
		}})
	if len(warnings) != 3 || !strings.Contains(warnings[0], "step-00000015 is damaged") ||
		!strings.Contains(warnings[1], "returns to step-00000010") {
		t.Errorf("a damaged checkpoint: warnings %q", warnings)
	}
	sameRun(t, "a damaged checkpoint", c.Output, damaged.Output)
	stopped := testConfig(t, c.Plan, spikyConfig+spikesYAML("rollback"))
	for _, step := range []int64{3, 18, 19, 16, 17, 29, 32, 38} {
		mustRun(t, stopped, stopAfter(step))
	}
	mustRun(t, stopped, Options{})
	sameRun(t, "stopped often", c.Output, stopped.Output)
}

// A run that is killed after any step, also next to the rollbacks, resumes to the same end. The
// steps before the first spike are computed once for all cases.
func TestSpikeKill(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := spikyPlan(t, t.TempDir(), "plan.json", nil, 20, 22, 33)
	for _, action := range []string{"skip", "rollback"} {
		unbroken := testConfig(t, plan, strings.Replace(spikyConfig, "{every: 5}", "{every: 10}", 1)+spikesYAML(action))
		begun := unbroken
		begun.Output = filepath.Join(t.TempDir(), "run")
		mustRun(t, begun, stopAfter(9))
		steps := -10
		mustRun(t, unbroken, Options{Progress: func(Progress) { steps++ }})
		if len(linesWith(t, unbroken.Output, map[string]string{"skip": "skipped",
			"rollback": "rollback"}[action])) != 3 {
			t.Fatalf("%s: not three spikes", action)
		}
		for kill := 7; kill < steps; kill += 6 {
			c := unbroken
			c.Output = filepath.Join(t.TempDir(), "run")
			if err := os.CopyFS(c.Output, os.DirFS(begun.Output)); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			n := 0
			_, err := Run(ctx, c, Options{Progress: func(Progress) { // a done context ends a run as a kill does
				if n++; n == kill {
					cancel()
				}
			}})
			if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			mustRun(t, c, Options{})
			sameRun(t, fmt.Sprintf("%s, killed after %d steps", action, kill), unbroken.Output, c.Output)
			if diff := cmp.Diff(skipsOf(t, unbroken.Output), skipsOf(t, c.Output)); diff != "" {
				t.Errorf("%s, killed after %d steps: skips:\n%s", action, kill, diff)
			}
			if t.Failed() {
				return
			}
		}
	}
}

// Bounds end a run that cannot continue, and the error has the remedy. With a higher bound the run
// resumes, to the same end as with the higher bound from the start.
func TestSpikeBounds(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := spikyPlan(t, t.TempDir(), "plan.json", nil, 20, 21, 22, 33)
	for _, test := range []struct {
		action, bound string
		want          []string
	}{
		{"skip", "max_skips: 2", []string{"step 22: loss ", "spikes.max_skips (2) consecutive steps were skipped",
			"step-00000020",
			"mula peek --position 176", rundir.SkipsFile}},
		{"rollback", "max_rollbacks: 1",
			[]string{"step 21: loss ", "spikes.max_rollbacks (1) rollbacks were made", rundir.SkipsFile}},
	} {
		file := spikyConfig + strings.Replace(spikesYAML(test.action), "}", ", "+test.bound+"}", 1)
		c := testConfig(t, plan, file)
		_, err := Run(context.Background(), c, Options{})
		for _, want := range test.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v does not say %q", test.action, err, want)
			}
		}
		high := testConfig(t, plan, spikyConfig+strings.Replace(spikesYAML(test.action), "}",
			", max_skips: 3, max_rollbacks: 9}", 1))
		mustRun(t, high, Options{})
		c.Spikes.MaxSkips, c.Spikes.MaxRollbacks = 3, 9
		mustRun(t, c, Options{})
		sameRun(t, test.action, high.Output, c.Output)
	}
}

// What is not finite ends a run that does nothing about spikes, and is one otherwise, whether or
// not the window is full. The weights are not touched by it. It comes from the embedding of an id
// that only garbage has, which is made infinite before the first step.
func TestSpikeNotFinite(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	plan := spikyPlan(t, dir, "plan.json", nil, 3, 20)
	start := func(more string) Config {
		c := testConfig(t, plan, spikyConfig+more)
		stop := make(chan struct{})
		close(stop)
		poison(t, mustRun(t, c, Options{Stop: stop}).Checkpoint)
		return c
	}
	c := start("")
	if _, err := Run(context.Background(), c, Options{}); !errors.Is(err, moe.ErrNotFinite) ||
		!strings.Contains(err.Error(), "step 3: the loss is NaN or Inf, at position") {
		t.Errorf("action none: %v", err)
	}
	for action, want := range map[string][]blend.Range{"skip": {{From: 24, To: 32}, {From: 160, To: 168}},
		"rollback": {{From: 0, To: 32}, {From: 136, To: 168}}} {
		c := start(spikesYAML(action))
		r := mustRun(t, c, Options{})
		if diff := cmp.Diff(want, skipsOf(t, c.Output)); diff != "" {
			t.Errorf("%s: skips (-want +got):\n%s", action, diff)
		}
		saved, _, err := checkpoint.Find(context.Background(), c.Output)
		if err != nil || !finite(r.LastLoss) {
			t.Fatal(err)
		}
		for _, name := range []string{modelFile, optimizerFile} {
			f, err := safetensors.Open(filepath.Join(saved.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			bad := 0
			for _, tensor := range f.Tensors() {
				values := make([]float32, tensor.Elements())
				if err := f.Float32(values, tensor.Name, 0); err != nil {
					t.Fatal(err)
				}
				for _, v := range values {
					if !finite(float64(v)) {
						bad++
					}
				}
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			if poisoned := map[string]int{modelFile: 16}[name]; bad != poisoned && action == "skip" || bad > poisoned {
				t.Errorf("%s: %d numbers of %s are not finite, want %d", action, bad, name, poisoned)
			}
		}
		if lines := linesWith(t, c.Output, "skipped"); action == "skip" && (len(lines) != 2 ||
			fmt.Sprint(lines[0]["skipped"]) != "map[not_finite:true what:loss]" || lines[0]["expert_tokens"] != nil) {
			t.Errorf("%s: lines %v", action, lines)
		}
		if r, err := report.Read(c.Output); err != nil || report.Write(new(bytes.Buffer), report.Options{}, r) != nil {
			t.Errorf("%s: report: %v", action, err)
		}
	}

	// A learning rate that explodes: every step from some step on is one.
	exploding := strings.Replace(spikyConfig, "2e-2", "1e30", 1)
	for action, want := range map[string]string{"none": "the weights are unchanged since the step before",
		"skip": "spikes.max_skips", "rollback": "spikes.max_rollbacks"} {
		c := testConfig(t, plan, exploding+spikesYAML(action))
		if _, err := Run(context.Background(), c, Options{}); !errors.Is(err, moe.ErrNotFinite) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("exploding, %s: %v", action, err)
		}
	}
}

// poison makes the embedding of an id that only garbage has infinite in a checkpoint.
func poison(t testing.TB, dir string) {
	t.Helper()
	checkpointtest.Rewrite(t, dir, modelFile, func(data []byte) []byte {
		size := 8 + int(binary.LittleEndian.Uint64(data))
		var header map[string]struct {
			Offsets []int `json:"data_offsets"`
		}
		if err := json.Unmarshal([]byte(strings.Replace(string(data[8:size]), "__metadata__", "m", 1)),
			&header); err != nil {
			t.Fatal(err)
		}
		at := size + header["model.embed_tokens.weight"].Offsets[0]
		for i := range 16 {
			copy(data[at+4*(293*16+i):], []byte{0, 0, 0x80, 0x7f})
		}
		return data
	})
}

// A run may go back to where its plan changed, and no further.
func TestSpikePlanChange(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	first, second := spikyPlan(t, dir, "first.json", nil, 38), spikyPlan(t, dir, "second.json", nil, 20)
	run := func(kill bool) string {
		c := testConfig(t, first, spikyConfig+spikesYAML("rollback"))
		mustRun(t, c, stopAfter(17)) // 18 steps; without the change, the run would go back to 17
		c.Plan, c.PlanChange = second, acceptPlanChange
		if kill {
			ctx, cancel := context.WithCancel(context.Background())
			if _, err := Run(ctx, c, Options{Progress: func(p Progress) {
				if p.Step == 22 {
					cancel()
				}
			}}); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
		mustRun(t, c, Options{})
		if diff := cmp.Diff([]blend.Range{{From: 18 * 8, To: 21 * 8}}, skipsOf(t, c.Output)); diff != "" {
			t.Errorf("skips (-want +got):\n%s", diff)
		}
		if n := len(linesWith(t, c.Output, "resumed")); n != 1 && !kill {
			t.Errorf("%d lines about the change of plan", n)
		}
		return c.Output
	}
	sameRun(t, "killed after going back", run(false), run(true))
}

// Whichever file operation fails while a run goes back, it ends with that error, and goes on to the
// end of a run that nothing happened to.
func TestSpikeRollbackFaults(t *testing.T) {
	longtest.SkipIfShort(t)
	plan := spikyPlan(t, t.TempDir(), "plan.json", nil, 12)
	more := strings.NewReplacer("steps: 40", "steps: 13", "{every: 5}", "{every: 6}").Replace(spikyConfig) +
		"spikes: {action: rollback, window: 4, sigma: 4, skip_steps: 2}\n"
	begun := testConfig(t, plan, more)
	mustRun(t, begun, stopAfter(5))
	again := func() Config {
		c := begun
		c.Output = filepath.Join(t.TempDir(), "run")
		if err := os.CopyFS(c.Output, os.DirFS(begun.Output)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	unbroken := again()
	defer func() { atomicfile.Fault = nil }()
	n, begin, end := 0, 0, 0 // operations: all, before the run goes back, until the next step is done
	atomicfile.Fault = func(atomicfile.Op, string) error { n++; return nil }
	mustRun(t, unbroken, Options{
		Warn: func(string) { begin = n },
		Progress: func(Progress) {
			if begin > 0 && end == 0 {
				end = n
			}
		},
	})
	if begin == 0 || end < begin+10 {
		t.Fatalf("operations %d to %d of %d", begin, end, n)
	}
	for k := begin + 1; k <= end; k++ {
		c := again()
		n = 0
		atomicfile.Fault = func(atomicfile.Op, string) error {
			if n++; n == k {
				return syscall.ENOSPC
			}
			return nil
		}
		_, err := Run(context.Background(), c, Options{})
		atomicfile.Fault = nil
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("operation %d: error %v", k, err)
		}
		mustRun(t, c, Options{})
		sameRun(t, fmt.Sprint("operation ", k), unbroken.Output, c.Output)
		if diff := cmp.Diff(skipsOf(t, unbroken.Output), skipsOf(t, c.Output)); diff != "" {
			t.Errorf("operation %d: skips:\n%s", k, diff)
		}
		if t.Failed() {
			return
		}
	}
}

// A run goes back to the beginning only with the weights that it began with.
func TestSpikeRollbackToInitialWeights(t *testing.T) {
	t.Parallel()
	plan := spikyPlan(t, t.TempDir(), "plan.json", nil, 20)
	model := func(seed uint64) string {
		c := testConfig(t, plan, spikyConfig)
		c.Seed = seed
		mustRun(t, c, stopAfter(1))
		return c.Output
	}
	first, other := model(1), model(2)
	config := func() Config {
		c := testConfig(t, plan, spikyConfig+spikesYAML("rollback"))
		c.InitializeFrom, c.Checkpoint.Every = first, new(int64)
		return c
	}
	unbroken := config()
	mustRun(t, unbroken, Options{})

	c := config()
	mustRun(t, c, stopAfter(18)) // after the start of the skipped data
	for from, message := range map[string]string{other: "but the run started with", "": "no longer names the model"} {
		c.InitializeFrom = from
		if _, err := Run(context.Background(), c, Options{}); err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("from %q: %v", from, err)
		}
	}
	c.InitializeFrom = first
	mustRun(t, c, Options{})
	sameRun(t, "resumed", unbroken.Output, c.Output)
}
