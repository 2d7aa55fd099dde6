package moe

// ernie45MoE is ERNIE 4.5 (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf).
// Routers are softmax routers with correction biases, and their weights are float32 in files of
// every type. With use_bias, the releases of transformers have different biases of experts, so it
// is refused.
var ernie45MoE = family{
	class: "Ernie4_5_MoeForCausalLM", experts: true, rms: true, scaling: true, headDim: true, interleaved: true,
	shared: sharedParts{number: "moe_num_shared_experts", optional: true},
	router: routerParts{bias: true, statics: true, float32: true, leastSum: 1e-12},
	dense:  layerRange, expertWidth: "moe_intermediate_size", expertCount: "moe_num_experts",
	oneExpertCount: true, expertsPerToken: "moe_k", renormalized: true,
	maxPositions: 131072, kvHeads: 4, normEps: 1e-5, auxCoef: 0.001, ropeTheta: 500000, tied: true,
	padTokenID: 0, bosTokenID: 1, eosTokenID: 2,
	predictionLayers: "num_nextn_predict_layers", predictionTensors: "model.mtp_",
	fixed: map[string]string{"use_bias": `[null, false]`, "moe_norm_min": `[1e-12]`},
	// in its files; transformers does not use them
	ignored: []string{"moe_capacity", "moe_gate", "moe_use_aux_free"},
}
