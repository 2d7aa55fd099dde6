package train

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/devices"
	"mula/train/estimate"
	"mula/train/optimizer"
	"mula/xpu"
)

// mixed are the precisions with bfloat16 weights.
var mixed = []xpu.Precision{xpu.BF16Mixed, xpu.BF16Compact}

// A run with bfloat16 weights is near a run in fp32. Its checkpoints have bfloat16 weights that are
// rounded masters, and the masters move where weights cannot. A stopped run resumes without a
// difference. Gradients in bfloat16 change the result.
func TestRunMixed(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = "evaluate: {every: 0}\nsteps: 30\ncheckpoint: {every: 30}\n"
	single := testConfig(t, plan, more)
	mustRun(t, single, Options{})
	var weights []string
	for _, precision := range mixed {
		c := testConfig(t, plan, more)
		c.Precision = precision
		got := runMixed(t, c)
		a, b := losses(t, single.Output), losses(t, c.Output)
		for step := range a {
			if a[step] == b[step] || math.Abs(a[step]-b[step]) > 0.01*a[step] {
				t.Errorf("step %d: loss %v in fp32, %v in %s", step, a[step], b[step], precision)
			}
		}
		weights = append(weights, got.Weights)
	}
	if weights[0] == weights[1] {
		t.Errorf("%v leave the same weights", mixed)
	}
}

// runMixed checks a run with bfloat16 weights, and returns its result.
func runMixed(t *testing.T, c Config) Result {
	t.Helper()
	want := mustRun(t, c, Options{})
	state := gathered(t, want.Checkpoint)
	moved, norms := 0, 0
	for name, weights := range state {
		masters, ok := state[name+".master"]
		if !ok {
			continue
		}
		for i, w := range weights {
			bits := math.Float32bits(masters[i])
			if rounded := math.Float32frombits((bits + 0x7fff + bits>>16&1) & 0xffff0000); w != rounded && w != 0 {
				t.Fatalf("%s has weight %v of master %v", name, w, masters[i])
			}
			if strings.Contains(name, "norm") {
				norms++
				if masters[i] != 1 && w == 1 {
					moved++
				}
			}
		}
	}
	if moved == 0 || norms == 0 {
		t.Errorf("of %d weights of norms, no master is between two bfloat16", norms)
	}
	file, err := safetensors.Open(filepath.Join(want.Checkpoint, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if got := file.Tensors()[0].DType; got != safetensors.BF16 {
		t.Errorf("the model is saved as %s", got)
	}
	// on another number of threads, stopped and resumed
	c.Output, c.Threads = filepath.Join(t.TempDir(), "run"), 3
	mustRun(t, c, stopAfter(17))
	if got := mustRun(t, c, Options{}); got.Weights != want.Weights || got.LastLoss != want.LastLoss ||
		got.Resumed == "" {
		t.Errorf("%s, resumed: %+v, want %+v", c.Precision, got, want)
	}
	return want
}

// Activations in bfloat16 change the result a little. A run resumes without a difference, with any
// recomputation and pipeline, but not with activations of another type.
func TestRunActivations(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = "evaluate: {every: 5, samples: 5}\nsteps: 10\ncheckpoint: {every: 10}\nprecision: bf16_compact\n"
	wide := testConfig(t, plan, more)
	mustRun(t, wide, Options{})
	c := testConfig(t, plan, more+"activations: bf16\n")
	want := mustRun(t, c, Options{})
	a, b := losses(t, wide.Output), losses(t, c.Output)
	for step := range a {
		if a[step] == b[step] || math.Abs(a[step]-b[step]) > 0.01*a[step] {
			t.Errorf("step %d: loss %v with activations in fp32, %v in bf16", step, a[step], b[step])
		}
	}
	c.Output, c.Threads, c.Recompute = filepath.Join(t.TempDir(), "run"), 3, moe.RecomputeLayers
	mustRun(t, c, stopAfter(4))
	other := c
	other.Activations = "fp32"
	if _, err := Run(t.Context(), other, Options{}); err == nil ||
		!strings.Contains(err.Error(), `activations was "bf16" and is now "fp32"`) {
		t.Errorf("resumed with activations in fp32: %v", err)
	}
	c.Layout.PP = 2
	if got := mustRun(t, c, Options{}); got.Weights != want.Weights || got.LastLoss != want.LastLoss {
		t.Errorf("resumed: %+v, want %+v", got, want)
	}
	c.Device = devices.OneDNN
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), `"bf16", but the device is "onednn"; use cpu`) {
		t.Errorf("activations in bf16 on another device: %v", err)
	}
	c.Device, c.Layout.PP, c.Layout.DP, c.Layout.CP = "cpu", 1, 2, 2
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "needs layout.cp: 1") {
		t.Errorf("activations in bf16 of shared sequences: %v", err)
	}
}

// Moments in bfloat16 change the result a little. All schemes leave the same bits. A run resumes
// with another number of stages without a difference.
func TestRunMoments(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	run := func(scheme estimate.Scheme, stages int, moments string, o Options) runOutcome {
		l := LayoutConfig{DP: 2, EP: 2, PP: stages, Optimizer: scheme}
		c := ranksConfig(t, plan, l, pipelineModel+"steps: 8\nmicro_batch_size: 1\nprecision: bf16_compact\n"+
			"optimizer: {moments: "+moments+"}\n")
		return mustRunRanks(t, c, o)
	}
	wide := run(estimate.EPSO, 1, "fp32", Options{})
	want := run(estimate.EPSO, 1, "bf16", Options{})
	if d := apart(t, wide.lines, want.lines, "loss"); d == 0 || d > 0.01 {
		t.Errorf("the losses differ by %v from the losses with moments in fp32", d)
	}
	for _, scheme := range schemes {
		sameBits(t, string(scheme), want, run(scheme, 1+len(scheme)%2, "bf16", Options{}))
	}
	for part, change := range map[string]func(c *Config){
		`the device is "onednn"`:   func(c *Config) { c.Device = devices.OneDNN },
		"with a beta above 0.99":   func(c *Config) { c.Optimizer.Betas = []float64{0.9, 0.999} },
		"lion has no such setting": func(c *Config) { c.Optimizer.Name = optimizer.Lion },
	} {
		c := testConfig(t, plan, "optimizer: {moments: bf16}\n")
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "optimizer.moments") ||
			!strings.Contains(err.Error(), part) {
			t.Errorf("error %v, want one with %q", err, part)
		}
	}
	c := testConfig(t, plan, "steps: 8\ncheckpoint: {every: 8}\nprecision: bf16_compact\noptimizer: {moments: bf16}\n")
	single := mustRun(t, c, Options{})
	c.Output, c.Layout.PP = filepath.Join(t.TempDir(), "run"), 2
	mustRun(t, c, stopAfter(3))
	c.Layout.PP = 1
	if got := mustRun(t, c, Options{}); got.Weights != single.Weights || got.Resumed == "" {
		t.Errorf("resumed: %+v, want %+v", got, single)
	}
}

// I2, I4: in a layout, all schemes and any number of pipeline stages leave the same bits, with
// gradients sent in either type, or kept in bfloat16.
func TestMixedLayouts(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", unevenSkips)
	run := func(l LayoutConfig, precision xpu.Precision, more string) runOutcome {
		c := ranksConfig(t, plan, l, pipelineModel+"steps: 6\nmicro_batch_size: 1\n"+
			"evaluate: {every: 3, samples: 5}\nprecision: "+string(precision)+"\n"+more)
		c.Layout.SumReplicas = max(1, c.Layout.DP/2)
		return mustRunRanks(t, c, Options{})
	}
	one := map[xpu.Precision]runOutcome{}
	for _, precision := range mixed {
		one[precision] = run(LayoutConfig{}, precision, "")
		sameBits(t, "pp 2", one[precision], run(LayoutConfig{DP: 1, PP: 2, EP: 1}, precision, ""))
	}
	for _, l := range layouts {
		for _, kind := range []struct {
			precision xpu.Precision
			sent      xpu.DType
		}{{xpu.BF16Mixed, xpu.BFloat16}, {xpu.BF16Mixed, xpu.Float32}, {xpu.BF16Compact, xpu.BFloat16}} {
			more := fmt.Sprintf("layout: {gradients: %s}\n", kind.sent)
			var want runOutcome
			for i, scheme := range schemes {
				l.Optimizer = scheme
				got := run(l, kind.precision, more)
				if i == 0 {
					want = got
					if d := apart(t, one[kind.precision].lines, want.lines, "loss"); d > 0.01 {
						t.Errorf("dp %d, ep %d, %v: the loss differs from the loss of one rank by %v", l.DP, l.EP, kind,
							d)
					}
				}
				sameBits(t, fmt.Sprintf("dp %d, ep %d, %s, %v", l.DP, l.EP, scheme, kind), want, got)
			}
			if l.EP == 2 {
				l.Optimizer, l.PP = estimate.EPSO, 2
				sameBits(t, fmt.Sprintf("dp 2, pp 2, ep 2, %v", kind), want, run(l, kind.precision, more))
			}
		}
	}
}

// A field that contradicts the precision is refused, and so is a device without bfloat16 weights.
func TestMixedRefused(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "")
	c.Layout.Gradients = "bf16"
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "needs precision: bf16_mixed") {
		t.Errorf("gradients in bf16 with fp32 weights: %v", err)
	}
	c.Layout.Gradients, c.Precision = "fp32", xpu.BF16Compact
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "gradients are bf16 in memory") {
		t.Errorf("gradients kept in bf16 and sent in fp32: %v", err)
	}
	c.Layout.Gradients, c.Optimizer.Name = "", optimizer.Muon
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "muon needs float32 gradients") {
		t.Errorf("gradients in bf16 with Muon: %v", err)
	}
	c = testConfig(t, plan, "device: onednn\n")
	for _, c.Precision = range mixed {
		if _, err := Run(t.Context(), c, Options{}); err == nil ||
			!strings.Contains(err.Error(), fmt.Sprintf("precision %s needs the device cpu", c.Precision)) {
			t.Errorf("oneDNN in %s: %v", c.Precision, err)
		}
	}
	if names, _ := filepath.Glob(filepath.Join(c.Output, checkpoint.DirName, "*")); len(names) > 0 {
		t.Errorf("it has written %v", names)
	}
}
