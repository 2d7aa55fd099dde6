package moe

// deepSeekV3 is DeepSeek-V3 (https://arxiv.org/abs/2412.19437), and models of the same structure,
// such as Moonlight and Kimi K2.
var deepSeekV3 = family{
	class: "DeepseekV3ForCausalLM", experts: true, rms: true, scaling: true, latent: true, noAuxCoef: true,
	shared:      sharedParts{number: "n_shared_experts"},
	router:      routerParts{sigmoid: true, bias: true, groups: sumOfTwo, scaled: true},
	expertWidth: "moe_intermediate_size", expertCount: "n_routed_experts", dense: firstLayers, firstDense: 3,
	normTopK: true, groups: 8, topGroups: 4, routingScale: 2.5, interleaveField: true,
	maxPositions: 4096, kvHeads: 128, normEps: 1e-6, padTokenID: NoToken, bosTokenID: 0, eosTokenID: 1,
	predictionLayers: "num_nextn_predict_layers",
	fixed: map[string]string{"pretraining_tp": `[null, 1]`, "scoring_func": `["sigmoid"]`,
		"topk_method": `["noaux_tc"]`, "moe_layer_freq": `[1]`, "ep_size": `[1]`},
	ignored: deepSeekIgnored,
}

// deepSeekIgnored are fields of DeepSeek's files. auto_map names code for the same model that
// transformers does not use. The others are settings of the load-balancing loss.
var deepSeekIgnored = []string{"aux_loss_alpha", "router_aux_loss_coef", "seq_aux", "auto_map"}
