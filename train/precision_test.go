package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/xpu"
)

// A run in bf16 keeps the promises of one in fp32, and its losses stay within 1 % of it.
func TestRunBF16(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = "evaluate: {every: 0}\nsteps: 40\ncheckpoint: {every: 40}\n"
	single, unbroken := testConfig(t, plan, more), testConfig(t, plan, more+"precision: bf16\n")
	mustRun(t, single, Options{})
	var summary Summary
	want := mustRun(t, unbroken, Options{Report: func(s Summary) { summary = s }})
	if !strings.Contains(summary.Device, "bf16") {
		t.Errorf("the device is %q", summary.Device)
	}
	a, b := metricsOf(t, single.Output)[1:], metricsOf(t, unbroken.Output)[1:]
	same := true
	for step := range a {
		x, err := a[step]["loss"].(json.Number).Float64()
		if err != nil {
			t.Fatal(err)
		}
		y, err := b[step]["loss"].(json.Number).Float64()
		if err != nil {
			t.Fatal(err)
		}
		if same = same && x == y; !(math.Abs(x-y) <= 0.01*x) {
			t.Errorf("step %d: loss %v in fp32, %v in bf16", step, x, y)
		}
	}
	if same {
		t.Error("the losses of both precisions are equal to the bit")
	}
	// Killed and resumed, on another number of threads.
	c := unbroken
	c.Output, c.Threads = filepath.Join(t.TempDir(), "run"), 3
	mustRun(t, c, stopAfter(17))
	for _, other := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		c.Precision = other
		got, err := Run(context.Background(), c, Options{Warn: func(text string) { t.Errorf("warning %q", text) }})
		if other == xpu.FP32 {
			if err == nil || !strings.Contains(err.Error(), `precision was "bf16" and is now "fp32"`) {
				t.Errorf("resumed in fp32: %v", err)
			}
		} else if err != nil || got.Weights != want.Weights || got.LastLoss != want.LastLoss {
			t.Errorf("resumed: %s, want %s", fmt.Sprint(got, err), fmt.Sprint(want))
		}
	}
}
