package moe

// olmo2 is OLMo 2 (https://arxiv.org/abs/2501.00656).
var olmo2 = family{
	class: "Olmo2ForCausalLM", rms: true, postNorm: true, qkNorm: normOfTokens, headDim: true,
	upcycled:     FlexOLMo,
	maxPositions: 2048, normEps: 1e-5, padTokenID: 1, bosTokenID: NoToken, eosTokenID: 50279,
}
