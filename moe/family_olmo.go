package moe

// olmo is the first OLMo (https://arxiv.org/abs/2402.00838).
var olmo = family{
	class: "OlmoForCausalLM", clip: true,
	maxPositions: 2048, normEps: 1e-5, padTokenID: 1, bosTokenID: NoToken, eosTokenID: 50279,
}
