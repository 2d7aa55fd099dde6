package train

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/blend"
	"mula/moe"
	"mula/train/checkpoint"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/evaluate"
	"mula/train/record"
	"mula/train/rundir"
)

// The evaluation of a checkpoint equals the evaluation in the run, and the mean over the windows,
// each computed alone.
func TestEvaluate(t *testing.T) {
	plan := mustPlan(t, makePlan(t, t.TempDir(), "plan.json", ""))
	c := testConfig(t, filepath.Join(filepath.Dir(plan.ShardPath(0, 0)), "plan.json"),
		"evaluate: {every: 8, samples: 7}\nmicro_batch_size: 3\n")
	var during *record.Evaluation
	result := mustRun(t, c, Options{Progress: func(p Progress) { during = p.Evaluation }})
	data, err := blend.Open(context.Background(), plan, blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	model, err := moe.Open(result.Checkpoint, device(t, 2))
	if err != nil {
		t.Fatal(err)
	}
	if hash := checkpointtest.WeightsHash(model.Parameters()); hash != result.Weights {
		t.Errorf("the checkpoint has weights %s, the run had %s", hash, result.Weights)
	}
	for _, samples := range []int{7, 1, 0, 10000} {
		var calls []int64
		got, err := evaluate.Model(context.Background(), model, data, evaluate.Options{Samples: samples, BatchSize: 4,
			Progress: func(done, total int64) { calls = append(calls, done, total) }})
		if err != nil {
			t.Fatal(err)
		}
		if samples == 7 && (got.Loss != during.Loss || got.SourceLoss["go"] != during.SourceLoss["go"]) {
			t.Errorf("evaluated after the run: %+v, during it: %+v", got, *during)
		}
		var all, n, done int64
		var loss float64
		for i, s := range plan.Sources {
			windows := slices.Collect(plan.Validation(i))
			count := len(windows)
			if samples > 0 {
				count = min(count, samples)
			}
			var sum float64
			var means []float64
			for j := range count {
				tokens := make([]uint32, 17)
				if err := data.Tokens(tokens, windows[j*len(windows)/count]); err != nil {
					t.Fatal(err)
				}
				stats, err := model.Forward(t.Context(), moe.Batch{Tokens: tokens, Rows: 1, SequenceLength: 16})
				if err != nil {
					t.Fatal(err)
				}
				sum += stats.Loss
				means = append(means, stats.Loss/16)
			}
			want, known := marginOf(means, len(windows))
			if got, ok := got.SourceMargin[s.Name]; ok != known || !near(got, want, 2e-3) {
				t.Errorf("%d samples of %s: margin %v, %v, want %v, %v", samples, s.Name, got, ok, want, known)
			}
			n = int64(count) * 16
			all += n
			done += int64(count)
			loss += sum
			if got.SourceTargets[s.Name] != n || math.Abs(got.SourceLoss[s.Name]-sum/float64(n)) > 1e-12 {
				t.Errorf("%d samples of %s: loss %v of %d targets, want %v of %d", samples, s.Name,
					got.SourceLoss[s.Name], got.SourceTargets[s.Name], sum/float64(n), n)
			}
		}
		if math.Abs(got.Loss-loss/float64(all)) > 1e-12 {
			t.Errorf("%d samples: loss %v, want %v", samples, got.Loss, loss/float64(all))
		}
		// The sources of this plan hold equally many windows out and have 0.7 and 0.3 of the
		// samples.
		if mix := 0.7*got.SourceLoss["go"] + 0.3*got.SourceLoss["tests"]; math.Abs(got.MixLoss-mix) > 1e-3 ||
			got.MixLoss == got.Loss {
			t.Errorf("%d samples: loss of the mix %v, want %v", samples, got.MixLoss, mix)
		}
		if (got.Margin == nil) != (samples == 1) || (got.MixMargin == nil) != (samples == 1) {
			t.Errorf("%d samples: margins %v, %v", samples, got.Margin, got.MixMargin)
		} else if samples != 1 {
			if want := math.Hypot(got.SourceMargin["go"],
				got.SourceMargin["tests"]) / 2; math.Abs(*got.Margin-want) > 1e-12 {
				t.Errorf("%d samples: margin %v, want %v", samples, *got.Margin, want)
			}
			if want := math.Hypot(0.7*got.SourceMargin["go"],
				0.3*got.SourceMargin["tests"]); math.Abs(*got.MixMargin-want) > 1e-2*want {
				t.Errorf("%d samples: margin of the mix %v, want %v", samples, *got.MixMargin, want)
			}
		}
		if calls[len(calls)-1] != done || calls[len(calls)-2] != done {
			t.Errorf("%d samples: progress %v", samples, calls)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := evaluate.Model(ctx, model, data, evaluate.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("done context: %v", err)
	}
	if _, err := evaluate.Model(context.Background(), model, data, evaluate.Options{Samples: -1}); err == nil {
		t.Error("a negative number of samples is accepted")
	}
	small := model.Config()
	small.VocabSize = 128
	other, err := moe.New(small, device(t, 1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := evaluate.Model(context.Background(), other, data, evaluate.Options{}); err == nil ||
		!strings.Contains(err.Error(), "128") {
		t.Errorf("a model for another tokenizer: %v", err)
	}
}

// marginOf is the estimator as the documentation of package evaluate has it, for seven windows or
// for all. The quantile of the package is correct to 0.2 %.
func marginOf(x []float64, windows int) (margin float64, known bool) {
	n := float64(len(x))
	if len(x) == windows {
		return 0, true
	}
	if len(x) == 1 {
		return 0, false
	}
	var mean, squares float64
	for _, v := range x {
		mean += v / n
	}
	for _, v := range x {
		squares += (v - mean) * (v - mean)
	}
	const quantile = 2.446911851 // of Student's t distribution with 6 degrees of freedom
	return quantile * math.Sqrt(squares/(n-1)) / math.Sqrt(n) * math.Sqrt(1-n/float64(windows)), true
}

// A loss or a gradient that is not finite ends the run before it touches the weights.
func TestNotFinite(t *testing.T) {
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	for _, test := range []struct {
		more string
		step int64
		want []string
	}{
		// One update of this size makes all weights too large for the next forward pass.
		{"schedule: {learning_rate: 1e30, warmup_steps: 0}\n", 1,
			[]string{"step 1: the loss is NaN or Inf, at positions ", "the newest checkpoint is step-00000001"}},
		{"z_loss: {coefficient: 1e300}\n", 0, []string{"step 0: the gradient is NaN or Inf in model.",
			"at positions 0 to 7, of tests, go; ", "there is no checkpoint yet", "--skip 0:8 "}},
	} {
		c := testConfig(t, plan, test.more+"checkpoint: {every: 1}\nevaluate: {every: 0}\n")
		_, err := Run(context.Background(), c, Options{})
		if !errors.Is(err, moe.ErrNotFinite) {
			t.Fatalf("%q: error %v", test.more, err)
		}
		for _, want := range append(test.want, "mula blend --amend "+plan, "mula peek") {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: error %q does not say %q", test.more, err, want)
			}
		}
		if lines := readLines(t, filepath.Join(c.Output, rundir.MetricsFile)); int64(len(lines)) != 1+test.step {
			t.Errorf("%q: metrics %v", test.more, lines)
		}
		names := checkpointsIn(t, c.Output)
		if test.step == 0 && len(names) != 0 || test.step == 1 && !slices.Equal(names, []string{checkpoint.Name(1)}) {
			t.Errorf("%q: checkpoints %v", test.more, names)
		}
	}
}

// The tokenizer goes into every checkpoint, so that one is enough to make text.
func TestCheckpointTokenizer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	c := testConfig(t, plan, crashConfig)
	r := mustRun(t, c, Options{})
	saved, _, err := checkpoint.Find(context.Background(), r.Checkpoint)
	if err != nil || saved.Name() != checkpoint.Name(8) {
		t.Fatalf("without a tokenizer: %+v, %v", saved, err)
	}
	if _, err := os.Stat(filepath.Join(saved.Dir, tokenizerFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a tokenizer of a run without one: %v", err)
	}
	c = testConfig(t, plan, crashConfig)
	c.Tokenizer = filepath.Join(dir, "tokenizer.json")
	if err := os.WriteFile(c.Tokenizer, []byte(tokenizerJSON), 0o644); err != nil {
		t.Fatal(err)
	}
	r = mustRun(t, c, Options{})
	if saved, _, err = checkpoint.Find(context.Background(), c.Output); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(saved.Dir, tokenizerFile)); err != nil ||
		string(got) != tokenizerJSON || saved.Dir != r.Checkpoint {
		t.Errorf("checkpoint %s has tokenizer %q, %v", saved.Dir, got, err)
	}
	if err := os.WriteFile(filepath.Join(saved.Dir, tokenizerFile), []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := checkpoint.Find(context.Background(), r.Checkpoint); err == nil ||
		!strings.Contains(err.Error(), tokenizerFile) {
		t.Errorf("another tokenizer in the checkpoint: %v", err)
	}
}
