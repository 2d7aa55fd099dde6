package moe

// qwen2MoE is the mixture of experts of Qwen 1.5 and Qwen 2 (https://arxiv.org/abs/2407.10671). The
// releases of transformers have windows in different layers of it, so that windows are refused.
var qwen2MoE = family{
	class: "Qwen2MoeForCausalLM", experts: true, rms: true, qkvBias: true, scaling: true,
	shared:      sharedParts{width: "shared_expert_intermediate_size"},
	expertWidth: "moe_intermediate_size", oneExpertCount: true,
	maxPositions: 32768, kvHeads: 16, normEps: 1e-6, auxCoef: 0.001,
	padTokenID: NoToken, bosTokenID: NoToken, eosTokenID: NoToken,
	dense:   sparseSteps,
	fixed:   map[string]string{"use_sliding_window": `[false]`, "qkv_bias": `[true]`},
	ignored: []string{"sliding_window", "max_window_layers"}, // without use_sliding_window
}
