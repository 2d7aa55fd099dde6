package train

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/blend/plantest"
	"mula/blend/stream"
	"mula/internal/atomicfile"
	"mula/internal/longtest"
	"mula/internal/machine"
	"mula/internal/strictyaml"
	"mula/moe"
	"mula/shards"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/optimizer"
	"mula/train/record"
	"mula/train/report"
	"mula/train/rundir"
)

func TestMain(m *testing.M) {
	atomicfile.SkipSync = true
	if os.Getenv(childEnv) != "" {
		os.Exit(childMain())
	}
	plantest.Main(m)
}

// Files of a checkpoint.
const (
	manifestFile   = "manifest.json"
	stateFile      = "state.json"
	modelFile      = "model.safetensors"
	optimizerFile  = "optimizer.safetensors"
	generationFile = "generation_config.json"
	tokenizerFile  = "tokenizer.json"
)

// checkpointsIn lists the checkpoints of a run, newest first.
func checkpointsIn(t testing.TB, output string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(output, checkpoint.DirName, "step-*"))
	if err != nil {
		t.Fatal(err)
	}
	for i, path := range names {
		names[i] = filepath.Base(path)
	}
	slices.Reverse(names)
	return names
}

// tokenizerJSON is the tokenizer of the shards. No test reads it.
const tokenizerJSON = `{"version": "1.0"}`

// makePlan writes two shards of text with structure, so that there is something to learn, and seals
// a plan over them. more is added to blend.yaml.
func makePlan(t testing.TB, dir, name, more string) string {
	t.Helper()
	for i, source := range []string{"go", "tests"} {
		prefix := filepath.Join(dir, source)
		if _, err := os.Stat(prefix + ".idx"); err == nil {
			continue
		}
		w, err := shards.Create(prefix, shards.UInt16, shards.TokenizerInfo{
			SHA256: fmt.Sprintf("%x", sha256.Sum256([]byte(tokenizerJSON))), VocabSize: 300, EOD: 0, ClassTable: "test",
			Specials: "text"})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Abort()
		rng := rand.New(rand.NewPCG(7, uint64(i)))
		for doc := range 60 {
			var tokens []uint32
			for id := rng.Uint32N(100); len(tokens) < 100; id = (id*5 + 1 + rng.Uint32N(2)) % 299 {
				tokens = append(tokens, id+1)
			}
			if err := w.Append(append(tokens, 0), shards.DocumentOrigin{ID: fmt.Sprint(source, doc), File: "made",
				Line: int64(doc) + 1}); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	config := fmt.Sprintf("sequence_length: 16\nseed: 5\nvalidation: 0.1\nsources:\n- {name: go, shards: [go.idx], "+
		"weight: 0.7}\n- {name: tests, shards: [tests.idx], weight: 0.3}\n%s", more)
	return plantest.Seal(t, dir, name, config)
}

// testConfig is a short run of the smallest model. It has few checkpoints, because tests spend most
// of their time writing them to disk.
func testConfig(t testing.TB, plan, more string) Config {
	t.Helper()
	file := more
	for _, line := range []string{"model: {preset: mula-nano}", "batch_size: 8", "steps: 8", "threads: 1",
		"schedule: {learning_rate: 3e-3, warmup_steps: 2}", "checkpoint: {every: 4}"} {
		if name, _, _ := strings.Cut(line, ":"); !strings.HasPrefix(more, name+":") &&
			!strings.Contains(more, "\n"+name+":") {
			file += line + "\n"
		}
	}
	c, err := ParseConfig([]byte(file), "train.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.Plan, c.Output = plan, filepath.Join(t.TempDir(), "run")
	c.Log.SlowSteps = 0 // warnings would depend on the load of the machine
	return c
}

func mustRun(t testing.TB, c Config, o Options) Result {
	t.Helper()
	r, err := Run(context.Background(), c, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// stopAfter returns options that stop a run after the given step.
func stopAfter(step int64) Options {
	stop := make(chan struct{})
	return Options{Stop: stop, Progress: func(p Progress) {
		if p.Step == step {
			close(stop)
		}
	}}
}

// metricsOf returns the lines of metrics.jsonl without the fields about time and without the lines
// about resuming and about snapshots, which are the only things in which a resumed run may differ.
func metricsOf(t testing.TB, output string) []map[string]any {
	t.Helper()
	var lines []map[string]any
	for _, line := range readLines(t, filepath.Join(output, rundir.MetricsFile)) {
		if line["resumed"] != nil || line["snapshot"] != nil {
			continue
		}
		for _, name := range []string{"seconds", "tokens_per_second", "mfu", "time", "rank_seconds", "slow_ranks",
			"slowest_ranks"} {
			delete(line, name)
		}
		if run, ok := line["run"].(map[string]any); ok {
			for _, name := range []string{"started", "device", "peak_flops"} {
				delete(run, name)
			}
		}
		lines = append(lines, line)
	}
	return lines
}

func readLines(t testing.TB, path string) []map[string]any {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(data) > 0 && data[len(data)-1] != '\n' {
		t.Fatalf("%s ends in an unfinished line", path)
	}
	var lines []map[string]any
	for s := bufio.NewScanner(bytes.NewReader(data)); s.Scan(); {
		d := json.NewDecoder(bytes.NewReader(s.Bytes()))
		d.UseNumber() // numbers are compared as they are written
		var line map[string]any
		if err := d.Decode(&line); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		lines = append(lines, line)
	}
	return lines
}

// sameRun compares everything that two runs of one configuration must have in common.
func sameRun(t testing.TB, what, want, got string) {
	t.Helper()
	if diff := cmp.Diff(metricsOf(t, want), metricsOf(t, got)); diff != "" {
		t.Errorf("%s: metrics differ (-want +got):\n%s", what, diff)
	}
	if diff := cmp.Diff(readLines(t, filepath.Join(want, fingerprint.LogFile)),
		readLines(t, filepath.Join(got, fingerprint.LogFile))); diff != "" {
		t.Errorf("%s: fingerprints differ (-want +got):\n%s", what, diff)
	}
	var saved [2]*checkpoint.Checkpoint
	for i, output := range []string{want, got} {
		var err error
		if saved[i], _, err = checkpoint.Find(context.Background(), output); err != nil {
			t.Fatal(err)
		}
	}
	checkpointtest.SameFiles(t, what, saved[0].Dir, saved[1].Dir, stateFile, manifestFile)
	if diff := cmp.Diff(saved[0].State, saved[1].State); diff != "" {
		t.Errorf("%s: states differ (-want +got):\n%s", what, diff)
	}
}

// sameModels compares the models that a run has kept with the models of another run.
func sameModels(t testing.TB, what, want, got string) {
	t.Helper()
	models, err := filepath.Glob(filepath.Join(want, checkpoint.ModelsDir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, model := range models {
		dir := filepath.Join(got, checkpoint.ModelsDir, filepath.Base(model))
		if _, err := os.Stat(dir); err != nil { // a process was killed before it removed the checkpoint
			dir = filepath.Join(got, checkpoint.DirName, filepath.Base(model))
		}
		files := checkpointtest.Files(t, dir)
		for name, content := range checkpointtest.Files(t, model) {
			if other, known := files[name]; !known || other != content {
				t.Errorf("%s: %s differs from %s, or is missing", what, filepath.Join(dir, name), model)
			}
		}
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "steps: 40\ncheckpoint: {every: 10, keep: 2}\nevaluate: {samples: 5}\n")
	var steps []int64
	var summary *Summary
	result := mustRun(t, c, Options{
		Version: "test",
		Report:  func(s Summary) { summary = &s },
		Progress: func(p Progress) {
			steps = append(steps, p.Step)
			if (p.Evaluation != nil) != ((p.Step+1)%10 == 0) || (p.Checkpoint != "") != ((p.Step+1)%10 == 0) {
				t.Errorf("step %d: evaluation %v, checkpoint %q", p.Step, p.Evaluation, p.Checkpoint)
			}
		},
		Warn: func(text string) { t.Errorf("warning: %s", text) },
	})
	if len(steps) != 40 || result.Steps != 40 || !result.Finished || result.Resumed != "" {
		t.Errorf("%d steps, result %+v", len(steps), result)
	}
	// 300 ids are possible at first; each has two successors in this language.
	if math.Abs(result.FirstLoss-math.Log(512)) > 0.3 || result.LastLoss > result.FirstLoss-1 {
		t.Errorf("loss went from %.3f to %.3f", result.FirstLoss, result.LastLoss)
	}
	if summary == nil || summary.Parameters != 198208 || summary.ActiveParameters != 124480 ||
		summary.TokensPerStep != 128 || summary.TotalTokens != 40*128 ||
		summary.Memory.Total() < 16*198208 || summary.Memory.Buffers() <= 0 {
		t.Errorf("summary %+v", summary)
	}
	names := checkpointsIn(t, c.Output)
	if !slices.Equal(names, []string{"step-00000040", "step-00000030"}) {
		t.Errorf("checkpoints %v", names)
	}
	if result.Checkpoint != filepath.Join(c.Output, checkpoint.DirName, "step-00000040") {
		t.Errorf("checkpoint %s", result.Checkpoint)
	}
	lines := readLines(t, filepath.Join(c.Output, rundir.MetricsFile))
	run, _ := lines[0]["run"].(map[string]any)
	if run["mula"] != "test" || fmt.Sprint(run["weights"]) != "map[go:0.7 tests:0.3]" ||
		run["model"].(map[string]any)["model_type"] != "olmoe" {
		t.Errorf("first line %v", lines[0])
	}
	if n := len(lines); n != 1+40+4 {
		t.Errorf("%d lines of metrics", n)
	}
	var record record.Run
	text, _ := json.Marshal(run)
	if err := json.Unmarshal(text, &record); err != nil || record.FLOPsPerToken != summary.FLOPsPerToken ||
		!(record.PeakFLOPS > 0) {
		t.Errorf("first line %s, %v", text, err)
	}
	checkMetrics(t, record, lines[1:])

	// The fingerprints equal the fingerprints of the plan.
	p, err := blend.ReadPlan(plan)
	if err != nil {
		t.Fatal(err)
	}
	data, err := blend.Open(context.Background(), p, blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	var want bytes.Buffer
	log, err := fingerprint.NewWriter(&want, fingerprint.Header{Plan: p.Fingerprint(), SequenceLength: 16,
		BatchSize: 8})
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Hash(context.Background(), data, stream.HashOptions{To: 40, BatchSize: 8}, log.Write); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(c.Output, fingerprint.LogFile))
	if err != nil || !bytes.Equal(got, want.Bytes()) {
		t.Errorf("fingerprints (%v)\n%s\nwant\n%s", err, got, want.Bytes())
	}

	// The resolved configuration describes the same run, which is finished.
	again, err := LoadConfig(filepath.Join(c.Output, rundir.ConfigFile))
	if err != nil {
		t.Fatal(err)
	}
	before := readLines(t, filepath.Join(c.Output, rundir.MetricsFile))
	second := mustRun(t, again, Options{Progress: func(Progress) { t.Error("a finished run did a step") }})
	if second != result {
		t.Errorf("run again: %+v, want %+v", second, result)
	}
	if diff := cmp.Diff(before, readLines(t, filepath.Join(c.Output, rundir.MetricsFile))); diff != "" {
		t.Errorf("run again: metrics have changed:\n%s", diff)
	}
}

// checkMetrics checks what must hold between the numbers of each line.
func checkMetrics(t *testing.T, run record.Run, lines []map[string]any) {
	t.Helper()
	next := int64(0)
	for _, line := range lines {
		text, _ := json.Marshal(line)
		if line["eval"] != nil {
			var e struct{ Eval record.Evaluation }
			if err := json.Unmarshal(text, &e); err != nil {
				t.Fatal(err)
			}
			if e.Eval.SourceTargets["go"] != 5*16 || e.Eval.SourceTargets["tests"] != 5*16 ||
				math.Abs(e.Eval.Loss-(e.Eval.SourceLoss["go"]+e.Eval.SourceLoss["tests"])/2) > 1e-12 {
				t.Errorf("evaluation %s", text)
			}
			continue
		}
		var m record.StepMetrics
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		if m.Step != next || m.First != 8*next || m.Samples != 8 || m.Tokens != 128 {
			t.Errorf("step %d expected: %s", next, text)
		}
		next++
		var loss float64
		samples := 0
		for name, n := range m.SourceSamples {
			loss += m.SourceLoss[name] * float64(n)
			samples += n
		}
		if samples != 8 || math.Abs(loss/8-m.Loss) > 1e-12 {
			t.Errorf("step %d: source losses %v of %v do not give %v", m.Step, m.SourceLoss, m.SourceSamples, m.Loss)
		}
		if len(m.ExpertTokens) != 2 {
			t.Fatalf("step %d: %d layers", m.Step, len(m.ExpertTokens))
		}
		for layer, counts := range m.ExpertTokens {
			var sum int64
			for _, n := range counts {
				sum += n
			}
			if len(counts) != 8 || sum != 2*128 {
				t.Errorf("step %d, layer %d: tokens of experts %v", m.Step, layer, counts)
			}
		}
		if m.AuxLoss < 1.9 || m.AuxLoss > 4 || m.GradNorm <= 0 || m.LearningRate <= 0 || m.Seconds <= 0 ||
			m.TokensPerSecond <= 0 {
			t.Errorf("step %d: %s", m.Step, text)
		}
		if len(m.RouterEntropy) != 2 || !(m.RouterEntropy[0] > 0.5*math.Log(8)) ||
			!(m.RouterEntropy[1] <= math.Log(8)) {
			t.Errorf("step %d: entropies of routers %v", m.Step, m.RouterEntropy)
		}
		if n := len(m.UpdateRatio); n != map[bool]int{true: 6}[m.Step%10 == 0] {
			t.Errorf("step %d: update ratios %v", m.Step, m.UpdateRatio)
		}
		if want := m.TokensPerSecond * run.FLOPsPerToken / run.PeakFLOPS; !(m.MFU > 0) ||
			math.Abs(m.MFU-want) > 1e-9*want {
			t.Errorf("step %d: utilization %v, want %v", m.Step, m.MFU, want)
		}
	}
}

// Nothing depends on chance or on the number of threads.
func TestRunDeterministic(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	first := testConfig(t, plan, "evaluate: {every: 4, samples: 3}\n")
	mustRun(t, first, Options{})
	for _, threads := range []int{1, 2, 3} {
		c := first
		c.Threads, c.Output = threads, filepath.Join(t.TempDir(), "run")
		mustRun(t, c, Options{})
		sameRun(t, fmt.Sprint(threads, " threads"), first.Output, c.Output)
	}
	// And what ought to matter does.
	c := first
	c.Seed, c.Output = 1, filepath.Join(t.TempDir(), "run")
	a, _, _ := checkpoint.Find(context.Background(), first.Output)
	if r := mustRun(t, c, Options{}); r.Weights == a.State.Weights {
		t.Error("another seed gives the same weights")
	}
}

// The sum of the micro-batches' gradients is the gradient of the batch. Without a load-balancing
// loss only roundings differ. With it the losses of micro-batches differ a little, because it is
// not linear in the batch.
func TestRunMicroBatches(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, test := range []struct {
		aux       string
		tolerance float64
	}{{"none", 1e-5}, {"hf", 2e-2}} {
		var want []map[string]any
		for _, micro := range []int{8, 4, 2, 1, 3} {
			c := testConfig(t, plan, fmt.Sprintf("steps: 4\nmicro_batch_size: %d\naux_loss: {form: %s}\nevaluate: "+
				"{every: 0}\ncheckpoint: {every: 0}\n", micro, test.aux))
			mustRun(t, c, Options{})
			got := metricsOf(t, c.Output)[1:]
			if want == nil {
				want = got
				continue
			}
			for i := range want {
				for _, name := range []string{"loss", "grad_norm"} {
					a, _ := want[i][name].(json.Number).Float64()
					b, _ := got[i][name].(json.Number).Float64()
					if math.Abs(a-b) > test.tolerance*a {
						t.Errorf("aux %s, micro-batches of %d, step %d: %s is %v, want %v", test.aux, micro, i, name, b,
							a)
					}
				}
			}
		}
	}
}

// A run that is stopped and started again, after any step, is the run that was never stopped.
func TestRunResume(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = crashConfig +
		"checkpoint: {every: 3}\nevaluate: {every: 2, samples: 3}\naux_loss: {form: megablocks}\nz_loss: " +
		"{coefficient: 0.001}\n"
	unbroken := testConfig(t, plan, more)
	want := mustRun(t, unbroken, Options{})
	for stop := range int64(7) {
		c := testConfig(t, plan, more)
		half := mustRun(t, c, stopAfter(stop))
		if half.Finished || half.Steps != stop+1 || filepath.Base(half.Checkpoint) != checkpoint.Name(stop+1) {
			t.Fatalf("stopped after step %d: %+v", stop, half)
		}
		var summary Summary
		got := mustRun(t, c, Options{Report: func(s Summary) { summary = s }})
		if summary.Resumed != checkpoint.Name(stop+1) || summary.NextStep != stop+1 {
			t.Errorf("stopped after step %d: resumed from %q at %d", stop, summary.Resumed, summary.NextStep)
		}
		if got.Resumed != checkpoint.Name(stop+1) || got.Weights != want.Weights || got.FirstLoss != want.FirstLoss ||
			got.LastLoss != want.LastLoss || !got.Finished {
			t.Errorf("stopped after step %d: %+v, want %+v", stop, got, want)
		}
		sameRun(t, fmt.Sprint("stopped after step ", stop), unbroken.Output, c.Output)
	}
	// Stopped before the first step.
	c := testConfig(t, plan, more)
	stop := make(chan struct{})
	close(stop)
	if r := mustRun(t, c, Options{Stop: stop}); r.Steps != 0 || r.Checkpoint == "" {
		t.Errorf("stopped before the first step: %+v", r)
	}
	mustRun(t, c, Options{})
	sameRun(t, "stopped before the first step", unbroken.Output, c.Output)
}

// A longer run continues the schedule of the shorter run if the user requests it, and not
// otherwise.
func TestRunLonger(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	long := testConfig(t, plan, crashConfig+"schedule: {learning_rate: 3e-3, warmup_steps: 2, decay_steps: 8}\n")
	long.Steps = 12
	mustRun(t, long, Options{})
	c := testConfig(t, plan, crashConfig)
	mustRun(t, c, Options{})
	c.Steps = 12
	_, err := Run(context.Background(), c, Options{})
	if err == nil || !strings.Contains(err.Error(), "schedule.decay_steps was 8 and is now 12") ||
		!strings.Contains(err.Error(), "keep schedule.decay_steps at 8") {
		t.Errorf("longer schedule: %v", err)
	}
	c.Schedule.DecaySteps = 8
	if r := mustRun(t, c, Options{}); r.Steps != 12 || !r.Finished {
		t.Errorf("longer run: %+v", r)
	}
	a, b := metricsOf(t, long.Output), metricsOf(t, c.Output)
	for _, lines := range []*[]map[string]any{&a, &b} {
		// the header has the number of steps, evaluations follow checkpoints
		*lines = slices.DeleteFunc(*lines, func(l map[string]any) bool { return l["run"] != nil || l["eval"] != nil })
	}
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("steps differ:\n%s", diff)
	}
}

// A run with the schedule wsd can be made longer, or shorter, until its learning rate begins to
// fall, and one with a constant one at any time: it is then the run that was so long from the
// beginning. What has changed is on record for the next time.
func TestRunLongerSchedule(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const wsd, constant = "name: wsd, learning_rate: 3e-3, ", "name: constant, learning_rate: 3e-3, "
	config := func(steps int64, schedule string) Config {
		c := testConfig(t, plan,
			crashConfig+"checkpoint: {every: 2, keep: 9}\nevaluate: {every: 0}\nschedule: {"+schedule+"}\n")
		c.Steps = steps
		return c
	}
	for _, test := range []struct {
		name        string
		short, long Config
		stop        int64 // steps done before the change
		err         []string
	}{
		{"wsd", config(8, wsd+"warmup_steps: 1"), config(16, wsd+"warmup_steps: 1"), 6, nil},
		{"wsd, shorter", config(16, wsd+"warmup_steps: 1"), config(8, wsd+"warmup_steps: 1"), 6, nil},
		{"wsd, another decay", config(8, wsd+"warmup_steps: 1"),
			config(16, wsd+"warmup_steps: 1, cooldown_steps: 8, cooldown: linear, min_learning_rate: 1e-4"), 6, nil},
		{"wsd that falls", config(8, wsd+"warmup_steps: 1, cooldown_steps: 4"),
			config(16, wsd+"warmup_steps: 1, cooldown_steps: 4"), 6,
			[]string{"schedule.decay_steps was 8 and is now 16", "here up to step 4, but the checkpoint is of step 6",
				"keep schedule.decay_steps at 8"}},
		{"wsd that would have fallen", config(16, wsd+"warmup_steps: 1"),
			config(16, wsd+"warmup_steps: 1, cooldown_steps: 12"), 6,
			[]string{"schedule.cooldown_steps was 3 and is now 12", "here up to step 4"}},
		{"wsd, another warm-up", config(8, wsd), config(30, wsd), 6,
			[]string{"schedule.warmup_steps was 0 and is now 3", "schedule.warmup_steps: 0 "}},
		{"wsd, another start", config(8, wsd+"warmup_steps: 2, warmup_from: min, min_learning_rate: 1e-4"),
			config(8, wsd+"warmup_steps: 2, warmup_from: min, min_learning_rate: 2e-4"), 4,
			[]string{"schedule.min_learning_rate was 0.0001 and is now 0.0002"}},
		{"wsd, another peak", config(8, wsd+"warmup_steps: 1"),
			config(8, "name: wsd, learning_rate: 2e-3, warmup_steps: 1"), 4,
			[]string{"schedule.learning_rate was 0.003 and is now 0.002"}},
		{"wsd, and another seed", config(8, wsd+"warmup_steps: 1"), func() Config {
			c := config(16, wsd+"warmup_steps: 1")
			c.Seed = 5
			return c
		}(), 4, []string{"checkpoint: seed was 0 and is now 5; restore"}},
		{"constant", config(8, constant+"warmup_steps: 1"), config(16, constant+"warmup_steps: 1"), 6, nil},
		{"constant, another warm-up", config(8, constant), config(30, constant), 6,
			[]string{"schedule.warmup_steps was 0 and is now 3", "schedule.warmup_steps: 0 "}},
		{"linear", config(8, "name: linear, warmup_steps: 1"), config(16, "name: linear, warmup_steps: 1"), 6,
			[]string{"schedule.decay_steps was 8 and is now 16", "schedule linear falls from the end of the warm-up",
				"keep schedule.decay_steps at 8, schedule.warmup_steps at 1"}},
	} {
		mustRun(t, test.short, stopAfter(test.stop-1))
		c := test.long
		c.Output = test.short.Output
		if test.err != nil {
			_, err := Run(context.Background(), c, Options{})
			for _, want := range test.err {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%s: error %v, want %q", test.name, err, want)
				}
			}
			continue
		}
		mustRun(t, test.long, Options{})
		mustRun(t, c, stopAfter(test.stop)) // again between: the checkpoint has the new state
		mustRun(t, c, Options{})
		a, b := metricsOf(t, test.long.Output), metricsOf(t, c.Output)
		if diff := cmp.Diff(a[1:], b[1:]); diff != "" { // the header has the steps of the beginning
			t.Errorf("%s: steps differ:\n%s", test.name, diff)
		}
		var states [2]checkpoint.State
		for i, output := range []string{test.long.Output, c.Output} {
			found, _, err := checkpoint.Find(t.Context(), output)
			if err != nil {
				t.Fatal(err)
			}
			states[i] = found.State
		}
		if diff := cmp.Diff(states[0], states[1]); diff != "" {
			t.Errorf("%s: the last states differ:\n%s", test.name, diff)
		}
	}
}

// What would change the run is refused when it is resumed, by name; what would not is not.
func TestRunChangedConfig(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "")
	mustRun(t, c, stopAfter(3))
	for name, change := range map[string]func(*Config){
		"batch_size":                  func(c *Config) { c.BatchSize = 4 },
		"micro_batch_size":            func(c *Config) { c.MicroBatchSize = 2 },
		"seed":                        func(c *Config) { c.Seed++ },
		"model.num_hidden_layers":     func(c *Config) { c.Model.Layers++ },
		"model.vocab_size":            func(c *Config) { c.Model.VocabSize = 1024 },
		"optimizer.betas":             func(c *Config) { c.Optimizer.Betas = []float64{0.9, 0.99} },
		"optimizer.decay":             func(c *Config) { c.Optimizer.Decay = optimizer.DecayOptimus },
		"schedule.learning_rate":      func(c *Config) { c.Schedule.LearningRate *= 2 },
		"schedule.warmup_from":        func(c *Config) { c.Schedule.WarmupFrom = optimizer.WarmupFromMin },
		"aux_loss.form":               func(c *Config) { c.AuxLoss.Form = "megablocks" },
		"z_loss.coefficient":          func(c *Config) { c.ZLoss.Coefficient = 1 },
		"optimizer.clip":              func(c *Config) { c.Optimizer.Clip = 0 },
		"optimizer.clip_after_warmup": func(c *Config) { c.Optimizer.ClipAfterWarmup = true },
	} {
		changed := c
		change(&changed)
		_, err := Run(context.Background(), changed, Options{})
		if err == nil || !strings.Contains(err.Error(), name+" was ") ||
			!strings.Contains(err.Error(), "step-00000004") {
			t.Errorf("%s changed: %v", name, err)
		}
	}
	unbroken := testConfig(t, plan, "")
	mustRun(t, unbroken, Options{})
	c.Threads, c.Checkpoint.Keep = 2, 1
	every := int64(2)
	c.Checkpoint.Every = &every
	mustRun(t, c, Options{})
	a, _, _ := checkpoint.Find(context.Background(), unbroken.Output)
	b, _, err := checkpoint.Find(context.Background(), c.Output)
	if err != nil || a.State.Weights != b.State.Weights {
		t.Errorf("harmless changes changed the weights (%v)", err)
	}
}

// A run that resumes with other arithmetic warns that its bits will differ. A run with the same
// arithmetic does not warn.
func TestRunArithmetic(t *testing.T) {
	t.Parallel()
	c := testConfig(t, makePlan(t, t.TempDir(), "plan.json", ""), "evaluate: {every: 0}\n")
	mustRun(t, c, stopAfter(3))
	var warnings []string
	stopped := stopAfter(4)
	stopped.Warn = func(text string) { warnings = append(warnings, text) }
	saved := mustRun(t, c, stopped)
	if len(warnings) > 0 {
		t.Errorf("the same arithmetic: warnings %q", warnings)
	}
	checkpointtest.Rewrite(t, saved.Checkpoint, stateFile, func(content []byte) []byte {
		return regexp.MustCompile(`"arithmetic": "[^"]*"`).ReplaceAll(content, []byte(`"arithmetic": "abacus"`))
	})
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	if len(warnings) != 1 || !strings.Contains(warnings[0], "arithmetic of abacus") {
		t.Errorf("another arithmetic: warnings %q", warnings)
	}
}

// Skipped positions give no samples; a step without any changes nothing but is on record.
func TestRunSkips(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "skips: [{from: 8, to: 16}, {from: 19, to: 21}]\n")
	c := testConfig(t, plan, "checkpoint: {every: 1, keep: 9}\nevaluate: {every: 0}\n")
	mustRun(t, c, Options{})
	lines := metricsOf(t, c.Output)[1:]
	for step, want := range []string{"8", "0", "6", "8", "8", "8", "8", "8"} {
		if got := fmt.Sprint(lines[step]["samples"]); got != want {
			t.Errorf("step %d has %s samples, want %s", step, got, want)
		}
	}
	hashes := func(step int64) (string, checkpoint.State) {
		s, _, err := checkpoint.Find(context.Background(), filepath.Join(c.Output, checkpoint.DirName,
			checkpoint.Name(step)))
		if err != nil {
			t.Fatal(err)
		}
		return s.State.Weights, s.State
	}
	before, _ := hashes(1)
	empty, state := hashes(2)
	after, _ := hashes(3)
	if before != empty || empty == after {
		t.Error("the weights changed in a step without samples, or did not in one with")
	}
	if state.Updates != 1 || state.Step != 2 || state.Cursor.Position != 16 || state.Tokens != 128 {
		t.Errorf("state after a step without samples: %+v", state)
	}
	log := readLines(t, filepath.Join(c.Output, fingerprint.LogFile))
	if len(log) != 9 || fmt.Sprint(log[2]["samples"]) != "0" || fmt.Sprint(log[3]["samples"]) != "6" {
		t.Errorf("fingerprints %v", log)
	}
	if r, err := report.Read(c.Output); err != nil || r.Done != 8 || r.Spans[1].Samples != 0 ||
		len(r.ExpertLoad) != 2 {
		t.Errorf("the report reads %+v, %v", r, err)
	}
	resumed := testConfig(t, plan, "checkpoint: {every: 1, keep: 9}\nevaluate: {every: 0}\n")
	mustRun(t, resumed, stopAfter(1))
	mustRun(t, resumed, Options{})
	sameRun(t, "stopped at the step without samples", c.Output, resumed.Output)
}

// Another plan is refused, and accepted if the user requests it: the run then resumes at the same
// position of the new plan.
func TestRunPlanChange(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	other := makePlan(t, dir, "other.json", "skips: [{from: 40, to: 43}]\n")
	c := testConfig(t, plan, "evaluate: {every: 0}\n")
	mustRun(t, c, stopAfter(3))
	c.Plan = other
	_, err := Run(context.Background(), c, Options{})
	if err == nil || !strings.Contains(err.Error(), "plan_change: accept") {
		t.Fatalf("another plan: %v", err)
	}
	c.PlanChange = acceptPlanChange
	var warnings []string
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	if len(warnings) != 1 || !strings.Contains(warnings[0], "position 32") {
		t.Errorf("warnings %q", warnings)
	}
	var samples []string
	var resumed map[string]any
	for _, line := range readLines(t, filepath.Join(c.Output, rundir.MetricsFile))[1:] {
		if line["resumed"] != nil {
			resumed = line["resumed"].(map[string]any)
		} else {
			samples = append(samples, fmt.Sprint(line["samples"]))
		}
	}
	p, _ := blend.ReadPlan(plan)
	q, _ := blend.ReadPlan(other)
	if resumed["old_plan"] != p.Fingerprint() || resumed["plan"] != q.Fingerprint() {
		t.Errorf("resumed %v", resumed)
	}
	if want := []string{"8", "8", "8", "8", "8", "5", "8", "8"}; !slices.Equal(samples, want) {
		t.Errorf("samples %v, want %v", samples, want)
	}
	// Each log is about one plan.
	old := readLines(t, filepath.Join(c.Output, fingerprint.OlderLogFile(p.Fingerprint())))
	now := readLines(t, filepath.Join(c.Output, fingerprint.LogFile))
	if len(old) != 5 || len(now) != 5 || old[0]["plan"] != p.Fingerprint() || now[0]["plan"] != q.Fingerprint() ||
		fmt.Sprint(now[1]["step"]) != "4" {
		t.Errorf("fingerprints of the old plan %v, of the new one %v", old, now)
	}
	// The next resume knows the new plan.
	c.PlanChange, c.Steps, c.Schedule.DecaySteps = refusePlanChange, 10, 8
	mustRun(t, c, Options{Warn: func(text string) { t.Errorf("warning: %s", text) }})
}

// A model that the machine cannot hold is refused with the figures, before anything is made in the
// run directory.
func TestRunTooLarge(t *testing.T) {
	if machine.TotalMemory() == 0 {
		t.Skip("the size of this machine's memory is not known")
	}
	c := testConfig(t, makePlan(t, t.TempDir(), "plan.json", ""), "")
	var err error
	if c.Model.Config, err = moe.Preset("mula-220b-a10b"); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(context.Background(), c, Options{}); err == nil || !strings.Contains(err.Error(), "GB of memory") {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(filepath.Join(c.Output, ".lock")); err == nil {
		t.Error("a run directory was made")
	}
}

// Some changes of plan are refused even if a change is accepted: the model would see other text, or
// samples of another length.
func TestRunPlanChangeRefused(t *testing.T) {
	dir := t.TempDir()
	c := testConfig(t, makePlan(t, dir, "plan.json", ""), "plan_change: accept\nevaluate: {every: 0}\n")
	mustRun(t, c, stopAfter(3))

	const sources = "sources:\n- {name: go, shards: [go.idx], weight: 0.7}\n- {name: tests, shards: [tests.idx], " +
		"weight: 0.3}\n"
	c.Plan = plantest.Seal(t, dir, "short.json", "sequence_length: 8\nseed: 5\n"+sources)
	if _, err := Run(context.Background(), c, Options{}); err == nil ||
		!strings.Contains(err.Error(), "sequence length") {
		t.Errorf("another sequence length: %v", err)
	}
	for _, name := range []string{"go.json", "tests.json"} { // the manifests of the shards
		path := filepath.Join(dir, name)
		manifest, err := shards.ReadManifest(path)
		if err != nil {
			t.Fatal(err)
		}
		manifest.Tokenizer.SHA256 = fmt.Sprintf("%x", sha256.Sum256([]byte("another tokenizer.json")))
		f, err := manifest.Seal(atomicfile.Files{}, path)
		if err == nil {
			err = f.Publish()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	c.Plan = plantest.Seal(t, dir, "other.json", "sequence_length: 16\nseed: 5\n"+sources)
	if _, err := Run(context.Background(), c, Options{}); err == nil ||
		!strings.Contains(err.Error(), "whose ids mean different text") {
		t.Errorf("another tokenizer: %v", err)
	}
}

// A run that is killed under another plan, before it has saved a checkpoint there, loses nothing
// that is on record of either: not when it is started again, and not when it goes back to the first
// plan.
func TestRunPlanChangeKilled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	other := makePlan(t, dir, "other.json", "skips: [{from: 40, to: 43}]\n")
	p, q := mustPlan(t, plan).Fingerprint(), mustPlan(t, other).Fingerprint()
	const more = crashConfig + "evaluate: {every: 0}\ncheckpoint: {every: 0}\n"
	unbroken := testConfig(t, plan, more)
	mustRun(t, unbroken, Options{})
	killed := func() Config {
		c := testConfig(t, plan, more)
		mustRun(t, c, stopAfter(3))
		c.Plan, c.PlanChange = other, acceptPlanChange
		ctx, cancel := context.WithCancel(context.Background())
		_, err := Run(ctx, c, Options{Progress: func(p Progress) {
			if p.Step == 5 {
				cancel()
			}
		}})
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("error %v", err)
		}
		return c
	}
	c := killed()
	var warnings []string
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	if len(warnings) != 1 || !strings.Contains(warnings[0], "the plan has changed") {
		t.Errorf("warnings %q", warnings)
	}
	old, now := readLines(t, filepath.Join(c.Output, fingerprint.OlderLogFile(p))), readLines(t,
		filepath.Join(c.Output, fingerprint.LogFile))
	if len(old) != 5 || old[0]["plan"] != p || fmt.Sprint(old[4]["step"]) != "3" {
		t.Errorf("fingerprints of the old plan %v", old)
	}
	if len(now) != 5 || now[0]["plan"] != q || fmt.Sprint(now[1]["step"]) != "4" || fmt.Sprint(now[4]["step"]) != "7" {
		t.Errorf("fingerprints of the new plan %v", now)
	}

	c = killed()
	c.Plan, c.PlanChange = plan, refusePlanChange
	mustRun(t, c, Options{Warn: func(text string) { t.Errorf("back to the first plan: warning: %s", text) }})
	sameRun(t, "back to the first plan", unbroken.Output, c.Output)

	// A new run in the same directory does not use any of this.
	if err := os.RemoveAll(filepath.Join(c.Output, checkpoint.DirName)); err != nil {
		t.Fatal(err)
	}
	mustRun(t, c, Options{})
	if left, _ := filepath.Glob(filepath.Join(c.Output, fingerprint.OlderLogFile("*"))); len(left) > 0 {
		t.Errorf("a new run kept %v", left)
	}
}

// The train.yaml in the run directory describes the same run also if paths were relative to the
// working directory, and after all files have moved together.
func TestRunRelativePaths(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "here")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	makePlan(t, dir, "plan.json", "")
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte(tokenizerJSON), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	c := testConfig(t, "plan.json", crashConfig)
	c.Output, c.Tokenizer = filepath.Join("runs", "a"), "tokenizer.json"
	want := mustRun(t, c, Options{})
	moved := filepath.Join(filepath.Dir(dir), "there")
	t.Chdir(filepath.Dir(dir))
	if err := os.Rename(dir, moved); err != nil {
		t.Fatal(err)
	}
	again, err := LoadConfig(filepath.Join("there", "runs", "a", rundir.ConfigFile))
	if err != nil {
		t.Fatal(err)
	}
	if again.Output != filepath.Join("there", "runs", "a") || again.Plan != filepath.Join("there", "plan.json") ||
		again.Tokenizer != filepath.Join("there", "tokenizer.json") {
		t.Errorf("output %s, plan %s, tokenizer %s", again.Output, again.Plan, again.Tokenizer)
	}
	if got := mustRun(t, again,
		Options{Progress: func(Progress) { t.Error("a finished run did a step") }}); got.Weights != want.Weights {
		t.Errorf("run again: %+v, want %+v", got, want)
	}
}

// A train.yaml that someone has written is not overwritten, whatever the output.
func TestRunKeepsConfig(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, crashConfig)
	path := filepath.Join(c.Output, rundir.ConfigFile)
	if err := os.MkdirAll(c.Output, 0o755); err != nil {
		t.Fatal(err)
	}
	const own = "# my notes\noutput: .\n"
	if err := os.WriteFile(path, []byte(own), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(context.Background(), c, Options{}); err == nil || !strings.Contains(err.Error(), path) ||
		!strings.Contains(err.Error(), "another output") {
		t.Errorf("error %v", err)
	}
	if entries, err := os.ReadDir(c.Output); err != nil || len(entries) != 1 {
		t.Errorf("the directory holds %v, %v", entries, err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != own {
		t.Errorf("train.yaml is %q, %v", got, err)
	}
}

func TestRunErrors(t *testing.T) {
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	tokenizer := filepath.Join(dir, "tokenizer.json")
	if err := os.WriteFile(tokenizer, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		more   string
		change func(*Config)
		want   []string
	}{
		{"", func(c *Config) { c.Plan += "x" }, []string{"plan.jsonx"}},
		{"", func(c *Config) { c.Steps = 10000 }, []string{"steps is 10000", "batch_size 8"}},
		{"batch_size: 5000\n", nil, []string{"batch_size is 5000", "less than one step"}},
		{"model: {preset: mula-nano, vocab_size: 256}\n", nil, []string{"model.vocab_size is 256", "300"}},
		{"model: {preset: mula-nano, max_position_embeddings: 8}\n", nil, []string{"model.max_position_embeddings is 8",
			"16"}},
		{"model: {preset: mula-nano, hidden_size: 63}\n", nil, []string{"model.hidden_size 63 is not a multiple"}},
		{"model: {preset: mula-nano, clip_qkv: -1}\n", nil, []string{"model.clip_qkv is -1"}},
		{"", func(c *Config) { c.Tokenizer = tokenizer }, []string{tokenizer, "SHA-256"}},
		{"", func(c *Config) { c.Tokenizer = tokenizer + "x" }, []string{tokenizer + "x"}},
		{"", func(c *Config) { c.Output = filepath.Join(plan, "run") },
			[]string{"output is " + filepath.Join(plan, "run"), plan + " is a file; write the path of a directory"}},
	} {
		c, err := ParseConfig([]byte("steps: 8\nbatch_size: 8\nmodel: {preset: mula-nano}\n"), "train.yaml")
		if test.more != "" {
			c, err = ParseConfig([]byte(test.more), "train.yaml")
		}
		if err != nil {
			t.Fatal(err)
		}
		c.Plan, c.Output = plan, filepath.Join(t.TempDir(), "run")
		if test.change != nil {
			test.change(&c)
		}
		_, err = Run(context.Background(), c, Options{})
		if err == nil {
			t.Errorf("%v: no error", test.want)
			continue
		}
		for _, want := range test.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("error %q does not say %q", err, want)
			}
		}
	}
}

// One process at a time writes to a run directory.
func TestRunLocked(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "")
	tried := false
	mustRun(t, c, Options{Progress: func(Progress) {
		if !tried {
			tried = true
			if _, err := Run(context.Background(), c, Options{}); err == nil ||
				!strings.Contains(err.Error(), "another process") {
				t.Errorf("second run: %v", err)
			}
		}
	}})
	if !tried {
		t.Error("no step")
	}
}

// A done context ends a run at once. It is not a stop: nothing is saved.
func TestRunCancelled(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "checkpoint: {every: 1}\n")
	ctx, cancel := context.WithCancel(context.Background())
	_, err := Run(ctx, c, Options{Progress: func(p Progress) {
		if p.Step == 2 {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v", err)
	}
	names := checkpointsIn(t, c.Output)
	if last := checkpoint.Name(3); slices.Contains(names, checkpoint.Name(4)) || len(names) > 3 || len(names) > 0 &&
		names[0] > last {
		t.Errorf("checkpoints %v", names)
	}
}

// Every field that may change on resume is a field.
func TestIdentity(t *testing.T) {
	c := defaultConfig()
	c.Schedule.WarmupSteps, c.Schedule.MinLearningRate, c.Checkpoint.Every, c.Evaluate.Every = new(int64), new(float64),
		new(int64), new(int64)
	c.Optimizer.Resolve()
	all := strictyaml.Fields(c)
	for _, name := range free {
		if all[name] == "" {
			t.Errorf("%s is not a field", name)
		}
	}
	identity, oldNames := c.identity(), strictyaml.OldNames(&Config{})
	if len(identity)+len(free) != len(all) || identity["optimizer.betas"] != "[0.9,0.95]" ||
		identity["model.hidden_size"] != "256" {
		t.Errorf("identity %v", identity)
	}
	if err := (checkpoint.State{Config: identity, Step: 4}).CheckConfig(identity, oldNames); err != nil {
		t.Error(err)
	}
	less := maps.Clone(identity)
	delete(less, "seed")
	if err := (checkpoint.State{Config: less, Step: 4}).CheckConfig(identity, oldNames); err == nil ||
		!strings.Contains(err.Error(), "seed was not set and is now 0") {
		t.Errorf("field that the checkpoint lacks: %v", err)
	}
	older := maps.Clone(identity) // a checkpoint from before there were spikes
	for name := range older {
		if strings.HasPrefix(name, "spikes.") {
			delete(older, name)
		}
	}
	if err := (checkpoint.State{Config: older, Step: 4}).CheckConfig(identity, oldNames); err != nil {
		t.Errorf("checkpoint of an older version: %v", err)
	}
	renamed := maps.Clone(identity) // a checkpoint with the old name of a field
	renamed["spikes.leave_out"] = renamed["spikes.skip_steps"]
	delete(renamed, "spikes.skip_steps")
	if err := (checkpoint.State{Config: renamed, Step: 4}).CheckConfig(identity, oldNames); err != nil {
		t.Errorf("checkpoint with an old name: %v", err)
	}
	renamed["spikes.leave_out"] = "7"
	if err := (checkpoint.State{Config: renamed, Step: 4}).CheckConfig(identity, oldNames); err == nil ||
		!strings.Contains(err.Error(), "spikes.skip_steps was 7 and is now 100;") {
		t.Errorf("another value under an old name: %v", err)
	}
	skipping := maps.Clone(identity)
	skipping["spikes.action"] = `"skip"`
	if err := (checkpoint.State{Config: older, Step: 4}).CheckConfig(skipping, oldNames); err == nil ||
		!strings.Contains(err.Error(), `spikes.action was "none" and is now "skip"`) {
		t.Errorf("checkpoint of an older version, and spikes are to be skipped: %v", err)
	}
	if err := (checkpoint.State{Config: identity, Step: 4}).CheckConfig(less, oldNames); err == nil ||
		!strings.Contains(err.Error(), "seed was 0 and is now not set") {
		t.Errorf("field that only the checkpoint has: %v", err)
	}
}

func mustPlan(t testing.TB, path string) *blend.Plan {
	t.Helper()
	p, err := blend.ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A run resumes automatically with a plan that amends its own, if both are the same up to the
// checkpoint. A plan that was amended before the checkpoint is another plan.
func TestRunAmendedPlan(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	parent, err := blend.ReadPlan(plan)
	if err != nil {
		t.Fatal(err)
	}
	amend := func(name string, from, to int64) string {
		child, err := blend.Amend(t.Context(), parent,
			&blend.Amendment{At: from, Skips: []blend.Range{{From: from, To: to}}, Reason: "a spike"},
			blend.SealOptions{})
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := child.Write(path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	early, late := amend("early.json", 20, 23), amend("late.json", 40, 43)
	c := testConfig(t, plan, "evaluate: {every: 0}\n")
	mustRun(t, c, stopAfter(3)) // before position 32
	c.Plan = early
	if _, err := Run(t.Context(), c, Options{}); err == nil ||
		!strings.Contains(err.Error(), "amends that plan from position 20 on") ||
		!strings.Contains(err.Error(), "plan_change: accept") {
		t.Fatalf("a plan amended before the checkpoint: %v", err)
	}
	c.Plan = late
	var warnings []string
	mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
	if len(warnings) != 1 || !strings.Contains(warnings[0], "position 32") {
		t.Errorf("warnings %q", warnings)
	}
	// It is the run along the amended plan: the same weights in the end.
	whole := testConfig(t, late, "evaluate: {every: 0}\n")
	mustRun(t, whole, Options{})
	weights := func(c Config) string {
		s, _, err := checkpoint.Find(t.Context(), filepath.Join(c.Output, checkpoint.DirName,
			checkpoint.Name(8)))
		if err != nil {
			t.Fatal(err)
		}
		return s.State.Weights
	}
	if weights(c) != weights(whole) {
		t.Error("the weights are not those of a run along the amended plan from the beginning")
	}
}

// A run keeps the models of the steps of checkpoint.keep_every, with the weights of these steps.
func TestKeepEvery(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const config = crashConfig + "checkpoint: {every: 1, keep: 1, keep_every: %d, writers: 1}\n" +
		"evaluate: {every: 0}\nlayout: {expert_dp: 2}\n"
	c := testConfig(t, plan, fmt.Sprintf(config, 3))
	weights := mustRun(t, c, stopAfter(2)).Weights
	mustRun(t, c, Options{})
	models := checkpointtest.Names(t, filepath.Join(c.Output, checkpoint.ModelsDir))
	if !slices.Equal(models, []string{checkpoint.Name(3), checkpoint.Name(6)}) {
		t.Fatalf("models %v", models)
	}
	m, _, err := checkpoint.FindModel(t.Context(), filepath.Join(c.Output, checkpoint.ModelsDir, models[0]))
	if err != nil {
		t.Fatal(err)
	}
	if same, got, err := m.HasWeights(t.Context(), weights); err != nil || !same {
		t.Errorf("weights %s, want %s; %v", got, weights, err)
	}
	wrong := testConfig(t, plan, strings.Replace(fmt.Sprintf(config, 3), "every: 1", "every: 2", 1))
	if _, err := Run(t.Context(), wrong, Options{}); err == nil || !strings.Contains(err.Error(),
		"checkpoint.keep_every is 3 and must be a multiple of checkpoint.every, which is 2") {
		t.Errorf("error %v", err)
	}
}
