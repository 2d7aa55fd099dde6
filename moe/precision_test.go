package moe

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
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
			stats, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss})
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
