package train

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/train/checkpoint"
	"mula/train/devices"
	"mula/train/optimizer"
	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/opencl"
)

// A run whose products are oneDNN's keeps the promises of one on the CPU device, and its losses
// stay within rounding of it.
func TestRunOneDNN(t *testing.T) {
	longtest.SkipIfShort(t)
	d, why, err := devices.New(t.Context(), devices.OneDNN, devices.Options{Threads: 1, Precision: "fp32"})
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
		c.Device = devices.CPU
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

// useOpenCL prepares OpenCL for a test, and returns its devices. The cache of [plantest.Main] has
// the compiled kernels of all tests.
func useOpenCL(t *testing.T) []*opencl.Device {
	t.Helper()
	found, err := opencl.Devices()
	if len(found) == 0 {
		t.Skip(err)
	}
	// optimized, PoCL takes twenty seconds more; TestDevice of xpu/gpu has optimized kernels
	t.Setenv("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")
	return found
}

// With bfloat16 weights, a run on an OpenCL device follows the losses of the CPU. It resumes bit
// for bit, and two ranks leave the same bits with all schemes. With bf16_compact, activations and
// moments are bfloat16, too.
func TestMixedOpenCL(t *testing.T) {
	longtest.SkipIfShort(t)
	useOpenCL(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, precision := range mixed {
		yaml := crashConfig + "steps: 6\ncheckpoint: {every: 3}\nevaluate: {every: 3, samples: 4}\nprecision: " +
			string(precision) + "\n"
		if precision == xpu.BF16Compact {
			yaml += "activations: bf16\noptimizer: {moments: bf16}\n"
		}
		const device = "device: opencl\n"
		cpu, single := testConfig(t, plan, yaml), testConfig(t, plan, yaml+device)
		mustRun(t, cpu, Options{})
		want := mustRun(t, single, Options{})
		for _, name := range []string{"loss", "eval.loss"} {
			d := apart(t, metricsOf(t, cpu.Output), metricsOf(t, single.Output), name)
			t.Logf("%s: %s differs from the CPU's by %.2g", precision, name, d)
			if !(d <= 1e-4) {
				t.Errorf("%s: %s differs from the CPU's by %.2g", precision, name, d)
			}
		}
		resumed := single
		resumed.Output = filepath.Join(t.TempDir(), "run")
		mustRun(t, resumed, stopAfter(4))
		if got := mustRun(t, resumed, Options{}); got.Weights != want.Weights || got.Resumed == "" {
			t.Errorf("%s: resumed: %+v, want %+v", precision, got, want)
		}
		sameRun(t, string(precision), single.Output, resumed.Output)
		var first Result
		for i, scheme := range schemes {
			c := testConfig(t, plan, yaml+device+fmt.Sprintf("layout: {expert_dp: 2, optimizer: %s}\n", scheme))
			got := mustRun(t, c, Options{})
			if i == 0 {
				first = got
			}
			if got.Weights != first.Weights || got.LastLoss != first.LastLoss || got.Weights == want.Weights {
				t.Errorf("%s, %s: %+v, want %+v", precision, scheme, got, first)
			}
		}
	}
}

// LAMB and Muon follow the losses of the CPU on an OpenCL device, with measured changes. Runs there
// have the same bits twice. Two ranks leave the same bits with all schemes.
func TestTensorOptimizersOpenCL(t *testing.T) {
	longtest.SkipIfShort(t)
	useOpenCL(t)
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, name := range []optimizer.Name{optimizer.Lamb, optimizer.Muon} {
		yaml := crashConfig + "steps: 4\nevaluate: {every: 0}\nlog: {update_ratio_every: 1}\n" + optimizerYAML(name)
		const device = "device: opencl\n"
		cpu, single, again := testConfig(t, plan, yaml), testConfig(t, plan, yaml+device),
			testConfig(t, plan, yaml+device)
		mustRun(t, cpu, Options{})
		want := mustRun(t, single, Options{})
		if got := mustRun(t, again, Options{}); got.Weights != want.Weights {
			t.Errorf("%s: other weights the second time", name)
		}
		for _, metric := range []string{"loss", "grad_norm"} {
			d := apart(t, metricsOf(t, cpu.Output), metricsOf(t, single.Output), metric)
			t.Logf("%s: %s differs from the CPU's by %.2g", name, metric, d)
			if !(d <= 1e-3) {
				t.Errorf("%s: %s differs from the CPU's by %.2g", name, metric, d)
			}
		}
		var first Result
		for i, scheme := range schemes {
			c := testConfig(t, plan, yaml+device+fmt.Sprintf("layout: {expert_dp: 2, optimizer: %s}\n", scheme))
			got := mustRun(t, c, Options{})
			if i == 0 {
				first = got
			}
			if got.Weights != first.Weights || got.LastLoss != first.LastLoss {
				t.Errorf("%s, %s: %+v, want %+v", name, scheme, got, first)
			}
		}
	}
}

// A run on an OpenCL device, which PoCL provides on any processor, follows the CPU's losses within
// rounding. From a checkpoint it resumes there bit for bit, and on the other device with a warning.
func TestRunOpenCL(t *testing.T) {
	longtest.SkipIfShort(t)
	useOpenCL(t)
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
			t.Logf("%s: %s differs from the CPU's by %.2g", what, name, d)
			if !(d <= most) {
				t.Errorf("%s: %s differs from the CPU's by %.2g, at most %g is allowed", what, name, d, most)
			}
		}
	}
	near("opencl", cpu.Output, unbroken.Output)
	for _, test := range []struct {
		from   Config
		device string
		warn   string
	}{{unbroken, devices.OpenCL, ""}, {unbroken, devices.CPU, "the arithmetic of opencl"},
		{cpu, devices.OpenCL, "the arithmetic of cpu"}} {
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

// A device whose library is missing ends the run before it makes a directory.
func TestMissingDevice(t *testing.T) {
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
		c.Device, c.Output = devices.OpenCL, filepath.Join(t.TempDir(), "run")
		if _, err := Run(context.Background(), c, Options{}); err == nil ||
			!strings.Contains(err.Error(), "no OpenCL loader") {
			t.Errorf("opencl: %v", err)
		}
	}
}

// rowsDevice is a device that needs more rows in a product, like a GPU.
type rowsDevice struct{ xpu.Device }

func (d rowsDevice) ProductRows() int { return 1 << 20 }

// A checkpoint records the blocks of logits of a GPU. A run that resumes from it with the blocks of
// a processor, or the other way round, is warned, and ranks must agree on the blocks.
func TestBlocksOfLogitsAreRecorded(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, crashConfig+"steps: 6\ncheckpoint: {every: 2}\n")
	const text = "logits in blocks of 1048576"
	var warnings []string
	options := func(stop int64, large func(rank int) bool) Options {
		o := Options{}
		if stop > 0 {
			o = stopAfter(stop)
		}
		o.Warn = func(text string) { warnings = append(warnings, text) }
		o.newDevice = func(rank, threads int, precision xpu.Precision) (xpu.Device, error) {
			d := cpu.New(threads, precision)
			if large(rank) {
				return rowsDevice{d}, nil
			}
			return d, nil
		}
		return o
	}
	always, never := func(int) bool { return true }, func(int) bool { return false }
	mustRun(t, c, options(2, always))
	if len(warnings) > 0 {
		t.Errorf("a new run warns: %q", warnings)
	}
	mustRun(t, c, options(4, never))
	if len(warnings) != 1 || strings.Count(warnings[0], text) != 1 {
		t.Errorf("with the blocks of a processor the warnings are %q", warnings)
	}
	warnings = nil
	mustRun(t, c, options(0, always))
	if len(warnings) != 1 || strings.Count(warnings[0], text) != 1 {
		t.Errorf("with the blocks of a GPU the warnings are %q", warnings)
	}
	ranks := testConfig(t, plan, crashConfig+"steps: 2\nlayout: {expert_dp: 2}\n")
	if _, err := Run(t.Context(), ranks, options(0, func(rank int) bool { return rank == 1 })); err == nil ||
		!strings.Contains(err.Error(), text) {
		t.Errorf("ranks with different blocks: error %v", err)
	}
}
