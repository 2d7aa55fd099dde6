package report

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/train/record"
)

// However long a run is, its spans are few, and they keep every spike, sum and mean.
func TestSpans(t *testing.T) {
	const steps, spike, low, skippedAt = 3*mostSpans + 77, 12_345, 20_000, 777
	run := &Run{perSpan: 1}
	var sum, logs, weighted, samples float64
	for i := range int64(steps) {
		s := Step{Step: i, Samples: 4, Tokens: 32, Loss: 2 + math.Sin(float64(i)), GradNorm: 1, MFU: 0.5, Seconds: 1,
			SourceLoss: []float64{float64(i % 7), math.NaN()}, SourceSamples: []int64{i % 3, 0},
			Balance: []record.Balance{{MaxOverMean: 2, Entropy: 0.5}, {MaxOverMean: 4, Entropy: 0.25}}}
		switch i {
		case spike:
			s.Loss = 99
		case low:
			s.Loss = 0.25
		case skippedAt:
			s.Skipped = &Spike{What: "loss", Value: 50}
			s.Loss = 50
		}
		if s.Skipped == nil {
			sum += s.Loss
			logs += math.Log(s.Loss)
		}
		weighted += float64(i%7) * float64(i%3)
		samples += float64(i % 3)
		run.add(s)
	}
	if len(run.Spans) > mostSpans || run.perSpan != 4 || run.Done != steps || run.Next != steps ||
		len(run.Skips) != 1 ||
		run.tokens != 32*steps || run.seconds != steps || run.losses != steps || run.firstLoss != 2 {
		t.Errorf("%d spans of %d steps; %d steps up to %d, %d skipped, %g tokens, %g seconds, %d losses from %g",
			len(run.Spans), run.perSpan, run.Done, run.Next, len(run.Skips), run.tokens, run.seconds, run.losses,
			run.firstLoss)
	}
	var all Span
	at := int64(0)
	for i := range run.Spans {
		s := &run.Spans[i]
		if s.Step.Step != at {
			t.Fatalf("span %d starts with step %d, want %d", i, s.Step.Step, at)
		}
		at += int64(s.Count)
		all.merge(s)
	}
	near := func(name string, got, want float64) {
		if math.Abs(got-want) > 1e-9*math.Abs(want) {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	near("mean loss", all.curves[lossCurve].mean.get(), sum/(steps-1))
	near("mean logarithm", all.curves[lossCurve].logs.get(), logs/(steps-1))
	near("loss of the source", all.sourceLoss[0].get(), weighted/samples)
	near("worst entropy", all.balance[worstEntropy].get(), 0.25)
	near("mean load", all.balance[meanLoad].get(), 3)
	near("load of layer 1", all.maxOverMean[1].get(), 4)
	if !math.IsNaN(all.sourceLoss[1].get()) || all.samples[0] != int64(samples) || at != steps {
		t.Errorf("source 1: %v; %d samples, %d steps", all.sourceLoss[1], all.samples[0], at)
	}
	lo, hi := bounds(envelope(extremes(run, lossCurve), curvePoints))
	if lo != 0.25 || hi != 99 {
		t.Errorf("the curve is from %g to %g, want from 0.25 to 99", lo, hi)
	}
}

// The curve of a long run has about the values of the curve of all steps.
func TestSmoothedSpans(t *testing.T) {
	const steps = 40_000
	run, exact := &Run{perSpan: 1}, make([]point, steps)
	for i := range int64(steps) {
		loss := 2 + 7*math.Pow(1+float64(i)/500, -0.5) + 0.3*math.Sin(float64(i)*1.7)
		exact[i] = point{float64(i), loss}
		run.add(Step{Step: i, Samples: 1, Loss: loss})
	}
	want := means(smooth(exact, nil, smoothSpan(steps)), curvePoints)
	got := means(smoothed(run, func(s *Span) mean { return s.curves[lossCurve].mean }), curvePoints)
	if len(got) != len(want) {
		t.Fatalf("%d points, want %d", len(got), len(want))
	}
	for i := range want {
		if math.Abs(got[i].x-want[i].x) > steps/curvePoints/4 || math.Abs(got[i].y-want[i].y) > 0.005*want[i].y {
			t.Errorf("point %d is %v, want %v", i, got[i], want[i])
		}
	}
}

// A metricsReader reads the metrics of a run of many steps with the same values.
type metricsReader struct {
	text       strings.Reader
	step, end  int64
	before, of string // the step of a line is between them
}

func (r *metricsReader) Read(p []byte) (int, error) {
	if r.text.Len() == 0 {
		if r.step == r.end {
			return 0, io.EOF
		}
		r.text.Reset(fmt.Sprintf("%s%d%s", r.before, r.step, r.of))
		r.step++
	}
	return r.text.Read(p)
}

// The memory of a report does not grow with the run.
func TestReadMemory(t *testing.T) {
	if longtest.Rounds(0, 1) == 0 {
		t.Skip("only in make test-long: 57,344 lines")
	}
	_, line, _ := strings.Cut(step0, `{"step":0`)
	held := func(steps int64) uint64 {
		r := &metricsReader{end: steps, before: `{"step":`, of: line}
		r.text.Reset(headLine)
		run, err := parse(r, "m")
		if err != nil {
			t.Fatal(err)
		}
		if err := Write(io.Discard, Options{}, run); err != nil {
			t.Fatal(err)
		}
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		runtime.KeepAlive(run)
		return m.HeapAlloc
	}
	short, long := held(mostSpans), held(6*mostSpans)
	t.Logf("%d bytes for %d steps, %d for %d", short, mostSpans, long, 6*mostSpans)
	if long > short*5/4 {
		t.Errorf("a report of %d steps holds %d bytes, one of %d steps %d", 6*mostSpans, long, mostSpans, short)
	}
}
