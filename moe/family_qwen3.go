package moe

// qwen3 is the dense Qwen 3 (https://arxiv.org/abs/2505.09388).
var qwen3 = family{
	class: "Qwen3ForCausalLM", rms: true, qkNorm: normOfHeads, scaling: true, headDim: true,
	upcycled:     Qwen3MoE,
	maxPositions: 32768, kvHeads: 32, headSize: 128, normEps: 1e-6,
	padTokenID: NoToken, bosTokenID: NoToken, eosTokenID: NoToken,
	windows: lastLayers, windowSwitch: true, window: 4096,
}
