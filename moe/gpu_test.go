package moe

import (
	"slices"
	"testing"

	"mula/xpu"
	"mula/xpu/gpu"
	"mula/xpu/opencl"
)

// someGPU gives devices of a precision on the first GPU of this machine. PoCL on a processor is no
// GPU: xpu/gpu tests its commands there, and train a run.
func someGPU(t *testing.T, precision xpu.Precision) func(int) xpu.Device {
	t.Helper()
	found, err := opencl.Devices()
	found = slices.DeleteFunc(found, func(d *opencl.Device) bool { return d.Type != opencl.GPU })
	if len(found) == 0 {
		t.Skipf("no GPU (error: %v)", err)
	}
	cache := opencl.NewCache(t.TempDir())
	return func(int) xpu.Device {
		d, err := gpu.New(t.Context(), found[0], gpu.Options{Precision: precision, Threads: 2, Cache: cache})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

// gpuErrors bounds the errors of logits, of losses and of gradients, against transformers' in fp32.
// In bf16 the processor's are up to 0.42, 2.7e-4 and 0.31: a token may choose another expert.
var gpuErrors = map[xpu.Precision]struct{ logits, loss, grad float64 }{
	xpu.FP32: {1e-5, 2e-6, 1e-4},
	xpu.BF16: {0.5, 5e-4, 0.4},
}

// On a GPU, logits, losses and gradients are transformers'.
func TestGPUGolden(t *testing.T) {
	for precision, most := range gpuErrors {
		device := someGPU(t, precision)
		for _, name := range goldenCases {
			t.Run(string(precision)+"/"+name, func(t *testing.T) {
				g := openGolden(t, name+".safetensors")
				dev := device(0)
				t.Cleanup(dev.Close)
				m, batch := g.modelOn(dev)
				t.Cleanup(m.Close)
				if d := maxDiff(t, g.logits(t, m, batch), g.floats("logits")); !(d < most.logits) {
					t.Errorf("logits differ by %.2g, at most %g is allowed", d, most.logits)
				} else {
					t.Logf("logits differ by %.2g", d)
				}
				stats, err := m.Backward(t.Context(), batch, BackwardOptions{})
				if err != nil {
					t.Fatal(err)
				}
				want := float64(g.floats("loss")[0])
				if d := abs(stats.Loss/float64(stats.Targets)-want) / want; !(d < most.loss) {
					t.Errorf("the loss differs by %.2g, at most %g is allowed", d, most.loss)
				} else {
					t.Logf("the loss differs by %.2g", d)
				}
				worst := 0.0
				for _, p := range m.Parameters() {
					d := gradientError(t, m, p, g.floats("none "+p.Name))
					if worst = max(worst, d); !(d < most.grad) {
						t.Errorf("gradient of %s: relative error %.2g, at most %g is allowed", p.Name, d, most.grad)
					}
				}
				t.Logf("largest relative error of a gradient %.2g", worst)
			})
		}
	}
}

// A GPU gives the same bits twice, in every kind of pass.
func TestGPUSameBits(t *testing.T) {
	for precision := range gpuErrors {
		device := someGPU(t, precision)
		for kind, f := range map[string]use{"whole model": wholeModel, "shared experts": sharedExperts} {
			for name, cfg := range gradientCases(t) {
				if kind == "shared experts" && !cfg.moe() {
					continue
				}
				t.Run(string(precision)+"/"+kind+"/"+name, func(t *testing.T) {
					if first, second := f(t, device, cfg), f(t, device, cfg); first != second {
						t.Errorf("other bits:\n%s\n%s", first, second)
					}
				})
			}
		}
	}
}

func abs(x float64) float64 { return max(x, -x) }
