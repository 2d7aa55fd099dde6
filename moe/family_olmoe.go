package moe

// olmoe is OLMoE (https://arxiv.org/abs/2409.02060), and the mixtures of experts of the Mula paper.
var olmoe = family{
	class: "OlmoeForCausalLM", experts: true, rms: true, qkNorm: normOfTokens, clip: true,
	maxPositions: 4096, normEps: 1e-5, padTokenID: 1, bosTokenID: NoToken, eosTokenID: 50279,
	auxCoef: 0.01,
}
