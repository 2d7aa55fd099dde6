package moe

import (
	"slices"
	"testing"
)

// The bias of an expert grows if fewer tokens chose it than the mean of its layer, and shrinks if
// more did.
func TestUpdateBiases(t *testing.T) {
	cfg := gradientCases(t)["deepseek_v3"]
	cfg.Experts, cfg.Groups, cfg.TopGroups, cfg.ExpertsPerToken = 4, 2, 2, 2
	m := newModel(t, cfg, 1)
	m.Init(1)
	update := func(counts ...int64) []float32 {
		t.Helper()
		if err := m.UpdateBiases(t.Context(), [][]int64{counts}, 0.25); err != nil {
			t.Fatal(err)
		}
		return slices.Clone(m.Biases()[0].Weight.Floats())
	}
	for _, step := range []struct {
		counts []int64
		want   []float32
	}{
		{[]int64{10, 2, 0, 4}, []float32{-0.25, 0.25, 0.25, 0}},
		{[]int64{1, 1, 1, 1}, []float32{-0.25, 0.25, 0.25, 0}},
		{[]int64{1 << 40, 1<<40 + 1, 1 << 40, 1 << 40}, []float32{0, 0, 0.5, 0.25}},
		{[]int64{0, 0, 0, 0}, []float32{0, 0, 0.5, 0.25}},
	} {
		if got := update(step.counts...); !slices.Equal(got, step.want) {
			t.Errorf("biases after the counts %v are %v, want %v", step.counts, got, step.want)
		}
	}
	if err := m.UpdateBiases(t.Context(), nil, 1); err == nil {
		t.Error("counts without a layer are accepted")
	}
	names := []string{}
	for _, p := range m.Parameters() {
		names = append(names, p.Name)
	}
	if name := m.Biases()[0].Name; name != "model.layers.1.mlp.gate.e_score_correction_bias" ||
		slices.Contains(names, name) {
		t.Errorf("the correction bias of layer 1 is %s; trained: %v", name, slices.Contains(names, name))
	}
}

// A bias changes the choice of experts, but not the weights of a choice, and has no gradient.
func TestBiasesChooseOnly(t *testing.T) {
	cfg := gradientCases(t)["deepseek_v3"]
	m := newModel(t, cfg, 1)
	randomize(m, 1)
	batch := randomBatch(cfg, 1, 9, 1)
	counts := func() []int64 {
		t.Helper()
		stats, err := m.Forward(t.Context(), batch)
		if err != nil {
			t.Fatal(err)
		}
		return slices.Clone(stats.ExpertCounts[0])
	}
	bias := m.Biases()[0].Weight.Floats()
	clear(bias)
	bias[3] = 10
	if n := counts()[3]; n != 9 {
		t.Errorf("%d of 9 tokens chose the expert with the largest bias", n)
	}
	bias[3] = -10
	if n := counts()[3]; n != 0 {
		t.Errorf("%d tokens chose the expert with the lowest bias", n)
	}
	// a bias of all experts changes nothing
	for i := range bias {
		bias[i] = 0
	}
	without, err := m.Logits(t.Context(), batch.Tokens)
	if err != nil {
		t.Fatal(err)
	}
	for i := range bias {
		bias[i] = -0.75
	}
	with, err := m.Logits(t.Context(), batch.Tokens)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(with, without) {
		t.Error("an equal bias of all experts changes logits")
	}
	if _, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: LossOptions{ZCoefficient: 1}}); err == nil {
		t.Error("a z-loss of sigmoids is accepted")
	}
}
