package moe

import (
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/moe/safetensors"
	"mula/xpu"
	"mula/xpu/cpu"
)

// uniform gives n numbers in [-0.5, 0.5), a function of the name; testdata/golden.py has the same.
func uniform(name string, n int) []float32 {
	h := uint32(0x811c9dc5)
	for i := range len(name) {
		h = (h ^ uint32(name[i])) * 0x01000193
	}
	mix := func(x uint32) uint32 {
		x ^= x >> 16
		x *= 0x85ebca6b
		x ^= x >> 13
		x *= 0xc2b2ae35
		return x ^ x>>16
	}
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(mix(mix(uint32(i)+h)^h)>>8)/(1<<24) - 0.5
	}
	return out
}

// fillByFormula gives the model the weights of testdata/golden.py.
func fillByFormula(m *Model) {
	for _, p := range m.params {
		scale := float32(0.4)
		switch {
		case len(p.Shape) == 1, !Trained(p.Name):
			scale = 0.5
		case strings.HasSuffix(p.Name, ".gate.weight"), strings.HasSuffix(p.Name, ".router.weight"):
			scale = 1
		}
		w := uniform(p.Name, p.Weight.Elements())
		for i := range w {
			w[i] *= scale
			if len(p.Shape) == 1 && Trained(p.Name) {
				w[i]++
			}
			if strings.HasSuffix(p.Name, "gate_proj.bias") || strings.HasSuffix(p.Name, "up_proj.bias") {
				w[i] = 32 * (w[i] - 1) // ±8: some gates and ups are clamped
			}
		}
		m.dev.Write(p.Weight, w)
	}
	if pad := m.cfg.PadTokenID; pad != NoToken {
		m.dev.Zero(m.embed.w.Index(pad))
	}
}

// queryBlock is the number of queries that the CPU's attention takes at a time: lengths around it
// are edges.
const queryBlock = 64

func newModel(t testing.TB, cfg Config, threads int) *Model {
	t.Helper()
	dev := cpu.New(threads, xpu.FP32)
	t.Cleanup(func() { dev.Close() })
	return newModelOn(t, dev, cfg)
}

func newModelOn(t testing.TB, dev xpu.Device, cfg Config) *Model {
	t.Helper()
	m, err := New(cfg, dev)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// numbers are the elements of a tensor of the model's device.
func numbers(t testing.TB, m *Model, x xpu.Tensor) []float32 {
	t.Helper()
	var buffer []float32
	v, err := xpu.Numbers(t.Context(), m.dev, x, &buffer)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// weights and grads are copies of all that a model has, bucket by bucket.
func weights(t testing.TB, m *Model) []float32 {
	return all(t, m, func(b Bucket) []float32 { return numbers(t, m, b.Weight) })
}
func grads(t testing.TB, m *Model) []float32 {
	return all(t, m, func(b Bucket) []float32 { return numbers(t, m, b.Grad) })
}

func all(t testing.TB, m *Model, of func(b Bucket) []float32) (joined []float32) {
	t.Helper()
	for _, b := range m.Buckets() {
		joined = append(joined, of(b)...)
	}
	return joined
}

// golden is a file made by testdata/golden.py.
type golden struct {
	t testing.TB
	f *safetensors.File
}

func openGolden(t testing.TB, path string) golden {
	t.Helper()
	f, err := safetensors.Open(filepath.Join("testdata", path))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return golden{t, f}
}

func (g golden) floats(name string) []float32 {
	g.t.Helper()
	tensor, ok := g.f.Tensor(name)
	if !ok {
		g.t.Fatalf("%s has no tensor %q", g.f.Name(), name)
	}
	v := make([]float32, tensor.Elements())
	if err := g.f.Float32(v, name, 0); err != nil {
		g.t.Fatal(err)
	}
	return v
}

func (g golden) ids() []uint32 {
	var ids []uint32
	for _, v := range g.floats("ids") {
		ids = append(ids, uint32(v))
	}
	return ids
}

func (g golden) config() Config {
	g.t.Helper()
	c, err := readConfigJSON(strings.NewReader(g.f.Metadata()["config"]), g.f.Name())
	if err != nil {
		g.t.Fatal(err)
	}
	return c
}

// The model and batch of a case.
func (g golden) model(threads int) (*Model, Batch) {
	dev := cpu.New(threads, xpu.FP32)
	g.t.Cleanup(func() { dev.Close() })
	return g.modelOn(dev)
}

func (g golden) modelOn(dev xpu.Device) (*Model, Batch) {
	m := newModelOn(g.t, dev, g.config())
	fillByFormula(m)
	tensor, _ := g.f.Tensor("ids")
	return m, Batch{Tokens: g.ids(), Rows: tensor.Shape[0], SequenceLength: tensor.Shape[1] - 1}
}

// documents keeps a batch of the case within the documents that the file names.
func (g golden) documents(b Batch) Batch {
	of, width := g.floats("document"), b.SequenceLength+1
	for row := range b.Rows {
		of := of[row*width:][:width]
		for i := range b.SequenceLength {
			b.Begin = append(b.Begin, int32(slices.Index(of, of[i])))
			b.Counted = append(b.Counted, of[i+1] == of[i] && of[i] >= 0)
		}
	}
	return b
}

var goldenCases = []string{"olmoe", "olmoe-gqa", "olmo", "olmo-gqa-tied", "llama-gqa", "llama-tied",
	"mistral", "qwen2", "qwen3", "qwen3-moe", "qwen3-moe-layers", "mixtral", "olmo2", "flex-olmo",
	"olmo3", "deepseek-v2", "deepseek-v3", "qwen2-moe", "dots1", "glm4-moe", "ernie4-5-moe", "granitemoe", "gpt-oss"}

func maxDiff(t testing.TB, got, want []float32) float64 {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d values, want %d", len(got), len(want))
	}
	worst := 0.0
	for i := range got {
		d := math.Abs(float64(got[i]) - float64(want[i]))
		if !(d <= worst) { // also for NaN
			worst = d
		}
	}
	return worst
}

// logits computes the logits of every fourth position.
func (g golden) logits(t *testing.T, m *Model, batch Batch) (all []float32) {
	t.Helper()
	s, v := batch.SequenceLength, m.cfg.VocabSize
	for row := range batch.Rows {
		logits, err := m.Logits(t.Context(), batch.Tokens[row*(s+1):][:s])
		if err != nil {
			t.Fatal(err)
		}
		for pos := 0; pos < s; pos += 4 {
			all = append(all, logits[pos*v:][:v]...)
		}
	}
	return all
}

// Logits of transformers, for each family.
func TestGoldenLogits(t *testing.T) {
	for _, name := range goldenCases {
		t.Run(name, func(t *testing.T) {
			g := openGolden(t, name+".safetensors")
			m, batch := g.model(2)
			d := maxDiff(t, g.logits(t, m, batch), g.floats("logits"))
			t.Logf("largest difference %.2g", d)
			if !(d < 1e-5) {
				t.Errorf("logits differ from transformers' by %g", d)
			}
		})
	}
}

// Losses and gradients against transformers' autograd, for each form of the load-balancing loss.
func TestGoldenGradients(t *testing.T) {
	for _, name := range goldenCases {
		g := openGolden(t, name+".safetensors")
		options := map[string]LossOptions{"none": {}}
		if hasLosses(g.config()) {
			options["hf"] = LossOptions{Aux: AuxHF, AuxCoefficient: 0.5}
			options["megablocks"] = LossOptions{Aux: AuxMegaBlocks, AuxCoefficient: 0.5, ZCoefficient: 0.1}
		}
		for form, opts := range options {
			t.Run(name+"/"+form, func(t *testing.T) {
				m, batch := g.model(2)
				stats, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: opts})
				if err != nil {
					t.Fatal(err)
				}
				g.checkStats(t, stats, form)
				worst := 0.0
				for _, p := range m.Parameters() {
					d := gradientError(t, m, p, g.floats(form+" "+p.Name))
					worst = max(worst, d)
					if !(d < 1e-4) {
						t.Errorf("gradient of %s: relative error %g", p.Name, d)
					}
				}
				t.Logf("largest relative error of a gradient %.2g", worst)
			})
		}
	}
}

// A packed batch: transformers' loss and gradients under a mask that is block-diagonal and causal,
// of targets that are not ignored; and its logits.
func TestGoldenDocuments(t *testing.T) {
	g := openGolden(t, "olmoe-documents.safetensors")
	m, batch := g.model(2)
	batch = g.documents(batch)
	stats, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: LossOptions{Aux: AuxHF, AuxCoefficient: 0.5}})
	if err != nil {
		t.Fatal(err)
	}
	if want := int(g.floats("targets")[0]); stats.Targets != want || want >= stats.Tokens-4 {
		t.Errorf("%d targets of %d tokens count, want %d", stats.Targets, stats.Tokens, want)
	}
	for what, v := range map[string][2]float64{"loss": {stats.Loss / float64(stats.Targets),
		float64(g.floats("loss")[0])},
		"load-balancing loss": {stats.Aux, float64(g.floats("aux_hf")[0])}} {
		if !(math.Abs(v[0]-v[1]) <= 2e-6*math.Abs(v[1])) {
			t.Errorf("%s is %v, want %v", what, v[0], v[1])
		}
	}
	worst := 0.0
	for _, p := range m.Parameters() {
		d := gradientError(t, m, p, g.floats("hf "+p.Name))
		worst = max(worst, d)
		if !(d < 1e-4) {
			t.Errorf("gradient of %s: relative error %g", p.Name, d)
		}
	}
	t.Logf("largest relative error of a gradient %.2g", worst)

	// The final hidden states are the hidden states of the last pass; its logits are not kept.
	if _, err := m.Forward(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	v, s := m.cfg.VocabSize, batch.SequenceLength
	logits := make([]float32, batch.Rows*s*v)
	m.dev.MatMul(xpu.Of(logits, batch.Rows*s, v), m.ws.h, m.head.w.T(), xpu.MatMulOptions{})
	var got []float32
	for token := range batch.Rows * s {
		if token%s%4 == 0 {
			got = append(got, logits[token*v:][:v]...)
		}
	}
	d := maxDiff(t, got, g.floats("logits"))
	t.Logf("largest difference %.2g", d)
	if !(d < 1e-5) {
		t.Errorf("logits differ from transformers' by %g", d)
	}
}

// hasLosses reports whether transformers has the losses of a model's routers. With correction
// biases, it has none, or counts choices without them.
func hasLosses(c Config) bool { return c.moe() && !c.family().noAuxCoef && !c.family().router.bias }

func (g golden) checkStats(t *testing.T, stats Stats, form string) {
	t.Helper()
	check := func(what string, got float64, tensor string) {
		want := float64(g.floats(tensor)[0])
		if !(math.Abs(got-want) <= 2e-6*math.Abs(want)) {
			t.Errorf("%s is %v, want %v", what, got, want)
		}
	}
	check("loss", stats.Loss/float64(stats.Targets), "loss")
	rows := 0.0
	for _, l := range stats.RowLoss {
		rows += l
	}
	if math.Abs(rows-stats.Loss) > 1e-9*rows {
		t.Errorf("rows' losses add up to %v, not %v", rows, stats.Loss)
	}
	if !hasLosses(g.config()) {
		return
	}
	if form != "none" {
		check("load-balancing loss", stats.Aux, "aux_"+form)
	}
	check("z-loss", stats.Z, "z")
	var counts []float32
	for _, layer := range stats.ExpertCounts {
		for _, n := range layer {
			counts = append(counts, float32(n))
		}
	}
	if want := g.floats("counts"); !slices.Equal(counts, want) {
		t.Errorf("expert counts %v, want %v", counts, want)
	}
}

// gradientError is the largest error of a gradient against its summary (norm, four dot products, up
// to 64 elements), relative to the norm. A dot product with u, uniform in ±0.5, sees an error e as
// about |e|·√(1/12); it is scaled back by that.
func gradientError(t testing.TB, m *Model, p *Parameter, want []float32) float64 {
	t.Helper()
	grad := numbers(t, m, p.Grad)
	norm := float64(want[0])
	if norm == 0 {
		t.Fatalf("gradient of %s is zero: the case tests nothing", p.Name)
	}
	sum := 0.0
	for _, v := range grad {
		sum += float64(v) * float64(v)
	}
	worst := math.Abs(math.Sqrt(sum)-norm) / norm
	for i, w := range want[1:5] {
		dot := 0.0
		for j, u := range uniform("dot"+string(rune('0'+i))+" "+p.Name, len(grad)) {
			dot += float64(u) * float64(grad[j])
		}
		worst = max(worst, math.Abs(dot-float64(w))*math.Sqrt(12)/norm)
	}
	stride := max(1, len(grad)/64)
	for i, w := range want[5:] {
		worst = max(worst, math.Abs(float64(grad[i*stride]-w))/norm)
	}
	if math.IsNaN(sum) {
		return math.Inf(1)
	}
	return worst
}

// Directories that transformers wrote: one file with the config.json of version 4, several files,
// fused experts, bfloat16, float16 with a tied head, what version 4 itself wrote, Mixtral with its
// names of tensors and with the names of version 5 in memory, Granite with fused experts in files,
// and gpt-oss with transposed experts, and with experts in MXFP4.
func TestOpenHuggingFace(t *testing.T) {
	for _, name := range []string{"hf-single", "hf-sharded", "hf-fused", "hf-olmo-bf16", "hf-olmo-tied-fp16",
		"hf-v4-bf16", "hf-mixtral", "hf-mixtral-fused", "hf-granitemoe", "hf-gpt-oss",
		"hf-gpt-oss-mxfp4"} {
		t.Run(name, func(t *testing.T) {
			dev := cpu.New(2, xpu.FP32)
			defer dev.Close()
			m, err := Open(filepath.Join("testdata", name), dev)
			if err != nil {
				t.Fatal(err)
			}
			g := openGolden(t, name+"/expected.safetensors")
			logits, err := m.Logits(t.Context(), g.ids())
			if err != nil {
				t.Fatal(err)
			}
			d := maxDiff(t, logits, g.floats("logits"))
			t.Logf("largest difference %.2g", d)
			if !(d < 1e-5) {
				t.Errorf("logits differ from transformers' by %g", d)
			}
		})
	}
}
