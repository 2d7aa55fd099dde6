package train

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/estimate"
)

const mixedYAML = "precision: bf16_mixed\n"

// A run with precision bf16_mixed is near a run in fp32. Its checkpoints have bfloat16 weights that
// are rounded masters, and the masters move where weights cannot. A stopped run resumes without a
// difference.
func TestRunMixed(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	const more = "evaluate: {every: 0}\nsteps: 30\ncheckpoint: {every: 30}\n"
	single, c := testConfig(t, plan, more), testConfig(t, plan, more+mixedYAML)
	mustRun(t, single, Options{})
	want := mustRun(t, c, Options{})
	a, b := losses(t, single.Output), losses(t, c.Output)
	for step := range a {
		if a[step] == b[step] || math.Abs(a[step]-b[step]) > 0.01*a[step] {
			t.Errorf("step %d: loss %v in fp32, %v in bf16_mixed", step, a[step], b[step])
		}
	}
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
	// On another number of threads, killed and resumed.
	c.Output, c.Threads = filepath.Join(t.TempDir(), "run"), 3
	mustRun(t, c, stopAfter(17))
	if got := mustRun(t, c, Options{}); got.Weights != want.Weights || got.LastLoss != want.LastLoss ||
		got.Resumed == "" {
		t.Errorf("resumed: %+v, want %+v", got, want)
	}
}

// I2, I4: in a layout, all schemes and any number of pipeline stages leave the same bits, with
// gradients sent in either type; a run that changes its layout keeps every bit of its state.
func TestMixedLayouts(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", unevenSkips)
	run := func(l LayoutConfig, more string) runOutcome {
		c := ranksConfig(t, plan, l, mixedYAML+pipelineModel+"steps: 6\nmicro_batch_size: 1\n"+
			"evaluate: {every: 3, samples: 5}\n"+more)
		c.Layout.SumReplicas = max(1, c.Layout.DP/2)
		return mustRunRanks(t, c, Options{})
	}
	one := run(LayoutConfig{}, "")
	sameBits(t, "pp 2", one, run(LayoutConfig{DP: 1, PP: 2, EP: 1}, ""))
	for _, l := range layouts {
		for _, sent := range []string{"bf16", "fp32"} {
			more := fmt.Sprintf("layout: {gradients: %s}\n", sent)
			var want runOutcome
			for i, scheme := range schemes {
				l.Optimizer = scheme
				got := run(l, more)
				if i == 0 {
					want = got
					if d := apart(t, one.lines, want.lines, "loss"); d > 0.01 {
						t.Errorf("dp %d, ep %d, gradients %s: the loss differs from the loss of one rank by %v", l.DP,
							l.EP, sent, d)
					}
				}
				sameBits(t, fmt.Sprintf("dp %d, ep %d, %s, gradients %s", l.DP, l.EP, scheme, sent), want, got)
			}
			if l.EP == 2 {
				l.Optimizer, l.PP = estimate.EPSO, 2
				sameBits(t, "dp 2, pp 2, ep 2, gradients "+sent, want, run(l, more))
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
	c = testConfig(t, plan, mixedYAML+"device: onednn\n")
	if _, err := Run(t.Context(), c, Options{}); err == nil ||
		!strings.Contains(err.Error(), "precision bf16_mixed needs the device cpu") {
		t.Errorf("oneDNN in bf16_mixed: %v", err)
	}
	if names, _ := filepath.Glob(filepath.Join(c.Output, checkpoint.DirName, "*")); len(names) > 0 {
		t.Errorf("it has written %v", names)
	}
}
