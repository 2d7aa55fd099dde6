package moe

// flexOLMo is FlexOlmo (https://arxiv.org/abs/2507.07024): a mixture of experts, otherwise as OLMo
// 2.
var flexOLMo = family{
	class: "FlexOlmoForCausalLM", experts: true, rms: true, postNorm: true, qkNorm: normOfTokens, scaling: true,
	headDim: true, maxPositions: 4096, normEps: 1e-6, auxCoef: 0.01, ropeTheta: 500000,
	padTokenID: 100277, bosTokenID: NoToken, eosTokenID: 100257,
}
