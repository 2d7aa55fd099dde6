package moe

import "mula/xpu"

// clampLimit and clampAlpha are swiglu_limit and swiglu_alpha of transformers 5. In transformers 4
// they are constants.
const clampLimit, clampAlpha = 7, 1.702

// gptOSS is gpt-oss (https://arxiv.org/abs/2508.10925). Layers 0, 2, and so on have a window. A
// router is a softmax over the logits of the chosen experts, which is a softmax over all logits
// whose chosen probabilities are renormalised. See sinks.go for the attention, feedforward.go for
// the experts, and transposed.go for their tensors.
var gptOSS = family{
	class: "GptOssForCausalLM", experts: true, rms: true, qkvBias: true, outBias: true, sinks: true, scaling: true,
	ropeScaling: RopeScaling{Type: "yarn", Factor: 32, OriginalMaxPositions: 4096, BetaFast: 32, BetaSlow: 1,
		NoTruncate: true},
	headDim: true, headSize: 64, windows: everySecond, window: 128, expertCount: "num_local_experts",
	renormalized: true, router: routerParts{outBias: true},
	expertBias: true, clamp: xpu.Clamp{Limit: clampLimit, Alpha: clampAlpha}, transposed: true,
	block:        blockNames{"mlp", "gate_proj", "up_proj", "down_proj", "router"},
	memory:       fusedNames{router: "mlp.router.weight"},
	maxPositions: 131072, kvHeads: 8, normEps: 1e-5, auxCoef: 0.001, ropeTheta: 150000,
	padTokenID: NoToken, bosTokenID: NoToken, eosTokenID: NoToken,
	fixed: map[string]string{"attention_bias": `[true]`, "swiglu_limit": `[7]`, "swiglu_alpha": `[1.702]`},
	// in its files; transformers does not use them
	ignored: []string{"experts_per_token", "initial_context_length"},
}
