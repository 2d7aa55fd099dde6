package cli

import (
	"testing"
	"time"

	"mula/train"
	"mula/train/record"
)

// The line covers the last fifty steps and the work between them. After the run goes back, it
// restarts.
func TestPace(t *testing.T) {
	at := time.Unix(1000, 0)
	var p pace
	step := func(n int64, seconds, between float64) string {
		at = at.Add(time.Duration((seconds + between) * float64(time.Second)))
		p.add(at, record.StepMetrics{Step: n, Tokens: 1000, Seconds: seconds, MFU: 0.4})
		return p.text(100)
	}
	for _, test := range []struct {
		step             int64
		seconds, between float64
		want             string
	}{
		{7, 2, 0, "500 tokens/s  MFU 40.0 %  3 min 20 s left"},   // a run that was resumed at step 7
		{8, 1, 0, "667 tokens/s  MFU 40.0 %  2 min 30 s left"},   // 2000 tokens in 3 s
		{9, 1, 6, "300 tokens/s  MFU 16.0 %  5 min 33 s left"},   // an evaluation: 3000 in 10 s, 4 s of them in steps
		{8, 1, 5, "1,000 tokens/s  MFU 40.0 %  1 min 40 s left"}, // gone back
	} {
		if got := step(test.step, test.seconds, test.between); got != test.want {
			t.Errorf("step %d: %q, want %q", test.step, got, test.want)
		}
	}
	p.add(at, record.StepMetrics{Step: 9}) // without samples
	if got, want := p.text(100), "1,000 tokens/s  MFU 40.0 %  1 min 40 s left"; got != want {
		t.Errorf("after a step without samples: %q, want %q", got, want)
	}
	for n := range int64(3 * paceSteps) {
		step(10+n, 0.5, 0)
	}
	if got, want := p.text(2), "2,000 tokens/s  MFU 40.0 %  1 s left"; got != want || len(p.steps) != paceSteps {
		t.Errorf("after many steps: %q of %d steps, want %q", got, len(p.steps), want)
	}
}

// The run can follow the advice for a pipeline with too few micro-batches, and it helps.
func TestFewMicroBatches(t *testing.T) {
	for _, test := range []struct {
		dp, ep, pp, batch, micro int
		want                     string
	}{
		{1, 1, 4, 16, 8, ": fewer micro-batches than pipeline stages; lower micro_batch_size to 4 (new runs only)"},
		{2, 1, 4, 14, 3, ": fewer micro-batches than pipeline stages; lower micro_batch_size to 1 (new runs only)"},
		{16, 1, 4, 16, 1,
			": fewer micro-batches than pipeline stages; raise batch_size to 64 or more (new runs only), or lower " +
				"layout.pp"},
		{2, 2, 3, 8, 8,
			": fewer micro-batches than pipeline stages; raise batch_size to 12 or more with micro_batch_size 1 " +
				"(new runs only), or lower layout.pp"},
		{1, 1, 4, 16, 4, ""},
		{1, 1, 1, 1, 1, ""},
	} {
		var s train.Summary
		s.Config.Layout = train.LayoutConfig{DP: test.dp, EP: test.ep, PP: test.pp}
		rows := test.batch / (test.dp * test.ep)
		s.Config.BatchSize, s.Config.MicroBatchSize = test.batch, test.micro
		s.MicroBatches = (rows + test.micro - 1) / test.micro
		if got := fewMicroBatches(s); got != test.want {
			t.Errorf("dp %d, ep %d, pp %d, batch_size %d, micro_batch_size %d: %q, want %q", test.dp, test.ep, test.pp,
				test.batch, test.micro, got, test.want)
		}
	}
}
