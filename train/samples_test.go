package train

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/blend"
	"mula/blend/plantest"
	"mula/blend/stream"
	"mula/internal/longtest"
	"mula/moe"
	"mula/shards"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/estimate"
	"mula/train/evaluate"
	"mula/train/record"
	"mula/train/samples"
)

// packedPlan writes two shards of short and a few long documents, text with structure, and seals a
// plan whose samples are packed. Windows are in windowsPlan, over the same shards.
func packedPlan(t testing.TB, dir, name, more string) string {
	t.Helper()
	writeDocuments(t, dir, "go", 1, func(rng *rand.Rand) int { return 1 + rng.IntN(25) })
	writeDocuments(t, dir, "tests", 2, func(rng *rand.Rand) int {
		if rng.IntN(8) == 0 {
			return 60
		}
		return 1 + rng.IntN(9)
	})
	return plantest.Seal(t, dir, name, documentsBlend+"packing: best_fit\n"+more)
}

func windowsPlan(t testing.TB, dir, name, more string) string {
	t.Helper()
	return plantest.Seal(t, dir, name, documentsBlend+more)
}

const documentsBlend = "sequence_length: 24\nseed: 5\nvalidation: 0.15\nsources:\n- {name: go, shards: [go.idx], " +
	"weight: 0.7}\n- {name: tests, shards: [tests.idx], weight: 0.3}\n"

// writeDocuments writes a shard of documents of the given lengths in tokens.
func writeDocuments(t testing.TB, dir, name string, seed uint64, length func(rng *rand.Rand) int) {
	t.Helper()
	w, err := shards.Create(filepath.Join(dir, name), shards.UInt16, shards.TokenizerInfo{
		SHA256: fmt.Sprintf("%x", sha256.Sum256([]byte(tokenizerJSON))), VocabSize: 300, EOD: 0, ClassTable: "test",
		Specials: "text"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	rng := rand.New(rand.NewPCG(11, seed))
	for document := range 400 {
		var tokens []uint32
		n := length(rng)
		for id := rng.Uint32N(100); len(tokens) < n; id = (id*5 + 1 + rng.Uint32N(2)) % 299 {
			tokens = append(tokens, id+1)
		}
		if err := w.Append(tokens, shards.DocumentOrigin{ID: fmt.Sprint(name, document), File: "made",
			Line: int64(document) + 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

// openData opens the data of a plan for a test.
func openData(t testing.TB, plan string) *blend.Data {
	t.Helper()
	data, err := blend.Open(context.Background(), mustPlan(t, plan), blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { data.Close() })
	return data
}

// documentByDocument returns the loss and the number of targets of a sample, and reads each
// document separately.
func documentByDocument(t testing.TB, m *moe.Model, tokens []uint32, starts []int32, filled int) (loss float64,
	targets int64) {
	t.Helper()
	bounds := append(append([]int32{0}, starts...), int32(filled))
	for i, from := range bounds[:len(bounds)-1] {
		if n := int(bounds[i+1] - from); n > 1 {
			stats, err := m.Forward(t.Context(), moe.Batch{Tokens: tokens[from:][:n], Rows: 1, SequenceLength: n - 1})
			if err != nil {
				t.Fatal(err)
			}
			loss += stats.Loss
			targets += int64(n - 1)
		}
	}
	return loss, targets
}

// The losses of a step and of an evaluation are means over the targets of documents that are read
// one by one: of packed samples, and of windows whose attention stays within documents.
func TestDocumentsLosses(t *testing.T) {
	dir := t.TempDir()
	packed := packedPlan(t, dir, "plan.json", "")
	for name, c := range map[string]Config{
		"packed": testConfig(t, packed, "steps: 6\nmicro_batch_size: 3\nevaluate: {every: 6, samples: 4}\n"),
		"windows": testConfig(t, windowsPlan(t, dir, "windows.json", ""),
			"attention: documents\nsteps: 6\nmicro_batch_size: 3\nevaluate: {every: 6, samples: 4}\n"),
	} {
		var summary Summary
		var steps []record.StepMetrics
		var during *record.Evaluation
		result := mustRun(t, c, Options{Report: func(s Summary) { summary = s }, Progress: func(p Progress) {
			steps = append(steps, p.StepMetrics)
			during = p.Evaluation
		}, Warn: func(text string) { t.Errorf("%s: warning %q", name, text) }})
		if summary.Config.Attention != samples.DocumentAttention {
			t.Errorf("%s: attention %q", name, summary.Config.Attention)
		}
		if !(result.LastLoss < result.FirstLoss) {
			t.Errorf("%s: loss went from %v to %v", name, result.FirstLoss, result.LastLoss)
		}
		data := openData(t, c.Plan)
		m, err := moe.New(summary.Config.Model.Config, device(t, 1))
		if err != nil {
			t.Fatal(err)
		}
		m.Init(c.Seed)

		// The first step, whose weights are known.
		batches, err := stream.New(t.Context(), data, stream.Options{BatchSize: 8, To: 8})
		if err != nil {
			t.Fatal(err)
		}
		defer batches.Close()
		record, err := batches.Next()
		if err != nil {
			t.Fatal(err)
		}
		defer record.Release()
		batch, err := stream.NewBatch(record)
		if err != nil {
			t.Fatal(err)
		}
		loss, targets, sourceLoss, sourceTargets := 0.0, int64(0), map[string]float64{}, map[string]int64{}
		for row := range batch.Rows() {
			l, n := documentByDocument(t, m, batch.AppendTokens(nil, row), batch.DocumentStarts(row), batch.Length(row))
			loss += l
			targets += n
			sourceLoss[batch.SourceName(row)] += l
			sourceTargets[batch.SourceName(row)] += n
		}
		first := steps[0]
		if first.Targets == nil || *first.Targets != targets || targets >= 8*24-8 || first.Tokens != 8*24 ||
			!near(first.Loss, loss/float64(targets), 1e-5) {
			t.Errorf("%s: the first step has loss %v of %v targets, want %v of %d", name, first.Loss, first.Targets,
				loss/float64(targets), targets)
		}
		for source, n := range sourceTargets {
			if want := sourceLoss[source] / float64(n); !near(first.SourceLoss[source], want, 1e-5) {
				t.Errorf("%s: source %s has loss %v, want %v", name, source, first.SourceLoss[source], want)
			}
		}

		// Evaluations, of some samples and of all.
		trained, err := moe.Open(result.Checkpoint, device(t, 2))
		if err != nil {
			t.Fatal(err)
		}
		for _, samples := range []int{4, 0} {
			got, err := evaluate.Model(t.Context(), trained, data, evaluate.Options{Samples: samples, BatchSize: 3,
				Attention: summary.Config.Attention})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(*during, got); samples == 4 && diff != "" {
				t.Errorf("%s: evaluated during the run and after it:\n%s", name, diff)
			}
			for i, source := range data.Sources {
				held := slices.Collect(data.Validation(i))
				n := len(held)
				if samples > 0 {
					n = samples
				}
				loss, targets := 0.0, 0.0
				var losses, counts []float64
				for j := range n {
					tokens := make([]uint32, 25)
					sample := held[j*len(held)/n]
					if err := data.Tokens(tokens, sample); err != nil {
						t.Fatal(err)
					}
					starts, filled, err := data.DocumentStarts(nil, sample)
					if err != nil {
						t.Fatal(err)
					}
					l, c := documentByDocument(t, trained, tokens, starts, filled)
					losses, counts = append(losses, l), append(counts, float64(c))
					loss += l
					targets += float64(c)
				}
				if got.SourceTargets[source.Name] != int64(targets) || !near(got.SourceLoss[source.Name], loss/targets,
					1e-5) {
					t.Errorf("%s: evaluated %s to %v of %d targets, want %v of %v", name, source.Name,
						got.SourceLoss[source.Name], got.SourceTargets[source.Name], loss/targets, targets)
				}
				margin := 0.0
				if n < len(held) { // t(0.975; 3) times the standard error of a ratio
					for j, l := range losses {
						margin += math.Pow(l-loss/targets*counts[j], 2)
					}
					mean := targets / float64(n)
					margin = 3.182 * math.Sqrt(margin/float64(n-1)/float64(n)*(1-float64(n)/float64(len(held)))) / mean
				}
				if !near(got.SourceMargin[source.Name], margin, 5e-3) {
					t.Errorf("%s: margin of %s is %v, want %v", name, source.Name, got.SourceMargin[source.Name],
						margin)
				}
			}
		}
	}
}

func near(got, want, tolerance float64) bool { return math.Abs(got-want) <= tolerance*math.Abs(want) }

// packedSkips leave steps in which the rows of data ranks differ, one with a single row, and one
// with none.
const packedSkips = "skips:\n- {from: 17, to: 23}\n- {from: 24, to: 32}\n- {from: 40, to: 47}\n"

// Of packed plans, and of windows within documents, the stages of a pipeline and the schemes of the
// optimizer change no bit; more ranks only the last ones, as the loss is the mean over the targets
// of all.
func TestDocumentsLayouts(t *testing.T) {
	longtest.SkipIfShort(t)
	dir := t.TempDir()
	plan := packedPlan(t, dir, "plan.json", packedSkips)
	for name, more := range map[string]string{"packed": "", "packed, across documents": "attention: window\n",
		"windows": "attention: documents\n"} {
		path := plan
		if name == "windows" {
			path = windowsPlan(t, dir, "windows.json", packedSkips)
		}
		run := func(l LayoutConfig) runOutcome {
			return mustRunRanks(t, ranksConfig(t, path, l, more+pipelineModel+"steps: 8\nmicro_batch_size: "+
				"1\nevaluate: {every: 4, samples: 5}\n"), Options{})
		}
		one := run(LayoutConfig{})
		for _, test := range []struct {
			layout  LayoutConfig
			schemes []estimate.Scheme
		}{
			{LayoutConfig{DP: 1, PP: 3, EP: 1}, schemes[:1]},
			{LayoutConfig{DP: 2, PP: 1, EP: 2}, schemes},
			{LayoutConfig{DP: 2, PP: 2, EP: 1}, schemes[2:]},
			{LayoutConfig{DP: 1, PP: 2, EP: 2}, schemes[:1]},
		} {
			l := test.layout
			what := fmt.Sprintf("%s, dp %d, pp %d, ep %d", name, l.DP, l.PP, l.EP)
			want := one
			if l.DP*l.EP > 1 {
				want = run(LayoutConfig{DP: l.DP, PP: 1, EP: l.EP})
				for number, most := range map[string]float64{"loss": 1e-5, "grad_norm": 1e-4, "z_loss": 1e-4,
					"targets": 0, "tokens": 0, "eval.loss": 1e-5, "eval.margin": 1e-3} {
					if d := apart(t, one.lines, want.lines, number); d > most {
						t.Errorf("%s: %s differs from the %[2]s of one rank by %v", what, number, d)
					}
				}
			}
			for _, scheme := range test.schemes {
				l.Optimizer = scheme
				sameBits(t, what+", "+string(scheme), want, run(l))
			}
			if name != "packed" {
				break
			}
		}
	}
}

// A run on packed samples that is stopped and goes on leaves what one does that was not, byte for
// byte; what a token attends to stays as it was.
func TestDocumentsResume(t *testing.T) {
	longtest.SkipIfShort(t)
	dir := t.TempDir()
	plan := packedPlan(t, dir, "plan.json", "")
	for name, test := range map[string]struct{ plan, more string }{
		"packed":        {plan, ""},
		"packed, ranks": {plan, "layout: {expert_dp: 2, pp: 2}\n"},
		"windows":       {windowsPlan(t, dir, "windows.json", ""), "attention: documents\n"},
	} {
		c := testConfig(t, test.plan, test.more+"evaluate: {every: 3, samples: 3}\nmicro_batch_size: 2\n")
		mustRun(t, c, Options{})
		other := c
		other.Output = filepath.Join(t.TempDir(), "run")
		mustRun(t, other, stopAfter(2))
		mustRun(t, other, onDiscrete(stopAfter(4), nil))
		mustRun(t, other, Options{Warn: func(text string) { t.Errorf("%s: warning %q", name, text) }})
		sameRun(t, name, c.Output, other.Output)

		other.Attention = samples.WindowAttention
		if _, err := Run(t.Context(), other, Options{}); err == nil ||
			!strings.Contains(err.Error(), `attention was "documents" and is now "window"`) {
			t.Errorf("%s: with another attention: %v", name, err)
		}
	}

	// Windows are the same as before the setting existed.
	c := testConfig(t, windowsPlan(t, dir, "plain.json", ""), "")
	mustRun(t, c, stopAfter(2))
	saved, _, err := checkpoint.Find(t.Context(), c.Output)
	if err != nil || saved.State.Config["attention"] != `"window"` {
		t.Fatal(saved.State.Config, err)
	}
	delete(saved.State.Config, "attention")
	now := c
	now.Attention = samples.WindowAttention
	if now, err = now.resolve(mustPlan(t, c.Plan)); err != nil {
		t.Fatal(err)
	}
	if err := saved.State.CheckConfig(now.identity(), nil); err != nil {
		t.Errorf("a checkpoint that does not name its attention: %v", err)
	}
	now.Attention = samples.DocumentAttention
	if err := saved.State.CheckConfig(now.identity(), nil); err == nil {
		t.Error("it goes on with another attention")
	}
}

// The data of a spike is also skipped in packed samples: the run equals the run of a plan without
// it.
func TestDocumentsSpikes(t *testing.T) {
	longtest.SkipIfShort(t)
	dir := t.TempDir()
	spikyPlan(t, dir, "windows.json", nil, 20) // for its shards
	const config = "sequence_length: 16\nseed: 5\npacking: best_fit\nsources:\n- {name: text, shards: " +
		"[text.idx]}\n- {name: garbage, shards: [garbage.idx]}\nsamples: 336\nstages:\n" +
		"- {samples: 160, weights: {text: 1}}\n- {samples: 8, weights: {garbage: 1}}\n- {samples: rest, weights: " +
		"{text: 1}}\n"
	plan := plantest.Seal(t, dir, "plan.json", config)
	for action, left := range map[string]blend.Range{"skip": {From: 160, To: 168}, "rollback": {From: 136, To: 168}} {
		c := testConfig(t, plan, spikyConfig+spikesYAML(action))
		mustRun(t, c, Options{})
		if diff := cmp.Diff([]blend.Range{left}, skipsOf(t, c.Output)); diff != "" {
			t.Errorf("%s: left out (-want +got):\n%s", action, diff)
		}
		without := plantest.Seal(t, dir, action+".json", config+fmt.Sprintf("skips:\n- {from: %d, to: %d}\n", left.From,
			left.To))
		planned := testConfig(t, without, spikyConfig)
		mustRun(t, planned, Options{})
		sameTraining(t, action, c.Output, planned.Output)
	}
}

// Documents of one token have no targets. A step of nothing else, and micro-batches and ranks with
// nothing else, divide nothing by zero: such a step leaves the weights alone. What is held out of
// such documents has no loss.
func TestNothingCounts(t *testing.T) {
	dir := t.TempDir()
	writeDocuments(t, dir, "ones", 1, func(*rand.Rand) int { return 1 })
	writeDocuments(t, dir, "more", 2, func(rng *rand.Rand) int { return 1 + rng.IntN(9) })
	const sources = "sequence_length: 24\nseed: 5\npacking: best_fit\nvalidation: 0.2\nsources:\n- {name: ones, " +
		"shards: [ones.idx]}\n- {name: more, shards: [more.idx]}\n"
	plan := plantest.Seal(t, dir, "plan.json",
		sources+"samples: 24\nstages:\n- {samples: 8, weights: {ones: 1, more: 1}}\n- {samples: 8, weights: {ones: "+
			"1}}\n- {samples: 8, weights: {more: 1}}\n")
	for _, more := range []string{"", "layout: {expert_dp: 2}\n", "layout: {expert_dp: 2, ep: 2}\n",
		"layout: {expert_dp: 2, pp: 2}\n",
		"optimizer: {name: sophiag, hessian_every: 1}\n"} {
		c := testConfig(t, plan,
			more+"steps: 6\nbatch_size: 4\nmicro_batch_size: 1\ncheckpoint: {every: 1, keep: 9}\nevaluate: {every: "+
				"3, samples: 4}\nspikes: {action: skip}\n")
		var steps []record.StepMetrics
		var e *record.Evaluation
		mustRun(t, c, Options{Progress: func(p Progress) {
			steps = append(steps, p.StepMetrics)
			if p.Evaluation != nil {
				e = p.Evaluation
			}
		}})
		var weights []string
		names := checkpointsIn(t, c.Output)
		slices.Reverse(names)
		for _, name := range names {
			m, err := moe.Open(filepath.Join(c.Output, checkpoint.DirName, name), device(t, 1))
			if err != nil {
				t.Fatal(err)
			}
			weights = append(weights, checkpointtest.WeightsHash(m.Parameters()))
		}
		for i, m := range steps {
			none := i == 2 || i == 3
			if m.Samples != 4 || (*m.Targets == 0) != none || (m.Loss == 0) != none || !finite(m.GradNorm) ||
				m.Skipped != nil {
				t.Errorf("%sstep %d: %+v", more, i, m)
			}
			if _, ok := m.SourceLoss["ones"]; ok {
				t.Errorf("%sstep %d: what has no targets has loss %v", more, i, m.SourceLoss)
			}
			if i > 0 && (weights[i] == weights[i-1]) != none {
				t.Errorf("%sstep %d: the weights changed: %v", more, i, none)
			}
		}
		if _, ok := e.SourceLoss["ones"]; ok || !(e.Loss == e.SourceLoss["more"]) {
			t.Errorf("%sevaluation %+v", more, *e)
		}
	}
	only := plantest.Seal(t, dir, "only.json", strings.Replace(sources, "- {name: more, shards: [more.idx]}\n", "", 1))
	m, err := moe.New(testConfig(t, only, "").Model.Config, device(t, 1))
	if err != nil {
		t.Fatal(err)
	}
	m.Init(1)
	if _, err := evaluate.Model(t.Context(), m, openData(t, only), evaluate.Options{}); err == nil ||
		!strings.Contains(err.Error(), "all targets of the validation split are masked") {
		t.Errorf("evaluated what has no targets: %v", err)
	}
}

// On a device with memory of its own, packed samples are the same as on the processor.
func TestDocumentsApart(t *testing.T) {
	plan := packedPlan(t, t.TempDir(), "plan.json", packedSkips)
	for name, more := range map[string]string{"one rank": "recompute: layers\nmicro_batch_size: 3\n",
		"stages and experts": pipelineModel + "layout: {expert_dp: 1, pp: 2, ep: 2}\nmicro_batch_size: 2\n",
		"sophiag":            "optimizer: {name: sophiag, hessian_every: 2}\n"} {
		c := testConfig(t, plan, more+"steps: 6\nevaluate: {every: 3, samples: 3}\n")
		mustRun(t, c, Options{})
		other := c
		other.Output = filepath.Join(t.TempDir(), "run")
		mustRun(t, other, onDiscrete(Options{}, nil))
		sameRun(t, name, c.Output, other.Output)
	}
}
