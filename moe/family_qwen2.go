package moe

// qwen2 is Qwen 2 and 2.5 (https://arxiv.org/abs/2407.10671).
var qwen2 = family{
	class: "Qwen2ForCausalLM", rms: true, qkvBias: true, scaling: true, headDim: true,
	maxPositions: 32768, kvHeads: 32, normEps: 1e-6, padTokenID: NoToken, bosTokenID: NoToken, eosTokenID: NoToken,
	windows: lastLayers, windowSwitch: true, window: 4096,
}
