package moe

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"mula/xpu"
	"mula/xpu/cpu"
)

// Trainings in fp32 and in bf16, alike in all else, have losses that differ by less than 0.5 % in
// the mean over 10 steps. The text are the bytes of this package.
func TestPrecisionsTrainAlike(t *testing.T) {
	if raceDetector {
		t.Skip("takes long, and other tests run the same code")
	}
	const steps, rows, s, mean, band = 50, 8, 64, 10, 0.005
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, data...)
	}
	cfg := mustPreset(t, "mula-nano")
	cfg.VocabSize = 256
	train := func(p xpu.Precision) (losses []float64) {
		dev := cpu.New(2, p)
		defer dev.Close()
		m, err := New(cfg, dev)
		if err != nil {
			t.Fatal(err)
		}
		m.Init(1)
		var moments []xpu.Moments
		for _, b := range m.Buckets() {
			var moment [2]xpu.Tensor
			for i := range moment {
				if moment[i], err = dev.New(xpu.Float32, b.Weight.Elements()); err != nil {
					t.Fatal(err)
				}
			}
			moments = append(moments, xpu.Moments{Weight: b.Weight,
				Grad: b.Grad, M: moment[0], V: moment[1]})
		}
		r := rand.New(rand.NewPCG(1, 2))
		for step := range steps {
			batch := Batch{Rows: rows, SequenceLength: s}
			for range rows {
				at := r.IntN(len(text) - s)
				for _, c := range text[at:][:s+1] {
					batch.Tokens = append(batch.Tokens, uint32(c))
				}
			}
			m.ZeroGradients()
			stats, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)})
			if err != nil {
				t.Fatal(err)
			}
			dev.Update(xpu.AdamW{LearningRate: 2e-3, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1,
				Step: int64(step + 1), GradScale: 1}.Update(),
				moments, nil, nil)
			losses = append(losses, stats.Loss/float64(stats.Targets))
		}
		return losses
	}
	fp32, bf16 := train(xpu.FP32), train(xpu.BF16)
	if last := fp32[steps-1]; !(last < fp32[0]-1.5) {
		t.Fatalf("the loss went from %v to %v: there is no training to compare", fp32[0], last)
	}
	worst, differs := 0.0, false
	for end := mean; end <= steps; end++ {
		a, b := 0.0, 0.0
		for i := end - mean; i < end; i++ {
			a, b = a+fp32[i]/mean, b+bf16[i]/mean
			differs = differs || fp32[i] != bf16[i]
		}
		d := math.Abs(a-b) / a
		if worst = max(worst, d); !(d < band) {
			t.Errorf("mean loss up to step %d: %v in fp32, %v in bf16", end, a, b)
		}
	}
	t.Logf("largest difference %.3f %%, loss %.3f to %.3f", 100*worst, fp32[0], fp32[steps-1])
	if !differs {
		t.Error("both trainings are the same: bf16 was not used")
	}
}

// Gradients of bfloat16 are the rounded gradients of float32. A further batch adds its float32
// gradient and rounds the sum. The head's gradient is a sum over blocks of tokens in the same way:
// here the second batch has the targets of the second block. A tied embedding gets the gradients of
// the head and of the embedding of an untied model with equal weights, one after the other.
func TestGradientsInBFloat16(t *testing.T) {
	for name, c := range gradientCases(t) {
		t.Run(name, func(t *testing.T) {
			c.VocabSize, c.InitStd = 300, 0.1
			rows, length, split := 2, 40, 40
			tied, severalBlocks := c.TieEmbeddings, name == "nano"
			if severalBlocks {
				c.VocabSize, c.MaxPositions = 40_000, 300 // blocks of 256 tokens
				rows, length, split = 1, 300, 256
			}
			both := randomBatch(c, rows, length, 5)
			both.Counted = make([]bool, rows*length)
			opts := BackwardOptions{Targets: 2 * int64(rows*length),
				Loss: LossOptions{Aux: AuxHF, AuxCoefficient: 0.01}}
			// gradients computes the gradients of batches whose targets from..to count.
			gradients := func(c Config, precision xpu.Precision, targets ...[2]int) map[string][]float32 {
				dev := cpu.New(2, precision)
				defer dev.Close()
				m := newModelOn(t, dev, c)
				m.Init(3)
				if tied && !c.TieEmbeddings {
					dev.Copy(byName(m, headName).Weight, byName(m, embeddingName).Weight)
				}
				for _, r := range targets {
					clear(both.Counted)
					for i := r[0]; i < r[1]; i++ {
						both.Counted[i] = true
					}
					if _, err := m.Backward(t.Context(), both, opts); err != nil {
						t.Fatal(err)
					}
				}
				sums := map[string][]float32{}
				for _, p := range m.Parameters() {
					sums[p.Name] = slices.Clone(numbers(t, m, p.Grad))
				}
				return sums
			}
			untied := c
			untied.TieEmbeddings = false
			first, second := [2]int{0, split}, [2]int{split, rows * length}
			a, b := gradients(untied, xpu.BF16Mixed, first), gradients(untied, xpu.BF16Mixed, second)
			got := gradients(c, xpu.BF16Compact, first, second)
			blocks := gradients(c, xpu.BF16Compact, [2]int{0, rows * length})
			for tensor, sum := range got {
				terms := [][]float32{a[tensor], b[tensor]}
				if tied && tensor == embeddingName {
					terms = [][]float32{a[headName], a[tensor], b[headName], b[tensor]}
				}
				want, last := make([]float32, len(sum)), []float32(nil)
				for _, term := range terms {
					last = slices.Clone(want)
					cpu.Axpy(want, 1, term)
					cpu.RoundBF16(want)
				}
				if !slices.Equal(sum, want) {
					t.Errorf("%s: not the sum of rounded gradients", tensor)
				}
				if tensor == headName && severalBlocks && !slices.Equal(blocks[tensor], want) {
					t.Errorf("%s: not the sum of rounded blocks", tensor)
				}
				if slices.Equal(want, last) && !OfExpert(tensor) { // an expert may have no tokens
					t.Errorf("%s: the second batch has no gradient", tensor)
				}
			}
		})
	}
}
