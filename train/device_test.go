package train

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/internal/longtest"
	"mula/train/checkpoint"
	"mula/xpu/opencl"
)

// A run whose products are oneDNN's keeps the promises of one on the CPU device, and its losses
// stay within rounding of it.
func TestRunOneDNN(t *testing.T) {
	d, why, err := NewDevice(t.Context(), DeviceOneDNN, DeviceOptions{Threads: 1, Precision: "fp32"})
	if err != nil && strings.Contains(err.Error(), "no oneDNN library was found") {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if d.Close(); why != "" {
		t.Errorf("a reason %q, without a choice", why)
	}
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
		if summary.Scratch < 32<<20 || summary.Scratch > 64<<20 {
			t.Errorf("its scratch is %d bytes", summary.Scratch)
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
		// The run resumes on the other device, with a warning.
		c.Output = filepath.Join(t.TempDir(), "run")
		mustRun(t, c, stopAfter(7))
		c.Device = DeviceCPU
		warned := false
		if _, err := Run(context.Background(), c, Options{Warn: func(text string) {
			warned = warned ||
				strings.Contains(text, "onednn")
		}}); err != nil || !warned {
			t.Errorf("%s: resumed with the device cpu: error %v, a warning that names onednn: %v", precision, err,
				warned)
		}
	}
}

// A run on an OpenCL device, which PoCL provides on any processor, follows the CPU's losses within
// rounding. From a checkpoint it resumes there bit for bit, and on the other device with a warning.
func TestRunOpenCL(t *testing.T) {
	longtest.SkipIfShort(t)
	if devices, err := opencl.Devices(); len(devices) == 0 {
		t.Skip(err)
	}
	folder := t.TempDir() // what is compiled is the test's own, and compiled once
	t.Setenv("XDG_CACHE_HOME", folder)
	t.Setenv("POCL_CACHE_DIR", folder)
	// optimized, PoCL takes twenty seconds more; TestDevice of xpu/gpu has optimized kernels
	t.Setenv("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")
	before := opencl.Live()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = "steps: 50\ncheckpoint: {every: 40}\nevaluate: {every: 25, samples: 4}\n"
	cpu, unbroken := testConfig(t, plan, more), testConfig(t, plan, more+"device: opencl\n")
	mustRun(t, cpu, Options{})
	var summary Summary
	want := mustRun(t, unbroken, Options{Report: func(s Summary) { summary = s }})
	if !strings.HasPrefix(summary.Device, "opencl ") {
		t.Errorf("the device is %q", summary.Device)
	}
	near := func(what, processor, output string) {
		t.Helper()
		for name, most := range map[string]float64{"loss": 1e-4, "eval.loss": 1e-4, "aux_loss": 1e-3,
			"grad_norm": 1e-2} {
			d := apart(t, metricsOf(t, processor), metricsOf(t, output), name)
			t.Logf("%s: %s is apart from the CPU's by %.2g", what, name, d)
			if !(d <= most) {
				t.Errorf("%s: %s is apart from the CPU's by %.2g, at most %g is allowed", what, name, d, most)
			}
		}
	}
	near("opencl", cpu.Output, unbroken.Output)
	for _, test := range []struct {
		from   Config
		device string
		warn   string
	}{{unbroken, DeviceOpenCL, ""}, {unbroken, DeviceCPU, "the arithmetic of opencl"},
		{cpu, DeviceOpenCL, "the arithmetic of cpu"}} {
		c := test.from
		c.Device, c.Threads, c.Output = test.device, 2, filepath.Join(t.TempDir(), "run")
		if err := os.CopyFS(c.Output, os.DirFS(test.from.Output)); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(c.Output, checkpoint.DirName, checkpoint.Name(50))); err != nil {
			t.Fatal(err)
		}
		var warnings []string
		got := mustRun(t, c, Options{Warn: func(text string) { warnings = append(warnings, text) }})
		what := fmt.Sprintf("from %s to %s", test.from.Device, test.device)
		if got.Resumed != checkpoint.Name(40) || (len(warnings) > 0) != (test.warn != "") ||
			!strings.Contains(strings.Join(warnings, "\n"), test.warn) {
			t.Errorf("%s: went on from %q with warnings %q", what, got.Resumed, warnings)
		}
		if near(what, cpu.Output, c.Output); test.warn == "" {
			if got.Weights != want.Weights {
				t.Errorf("%s: %+v, want %+v", what, got, want)
			}
			sameRun(t, what, unbroken.Output, c.Output)
		}
	}
	packed := packedPlan(t, t.TempDir(), "plan.json", "samples: 400\n")
	onCPU, onOpenCL := testConfig(t, packed, more), testConfig(t, packed, more+"device: opencl\n")
	mustRun(t, onCPU, Options{})
	mustRun(t, onOpenCL, Options{})
	near("packed samples", onCPU.Output, onOpenCL.Output)
	if after := opencl.Live(); after != before {
		t.Errorf("left behind: %+v, there was %+v", after, before)
	}
}

func TestUnknownDevice(t *testing.T) {
	if _, _, err := NewDevice(t.Context(), "gpu", DeviceOptions{}); err == nil ||
		!strings.Contains(err.Error(), `"gpu"`) {
		t.Errorf("the error is %v", err)
	}
	t.Setenv("MULA_ONEDNN_LIB", filepath.Join(t.TempDir(), "none.so"))
	c := testConfig(t, makePlan(t, t.TempDir(), "plan.json", ""), "device: onednn\n")
	if _, err := Run(context.Background(), c, Options{}); err == nil ||
		!strings.Contains(err.Error(), "no oneDNN library was found") {
		t.Errorf("the error is %v", err)
	}
	if names, _ := filepath.Glob(c.Output + "*"); len(names) > 0 {
		t.Errorf("a run directory was made: %v", names)
	}
}

// The names of devices, for the devices of a machine.
func TestChooseOpenCL(t *testing.T) {
	device := func(name string, kind opencl.Type) *opencl.Device {
		return &opencl.Device{Name: name, Type: kind, Platform: "the driver of " + strings.Fields(name)[0]}
	}
	large, small, processor := device("Large 100", opencl.GPU), device("Small 5", opencl.GPU), device("Some Processor",
		opencl.CPU)
	twin, plus := device("Large 100", opencl.GPU), device("Large 100 Plus", opencl.GPU)
	rates := map[string]float64{"Large 100": 2e13, "Small 5": 1e12, "Large 100 Plus": 3e13}
	measure := func(_ context.Context, d *opencl.Device) (float64, error) {
		if rate, ok := rates[d.Name]; ok {
			return rate, nil
		}
		return 0, fmt.Errorf("%s does not answer", d.Name)
	}
	mute, silent := device("Mute", opencl.GPU), device("Silent", opencl.GPU)
	none := errors.New("opencl: no OpenCL loader")
	for _, test := range []struct {
		name    string
		devices []*opencl.Device
		missing error
		chosen  string
		why     string // a part of it; "" for none
		err     string // a part of it; "" for none
	}{
		{"auto", nil, none, "cpu", "auto: no GPU: opencl: no OpenCL loader", ""},
		{"auto", []*opencl.Device{processor}, nil, "cpu", "auto: no OpenCL device is a GPU", ""},
		{"auto", []*opencl.Device{processor, small}, nil, "opencl:Small 5", "auto: the only kind of GPU", ""},
		{"auto", []*opencl.Device{processor, small, large, twin}, nil, "opencl:Large 100",
			"auto: the fastest of 2 kinds, 2e+04 GFLOP/s", ""},
		{"auto", []*opencl.Device{mute, small}, nil, "opencl:Small 5", "not measured: Mute does not answer", ""},
		{"auto", []*opencl.Device{mute, silent}, nil, "", "",
			"none of 2 kinds of devices works: Mute does not answer"},
		{"auto", []*opencl.Device{mute}, nil, "opencl:Mute", "the only kind", ""},
		{"opencl", nil, none, "", "", "no OpenCL loader"},
		{"opencl", []*opencl.Device{processor}, nil, "opencl:Some Processor", "", ""},
		{"opencl", []*opencl.Device{processor, large, twin}, nil, "opencl:Large 100", "", ""},
		{"opencl", []*opencl.Device{small, large}, nil, "opencl:Large 100", "opencl: the fastest of 2 kinds", ""},
		{"opencl:some", []*opencl.Device{small, processor}, nil, "opencl:Some Processor", "", ""},
		{"opencl:DRIVER OF SMALL", []*opencl.Device{large, small}, nil, "opencl:Small 5", "", ""},
		{"opencl:large", []*opencl.Device{large, plus}, nil, "opencl:Large 100 Plus",
			"opencl:large: the fastest of 2 kinds", ""},
		{"opencl:large 100", []*opencl.Device{plus, large}, nil, "opencl:Large 100", "", ""},
		{"opencl:large#2", []*opencl.Device{small, large, twin}, nil, "opencl:Large 100#2", "", ""},
		{"opencl:medium", []*opencl.Device{small}, nil, "", "",
			`no device has "medium" in its name; available: Small 5`},
	} {
		chosen, why, err := chooseOpenCL(t.Context(), test.name, test.devices, test.missing, measure)
		if chosen != test.chosen || !strings.Contains(why, test.why) || (why == "") != (test.why == "") ||
			(err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s of %v: %q, because %q, %v", test.name, test.devices, chosen, why, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := chooseOpenCL(ctx, "auto", []*opencl.Device{mute, silent}, nil, measure); !errors.Is(err,
		context.Canceled) {
		t.Errorf("a done context: %v", err)
	}
	for name, want := range map[string]bool{
		"cpu": true, "onednn": true, "auto": true, "opencl": true, "opencl:a": true, "opencl:a b#12": true,
		"opencl:a#b": true, "opencl:": false, "opencl: ": false, "opencl:#1": false,
		"opencl:a#0": false, "opencl:a#-1": false, "gpu": false, "": false, "opencl#2": false, "openCL": false,
	} {
		if err := CheckDevice(name); (err == nil) != want {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// The ranks of a host use equal devices alternately, unless the environment selects a device.
func TestTakeOpenCL(t *testing.T) {
	var devices []*opencl.Device
	for range 3 {
		devices = append(devices, &opencl.Device{Name: "Twin", Type: opencl.GPU})
	}
	all := append([]*opencl.Device{{Name: "Other", Type: opencl.CPU}}, devices...)
	for ranks := 1; ranks < 8; ranks++ {
		taken := map[*opencl.Device]int{}
		said := map[*opencl.Device]int{}
		for number := range ranks {
			d, sharing, err := DeviceOptions{number: number, ranks: ranks}.takeOpenCL("opencl:Twin", all)
			if err != nil {
				t.Fatal(err)
			}
			taken[d]++
			said[d] = sharing
			if d != devices[number%3] {
				t.Errorf("rank %d of %d has another device", number, ranks)
			}
			if d, sharing, err := (DeviceOptions{number: number, ranks: ranks}).takeOpenCL("opencl:Twin#2",
				all); err != nil || d != devices[1] || sharing != ranks {
				t.Errorf("the second: %v, shared by %d, %v", d, sharing, err)
			}
		}
		if diff := cmp.Diff(slices.Sorted(maps.Values(taken)), slices.Sorted(maps.Values(said))); diff != "" {
			t.Errorf("%d ranks (-taken +said):\n%s", ranks, diff)
		}
	}
	for name, want := range map[string]string{"opencl:Twin#4": "no device number 4; the last is 3",
		"opencl:Triplet": `no device has "Triplet" in its name`} {
		if _, _, err := (DeviceOptions{ranks: 1}).takeOpenCL(name, all); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Without OpenCL there is the processor, and the summary says why; a device that is asked for by
// name is an error.
func TestRunAuto(t *testing.T) {
	t.Setenv(opencl.LibraryVariable, filepath.Join(t.TempDir(), "none.so"))
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, layout := range []string{"", "layout: {expert_dp: 2}\n"} {
		c := testConfig(t, plan, crashConfig+"steps: 2\ndevice: auto\n"+layout)
		var summary Summary
		mustRun(t, c, Options{Report: func(s Summary) { summary = s }})
		if !strings.HasPrefix(summary.Device, "cpu ") ||
			!strings.HasPrefix(summary.DeviceWhy, "auto: no GPU: opencl: no OpenCL loader") {
			t.Errorf("device %q, because %q", summary.Device, summary.DeviceWhy)
		}
		c.Device, c.Output = DeviceOpenCL, filepath.Join(t.TempDir(), "run")
		if _, err := Run(context.Background(), c, Options{}); err == nil ||
			!strings.Contains(err.Error(), "no OpenCL loader") {
			t.Errorf("opencl: %v", err)
		}
	}
}
