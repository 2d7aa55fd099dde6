package moe

// olmo3 is OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with sliding windows.
var olmo3 = family{
	class: "Olmo3ForCausalLM", rms: true, postNorm: true, qkNorm: normOfTokens, scaling: true, headDim: true,
	windows: threeOfFour, window: 4096, windowsUnscaled: true,
	maxPositions: 2048, normEps: 1e-5, ropeTheta: 500000, padTokenID: 1, bosTokenID: NoToken, eosTokenID: 50279,
}
