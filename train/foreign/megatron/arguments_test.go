package megatron

import (
	"strings"
	"testing"

	"mula/internal/pickle"
	"mula/moe"
)

func TestArguments(t *testing.T) {
	c := moe.Config{Architecture: moe.Qwen3MoE, HiddenSize: 64, Layers: 2, Heads: 4, KVHeads: 2, Experts: 8,
		ExpertsPerToken: 2, NormTopK: true, NormEps: 1e-5, RopeTheta: 500000}
	scaled := c
	scaled.RopeScaling = moe.RopeScaling{Type: "llama3", Factor: 8}
	window := c
	window.SlidingWindow = 16
	lower := window
	lower.MaxWindowLayers = 1
	for _, test := range []struct {
		c        moe.Config
		argument string
		value    pickle.Value
		want     string // "": no error
	}{
		{c, "rotary_base", int64(500000), ""},
		{c, "rotary_base", int64(10000), "args.rotary_base is 10000, but rope_theta of config.json needs 500000"},
		{c, "normalization", "LayerNorm", "args.normalization is LayerNorm"},
		{c, "num_experts", nil, ""},
		{c, "moe_router_topk", int64(1), "args.moe_router_topk is 1, but num_experts_per_tok"},
		{c, "moe_router_score_function", "sigmoid", "args.moe_router_score_function is sigmoid"},
		{c, "moe_router_pre_softmax", false, ""},
		{c, "moe_router_pre_softmax", true, "args.moe_router_pre_softmax is true, but norm_topk_prob"},
		{c, "use_rope_scaling", true, "args.use_rope_scaling is true"},
		{scaled, "rope_scaling_factor", 8.0, ""},
		{scaled, "rope_scaling_factor", 32.0, "rope_scaling.factor of config.json needs 8"},
		{c, "window_size", nil, ""},
		{c, "window_size", pickle.Tuple{int64(15), int64(0)}, "args.window_size is [15 0], but sliding_window"},
		{window, "window_size", pickle.Tuple{int64(15), int64(0)}, ""},
		{lower, "window_size", pickle.Tuple{int64(15), int64(0)}, "max_window_layers of config.json is 1"},
		{c, "window_size", pickle.Tuple{int64(-1), int64(0)}, ""},
		{window, "window_size", &pickle.List{Items: []pickle.Value{int64(16), int64(0)}}, "args.window_size is "},
		{window, "window_size", pickle.Tuple{int64(15), int64(3)}, "args.window_size is [15 3]"},
		{c, "softmax_scale", 0.5, "args.softmax_scale is 0.5, which no supported model has"},
		{c, "attention_output_gate", false, ""},
		{c, "no_rope_freq", &pickle.List{}, "args.no_rope_freq is "},
		{c, "softmax_type", "vanilla", ""},
		{c, "softmax_type", "off-by-one", "args.softmax_type is off-by-one"},
		{c, "moe_router_topk_scaling_factor", 1.0, ""},
		{c, "moe_router_topk_scaling_factor", 2.5, "args.moe_router_topk_scaling_factor is 2.5"},
		{c, "moe_router_load_balancing_type", "aux_loss", ""},
		{c, "moe_router_load_balancing_type", "sinkhorn", "args.moe_router_load_balancing_type is sinkhorn"},
		{window, "window_size", nil, "args.window_size is <nil>, but sliding_window of config.json is 16"},
		{c, "multi_latent_attention", true, "args.multi_latent_attention is true"},
	} {
		args := &pickle.Object{Class: "argparse.Namespace", State: &pickle.Dict{Pairs: []pickle.Pair{
			{Key: test.argument, Value: test.value}}}}
		err := (&model{config: test.c}).checkArguments(args)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s %v: %v, want %q", test.argument, test.value, err, test.want)
		}
	}
	grouped := &pickle.Object{State: &pickle.Dict{Pairs: []pickle.Pair{{Key: "group_query_attention", Value: true},
		{Key: "num_query_groups", Value: int64(4)}}}}
	if err := (&model{config: c}).checkArguments(grouped); err == nil ||
		!strings.Contains(err.Error(), "args.num_query_groups is 4") {
		t.Error(err)
	}
}
