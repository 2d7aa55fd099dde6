package moe

import (
	"math"
	"slices"
	"testing"
)

// Drawn targets have the model's own distribution: over positions that all have the same one, the
// counts of the tokens pass a chi-square test at five standard deviations.
func TestSampledTargetsAreDistributed(t *testing.T) {
	cfg := gradientCases(t)["gqa"]
	m := newModel(t, cfg, 2)
	randomize(m, 1)
	const draws = 20000
	batch := Batch{Rows: draws, SequenceLength: 1, Tokens: slices.Repeat([]uint32{7, 0}, draws)}
	counts := make([]float64, cfg.VocabSize)
	stats, err := m.Backward(t.Context(), batch, BackwardOptions{SampleTargets: true, SampleSeed: 3})
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range drawnTargets(t, m) {
		counts[id]++
	}
	logits, err := m.Logits(t.Context(), []uint32{7})
	if err != nil {
		t.Fatal(err)
	}
	var z []float64
	for _, v := range logits {
		z = append(z, float64(v))
	}
	p, lse := softmax64(z)
	square, loss := 0.0, 0.0
	for id, n := range counts {
		square += (n - draws*p[id]) * (n - draws*p[id]) / (draws * p[id])
		loss += n * (lse - z[id])
	}
	freedom := float64(cfg.VocabSize - 1)
	t.Logf("chi-square %.1f with %v degrees of freedom", square, freedom)
	if math.Abs(square-freedom) > 5*math.Sqrt(2*freedom) {
		t.Errorf("chi-square is %v with %v degrees of freedom", square, freedom)
	}
	if math.Abs(stats.Loss-loss) > 1e-5*loss {
		t.Errorf("the loss is %v, that of the drawn targets %v", stats.Loss, loss)
	}
}

// The gradient of drawn targets equals the gradient of a batch with these targets, to the bit.
func TestSampledTargetsGradient(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		m := newModel(t, cfg, 2)
		randomize(m, 1)
		batch := randomBatch(cfg, 300, 1, 2) // one token a row, so that targets are no inputs
		if _, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg), SampleTargets: true,
			SampleSeed: 9}); err != nil {
			t.Fatal(err)
		}
		got, given := grads(t, m), slices.Clone(batch.Tokens)
		same := 0
		for row, id := range drawnTargets(t, m) {
			if batch.Tokens[2*row+1] == uint32(id) {
				same++
			}
			batch.Tokens[2*row+1] = uint32(id)
		}
		if same > 60 {
			t.Errorf("%s: %d of 300 drawn targets are the batch's", name, same)
		}
		m.ZeroGradients()
		if _, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, grads(t, m)) {
			t.Errorf("%s: the gradients differ", name)
		}
		m.ZeroGradients()
		if _, err := m.Backward(t.Context(), Batch{Tokens: given, Rows: 300, SequenceLength: 1},
			BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
			t.Fatal(err)
		}
		if slices.Equal(got, grads(t, m)) {
			t.Errorf("%s: the gradients are those of the batch's own targets", name)
		}
	}
}

// A step draws the same targets with any number of threads and however it is cut into micro-batches
// and blocks of logits; another seed or another place in the step draws others.
func TestSampledTargetsDoNotDependOnLayout(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	const rows, s = 8, 50
	draw := func(threads, micro, logitsRows int, seed uint64, first int64) (targets []int32) {
		m := newModel(t, cfg, threads)
		randomize(m, 1)
		batch := randomBatch(cfg, rows, s, 2)
		for row := 0; row < rows; row += micro {
			part := Batch{Tokens: batch.Tokens[row*(s+1) : (row+micro)*(s+1)], Rows: micro, SequenceLength: s}
			opts := BackwardOptions{SampleTargets: true, SampleSeed: seed, FirstTarget: first + int64(row*s)}
			if _, err := m.Backward(t.Context(), part, opts); err != nil {
				t.Fatal(err)
			}
			if logitsRows > 0 { // again, with other blocks
				m.ws.logitsRows = logitsRows
				if _, err := m.Backward(t.Context(), part, opts); err != nil {
					t.Fatal(err)
				}
			}
			targets = append(targets, drawnTargets(t, m)...)
		}
		return targets
	}
	want := draw(1, rows, 0, 5, 0)
	for _, got := range [][]int32{draw(3, rows, 0, 5, 0), draw(2, 2, 0, 5, 0), draw(2, 4, 7, 5, 0)} {
		if !slices.Equal(got, want) {
			t.Error("the targets depend on threads, micro-batches or blocks of logits")
		}
	}
	for what, other := range map[string][]int32{"another seed": draw(2, rows, 0, 6, 0), "another place": draw(2, rows,
		0, 5, rows*s)} {
		same := 0
		for i := range want {
			if want[i] == other[i] {
				same++
			}
		}
		if same > len(want)/4 {
			t.Errorf("%s draws %d of %d targets alike", what, same, len(want))
		}
	}
}

// drawnTargets returns the targets of the last pass.
func drawnTargets(t *testing.T, m *Model) []int32 {
	t.Helper()
	targets := make([]int32, m.ws.targets.Elements())
	if err := m.dev.ReadInts(t.Context(), targets, m.ws.targets); err != nil {
		t.Fatal(err)
	}
	return targets
}
