package train

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"
)

// A run whose products are oneDNN's keeps the promises of one on the CPU device, and its losses stay within rounding of it.
func TestRunOneDNN(t *testing.T) {
	d, err := NewDevice(DeviceOneDNN, 1, "fp32")
	if err != nil && strings.Contains(err.Error(), "no oneDNN library was found") {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, precision := range []string{"fp32", "bf16"} {
		more := "evaluate: {every: 0}\nsteps: 12\ncheckpoint: {every: 12}\nprecision: " + precision + "\n"
		single, unbroken := testConfig(t, plan, more), testConfig(t, plan, more+"device: onednn\n")
		near := mustRun(t, single, Options{})
		var summary Summary
		want := mustRun(t, unbroken, Options{Report: func(s Summary) { summary = s }})
		if !strings.HasPrefix(summary.Device, "onednn ") {
			t.Errorf("the device is %q", summary.Device)
		}
		if !(math.Abs(want.LastLoss-near.LastLoss) < 1e-4*near.LastLoss) {
			t.Errorf("%s: the last loss is %v, with the device cpu %v", precision, want.LastLoss, near.LastLoss)
		}
		c := unbroken
		c.Output, c.Threads = filepath.Join(t.TempDir(), "run"), 3
		mustRun(t, c, stopAfter(7))
		got, err := Run(context.Background(), c, Options{Warn: func(text string) { t.Errorf("warning %q", text) }})
		if err != nil || got.Weights != want.Weights || got.LastLoss != want.LastLoss {
			t.Errorf("%s: resumed: %s, want %s", precision, fmt.Sprint(got, err), fmt.Sprint(want))
		}
		// Resumed on the other device it goes on, and says so.
		c.Output = filepath.Join(t.TempDir(), "run")
		mustRun(t, c, stopAfter(7))
		c.Device = DeviceCPU
		warned := false
		if _, err := Run(context.Background(), c, Options{Warn: func(text string) { warned = warned || strings.Contains(text, "onednn") }}); err != nil || !warned {
			t.Errorf("%s: resumed with the device cpu: error %v, a warning that names onednn: %v", precision, err, warned)
		}
	}
}

func TestUnknownDevice(t *testing.T) {
	if _, err := NewDevice("gpu", 1, "fp32"); err == nil || !strings.Contains(err.Error(), `"gpu"`) {
		t.Errorf("the error is %v", err)
	}
	t.Setenv("MULA_ONEDNN_LIB", filepath.Join(t.TempDir(), "none.so"))
	c := testConfig(t, makePlan(t, t.TempDir(), "plan.json", ""), "device: onednn\n")
	if _, err := Run(context.Background(), c, Options{}); err == nil || !strings.Contains(err.Error(), "no oneDNN library was found") {
		t.Errorf("the error is %v", err)
	}
	if names, _ := filepath.Glob(c.Output + "*"); len(names) > 0 {
		t.Errorf("a run directory was made: %v", names)
	}
}
