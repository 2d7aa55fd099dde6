package moe

// mixtral is Mixtral (https://arxiv.org/abs/2401.04088).
var mixtral = family{
	class: "MixtralForCausalLM", experts: true, rms: true, scaling: true, headDim: true,
	windows: allLayers, expertCount: "num_local_experts", renormalized: true,
	block:        blockNames{"block_sparse_moe", "w1", "w3", "w2", "gate"},
	maxPositions: 4096 * 32, kvHeads: 8, normEps: 1e-5, auxCoef: 0.001, ropeTheta: 1e6,
	padTokenID: NoToken, bosTokenID: 1, eosTokenID: 2,
	jitterField: true,
}
