package moe

// glm4MoE is GLM-4.5 (https://arxiv.org/abs/2508.06471): a part of each head is rotated, and biases
// and norms of queries and keys are options. Router, shared experts and leading dense layers are as
// in DeepSeek-V3.
var glm4MoE = family{
	class: "Glm4MoeForCausalLM", experts: true, rms: true, qkNorm: normOfHeads, attentionFields: true,
	scaling: true, headDim: true, rotaryPart: 0.5,
	shared:      sharedParts{number: "n_shared_experts"},
	router:      routerParts{sigmoid: true, bias: true, groups: sumOfTwo, scaled: true},
	expertWidth: "moe_intermediate_size", expertCount: "n_routed_experts", dense: firstLayers, firstDense: 1,
	normTopK: true, groups: 1, topGroups: 1, noAuxCoef: true,
	maxPositions: 131072, kvHeads: 8, normEps: 1e-5,
	padTokenID: NoToken, bosTokenID: NoToken, eosTokenID: NoToken,
	predictionLayers: "num_nextn_predict_layers",
}
