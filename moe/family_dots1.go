package moe

// dots1 is dots.llm1 (https://arxiv.org/abs/2506.05767): the attention of Qwen 3, and the router
// and the shared experts of DeepSeek-V3. transformers scores with sigmoids, with any scoring_func.
var dots1 = family{
	class: "Dots1ForCausalLM", experts: true, rms: true, qkNorm: normOfHeads, scaling: true, headDim: true,
	windows: lastLayers, window: 4096, maxWindowLayers: 62,
	shared:      sharedParts{number: "n_shared_experts"},
	router:      routerParts{sigmoid: true, bias: true, groups: sumOfTwo, scaled: true},
	expertWidth: "moe_intermediate_size", expertCount: "n_routed_experts", dense: firstLayers,
	groups: 1, topGroups: 1, noAuxCoef: true,
	maxPositions: 2048, kvHeads: 32, normEps: 1e-6,
	padTokenID: NoToken, bosTokenID: NoToken, eosTokenID: NoToken,
	fixed: map[string]string{"pretraining_tp": `[null, 1]`, "scoring_func": `["noaux_tc", "sigmoid"]`,
		"moe_layer_freq": `[1]`},
	ignored: []string{"use_sliding_window"}, // in its files; transformers does not use it
}
