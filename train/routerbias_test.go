package train

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/train/estimate"
	"mula/xpu"
)

// deepSeek is a model with correction biases in all layers but the first.
const deepSeek = "model: {preset: mula-nano, model_type: deepseek_v3, num_hidden_layers: 5, dense_layers: '0', " +
	"dense_intermediate_size: 48, shared_expert_intermediate_size: 32, n_group: 2, topk_group: 1, " +
	"norm_topk_prob: true, routed_scaling_factor: 2.5, q_lora_rank: 16, kv_lora_rank: 16, qk_nope_head_dim: 8, " +
	"qk_rope_head_dim: 4, v_head_dim: 8, rope_interleave: true}\nrouter_bias: {update_speed: 0.01}\n" +
	"aux_loss: {form: sequence}\nevaluate: {every: 0}\nsteps: 3\n"

// biasesOf returns the correction biases of a run's last checkpoint.
func biasesOf(t *testing.T, r Result) map[string][]float32 {
	t.Helper()
	m, err := moe.Open(r.Checkpoint, device(t, 1))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]float32{}
	for _, p := range m.Biases() {
		all[p.Name] = slices.Clone(p.Weight.Floats())
	}
	return all
}

// Correction biases do not depend on the layout: they are updated from the counts of all ranks. A
// resumed run has the biases of an uninterrupted one.
func TestRouterBiases(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	run := func(l LayoutConfig) map[string][]float32 {
		return biasesOf(t, mustRun(t, ranksConfig(t, plan, l, deepSeek), Options{}))
	}
	want := run(LayoutConfig{})
	moved := 0
	for _, bias := range want {
		for _, b := range bias {
			if steps := math.Abs(float64(b)) / 0.01; steps > 0.5 && steps < 3.5 {
				moved++
			}
		}
	}
	if len(want) != 4 || moved < 12 {
		t.Fatalf("biases %v", want)
	}
	for _, l := range []LayoutConfig{{DP: 2, EP: 1}, {DP: 1, EP: 2}, {DP: 1, EP: 1, PP: 2}, {DP: 2, EP: 1, CP: 2},
		{DP: 2, EP: 2, PP: 3, Optimizer: estimate.SO}} {
		if got := run(l); !maps.EqualFunc(want, got, slices.Equal[[]float32]) {
			t.Errorf("%+v: biases %v, want %v", l, got, want)
		}
	}

	// groups of layers, some with experts in none and some with experts in two layers
	for _, l := range []LayoutConfig{{DP: 1, EP: 1}, {DP: 1, EP: 2}} {
		groups := l
		groups.PP, groups.VirtualStages = 2, 2
		of := func(l LayoutConfig) Result { return mustRun(t, ranksConfig(t, plan, l, deepSeek), Options{}) }
		whole, got := of(l), of(groups)
		if biases := biasesOf(t, got); !maps.EqualFunc(want, biases, slices.Equal[[]float32]) {
			t.Errorf("%+v: biases %v, want %v", groups, biases, want)
		}
		if got.Weights != whole.Weights || got.LastLoss != whole.LastLoss {
			t.Errorf("%+v: weights %.16s… and loss %v, want %.16s… and %v", groups, got.Weights, got.LastLoss,
				whole.Weights, whole.LastLoss)
		}
	}

	// stopped after half of the steps
	c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1, PP: 2}, deepSeek)
	mustRun(t, c, stopAfter(1))
	if got := biasesOf(t, mustRun(t, c, Options{})); !maps.EqualFunc(want, got, slices.Equal[[]float32]) {
		t.Errorf("resumed: biases %v, want %v", got, want)
	}

	// of float32 with weights of bfloat16, and unchanged with a speed of 0
	c = ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1}, deepSeek)
	c.Precision = xpu.BF16Mixed
	for name, bias := range biasesOf(t, mustRun(t, c, Options{})) {
		for _, b := range bias {
			if steps := float64(b) / 0.01; math.Abs(steps-math.Round(steps)) > 1e-4 {
				t.Errorf("%s is %v, not a multiple of the speed", name, bias)
				break
			}
		}
	}
	byDefault := strings.Replace(deepSeek, "router_bias: {update_speed: 0.01}\n", "", 1)
	for name, bias := range biasesOf(t, mustRun(t, ranksConfig(t, plan, LayoutConfig{}, byDefault), Options{})) {
		most := slices.MaxFunc(bias, func(a, b float32) int { return cmp.Compare(max(a, -a), max(b, -b)) })
		if most == 0 || max(most, -most) > 3.001*defaultUpdateSpeed {
			t.Errorf("%s is %v after 3 steps with the default speed", name, bias)
		}
	}
	fixed := strings.Replace(deepSeek, "update_speed: 0.01", "update_speed: 0", 1)
	c = ranksConfig(t, plan, LayoutConfig{}, fixed)
	for name, bias := range biasesOf(t, mustRun(t, c, Options{})) {
		if slices.ContainsFunc(bias, func(b float32) bool { return b != 0 }) {
			t.Errorf("%s moved without a speed: %v", name, bias)
		}
	}
}

// Settings that do not fit the router are refused by name.
func TestRouterBiasRefuses(t *testing.T) {
	for config, want := range map[string]string{
		"router_bias: {update_speed: 0.1}\n":              "router_bias.update_speed",
		deepSeek + "z_loss: {coefficient: 0.1}\n":         "z_loss.coefficient",
		strings.Replace(deepSeek, "0.01", "-1", 1):        "router_bias.update_speed",
		strings.Replace(deepSeek, "_bias: {", "_b: {", 1): "router_b",
	} {
		if _, err := ParseConfig([]byte(config), "train.yaml"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %s", config, err, want)
		}
	}
}
