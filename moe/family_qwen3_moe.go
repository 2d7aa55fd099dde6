package moe

// qwen3MoE is the mixture of experts of Qwen 3 (https://arxiv.org/abs/2505.09388).
var qwen3MoE = family{
	class: "Qwen3MoeForCausalLM", experts: true, rms: true, qkNorm: normOfHeads, scaling: true, headDim: true,
	expertWidth:  "moe_intermediate_size",
	maxPositions: 32768, kvHeads: 4, normEps: 1e-6, auxCoef: 0.001,
	padTokenID: NoToken, bosTokenID: NoToken, eosTokenID: NoToken,
	windows: allLayers, windowSwitch: true, window: 4096,
	dense:   sparseSteps,
	ignored: []string{"max_window_layers"}, // transformers does not use it
}
