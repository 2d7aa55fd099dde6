package moe

// deepSeekV2 is DeepSeek-V2 (https://arxiv.org/abs/2405.04434). transformers does not renormalise
// its routing weights, with any norm_topk_prob.
var deepSeekV2 = family{
	class: "DeepseekV2ForCausalLM", experts: true, rms: true, scaling: true, latent: true, noAuxCoef: true,
	shared:      sharedParts{number: "n_shared_experts"},
	router:      routerParts{groups: largest, scaled: true},
	expertWidth: "moe_intermediate_size", expertCount: "n_routed_experts", oneExpertCount: true, dense: firstLayers,
	maxPositions: 2048, normEps: 1e-6, padTokenID: NoToken, bosTokenID: 1, eosTokenID: 2,
	fixed: map[string]string{"norm_topk_prob": `[null, false]`, "mlp_bias": `[false]`, "pretraining_tp": `[null, 1]`,
		"scoring_func": `["softmax"]`, "moe_layer_freq": `[1]`, "ep_size": `[1]`},
	ignored: deepSeekIgnored,
}
