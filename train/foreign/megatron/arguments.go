package megatron

import (
	"fmt"

	"mula/internal/pickle"
	"mula/moe"
)

// checkArguments compares the arguments of Megatron-LM's run with the configuration. Arguments that
// the checkpoint does not have are not compared.
func (m *model) checkArguments(args *pickle.Object) error {
	c := m.config
	group := c.KVHeads
	if v, _ := args.Attribute("group_query_attention"); v == false {
		group = c.Heads
	}
	var factor any
	if c.RopeScaling.Type == "llama3" {
		factor = c.RopeScaling.Factor
	}
	topk, experts := any(int64(c.ExpertsPerToken)), any(int64(c.Experts))
	if c.Experts == 0 {
		topk, experts = nil, nil
	}
	for _, a := range []struct {
		name  string
		want  any // int64, float64, bool or string; nil: not compared
		field string
	}{
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
	} {
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
	if v, ok := args.Attribute("window_size"); ok && (v != nil) != (c.SlidingWindow > 0) {
		return fmt.Errorf("args.window_size is %v, but sliding_window of config.json is %d; use the config.json of "+
			"this model", v, c.SlidingWindow)
	}
	return checkRouting(args, c)
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
	v, ok := args.Attribute("moe_router_pre_softmax")
	if pre, isBool := v.(bool); ok && isBool && pre == c.NormTopK {
		return fmt.Errorf("args.moe_router_pre_softmax is %v, but norm_topk_prob of config.json is %v; use the "+
			"config.json of this model", pre, c.NormTopK)
	}
	return nil
}
