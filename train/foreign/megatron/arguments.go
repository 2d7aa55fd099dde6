package megatron

import (
	"fmt"

	"mula/internal/pickle"
	"mula/moe"
	"mula/moe/torchfile"
)

// An argument is an argument of Megatron-LM's run that a configuration determines.
type argument struct {
	name  string
	want  any // int64, float64, bool or string; nil: a checkpoint may have any value
	field string
}

// arguments returns the arguments of a model of configuration c.
func arguments(c moe.Config) []argument {
	var factor any
	if c.RopeScaling.Type == "llama3" {
		factor = c.RopeScaling.Factor
	}
	topk, experts := any(int64(c.ExpertsPerToken)), any(int64(c.Experts))
	if c.Experts == 0 {
		topk, experts = nil, nil
	}
	return []argument{
		{"num_layers", int64(c.Layers), "num_hidden_layers"},
		{"hidden_size", int64(c.HiddenSize), "hidden_size"},
		{"num_attention_heads", int64(c.Heads), "num_attention_heads"},
		{"kv_channels", int64(c.HeadDim()), "head_dim"},
		{"norm_epsilon", c.NormEps, "rms_norm_eps"},
		{"rotary_base", c.RopeTheta, "rope_theta"},
		{"rotary_percent", 1.0, "partial_rotary_factor"},
		{"rotary_interleaved", false, "model_type"},
		{"swiglu", true, "hidden_act"},
		{"normalization", "RMSNorm", "model_type"},
		{"position_embedding_type", "rope", "model_type"},
		{"untie_embeddings_and_output_weights", !c.TieEmbeddings, "tie_word_embeddings"},
		{"apply_layernorm_1p", false, "model_type"},
		{"multi_latent_attention", false, "model_type"},
		{"use_rope_scaling", c.RopeScaling.Type == "llama3", "rope_scaling"},
		{"rope_scaling_factor", factor, "rope_scaling.factor"},
		{"num_experts", experts, "num_experts"},
		{"moe_router_topk", topk, "num_experts_per_tok"},
	}
}

// checkArguments compares the arguments of Megatron-LM's run with the configuration. Arguments that
// the checkpoint does not have are not compared.
func (m *model) checkArguments(args *pickle.Object) error {
	c := m.config
	group := c.KVHeads
	if v, _ := args.Attribute("group_query_attention"); v == false {
		group = c.Heads
	}
	for _, a := range arguments(c) {
		v, ok := args.Attribute(a.name)
		if !ok || v == nil || a.want == nil {
			continue
		}
		if x, isInt := v.(int64); isInt {
			if _, isFloat := a.want.(float64); isFloat {
				v = float64(x)
			}
		}
		if v != a.want {
			return fmt.Errorf("args.%s is %v, but %s of config.json needs %v; use the config.json of this model",
				a.name, v, a.field, a.want)
		}
	}
	if v, _ := args.Attribute("group_query_attention"); v == true {
		if v, _ := args.Attribute("num_query_groups"); v != int64(group) {
			return fmt.Errorf("args.num_query_groups is %v, but num_key_value_heads of config.json is %d; use the "+
				"config.json of this model", v, group)
		}
	}
	if v, ok := args.Attribute("window_size"); ok && window(v) != c.SlidingWindow {
		return fmt.Errorf("args.window_size is %v, but sliding_window of config.json is %d; use the config.json of "+
			"this model", v, c.SlidingWindow)
	} else if ok && c.SlidingWindow > 0 && c.MaxWindowLayers > 0 {
		return fmt.Errorf("args.window_size is %v for all layers, but max_window_layers of config.json is %d; use the "+
			"config.json of this model", v, c.MaxWindowLayers)
	}
	for _, name := range unsupported {
		if v, _ := args.Attribute(name); v != nil && v != false && v != int64(0) && v != 0.0 {
			return fmt.Errorf("args.%s is %v, which no supported model has", name, v)
		}
	}
	if v, _ := args.Attribute("softmax_type"); v != nil && v != "vanilla" {
		return fmt.Errorf("args.softmax_type is %v, but supported models have vanilla", v)
	}
	return checkRouting(args, c)
}

// unsupported are arguments that change what a model computes, and that no model of the supported
// families has. None, false and 0 switch them off.
var unsupported = []string{"activation_func_clamp_value", "apply_residual_connection_post_layernorm",
	"attention_output_gate", "experimental_attention_variant", "glu_linear_offset", "linear_attention_freq",
	"moe_apply_probs_on_input", "moe_latent_size", "moe_router_group_topk", "moe_router_num_groups",
	"moe_router_topk_limited_devices", "mrope_section", "no_rope_freq", "rotary_seq_len_interpolation_factor",
	"softmax_scale", "window_attn_skip_freq"}

// window returns the number of positions that a query sees with an argument window_size: the
// positions before it, and its own. It is 0 without a window, and -1 for other values.
func window(v pickle.Value) int {
	if v == nil {
		return 0
	}
	if sides, ok := torchfile.Ints(v); ok && len(sides) == 2 && sides[0] >= -1 && sides[1] <= 0 {
		return sides[0] + 1 // -1: all positions before it
	}
	return -1
}

// checkRouting compares the arguments of routers. Softmax before top-k keeps the probabilities;
// softmax after top-k divides them by their sum, as norm_topk_prob does.
func checkRouting(args *pickle.Object, c moe.Config) error {
	if c.Experts == 0 {
		return nil
	}
	if v, _ := args.Attribute("moe_router_score_function"); v != nil && v != "softmax" {
		return fmt.Errorf("args.moe_router_score_function is %v, but a %s model has softmax", v, c.Architecture)
	}
	if v, _ := args.Attribute("moe_router_topk_scaling_factor"); v != nil && v != 1.0 && v != int64(1) {
		return fmt.Errorf("args.moe_router_topk_scaling_factor is %v, but a %s model has no such factor", v,
			c.Architecture)
	}
	if v, _ := args.Attribute("moe_router_load_balancing_type"); v == "sinkhorn" {
		return fmt.Errorf("args.moe_router_load_balancing_type is sinkhorn, which chooses other experts than a %s "+
			"model", c.Architecture)
	}
	v, ok := args.Attribute("moe_router_pre_softmax")
	if pre, isBool := v.(bool); ok && isBool && pre == c.NormTopK {
		return fmt.Errorf("args.moe_router_pre_softmax is %v, but norm_topk_prob of config.json is %v; use the "+
			"config.json of this model", pre, c.NormTopK)
	}
	return nil
}
