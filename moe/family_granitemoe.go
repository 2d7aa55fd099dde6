package moe

// graniteMoE is the mixture of experts of Granite 3 and PowerMoE
// (https://arxiv.org/abs/2408.13359): Mixtral without windows, with multipliers, and with fused
// experts in files. transformers 4 ignores head_dim.
var graniteMoE = family{
	class: "GraniteMoeForCausalLM", experts: true, rms: true, scaling: true, multipliers: true, biasField: true,
	expertCount: "num_local_experts", renormalized: true,
	block: blockNames{"block_sparse_moe", "gate_proj", "up_proj", "down_proj", "gate"},
	files: fusedNames{"block_sparse_moe.router.layer.weight", "block_sparse_moe.input_linear.weight",
		"block_sparse_moe.output_linear.weight"},
	memory: fusedNames{"block_sparse_moe.router.weight", "block_sparse_moe.experts.gate_up_proj",
		"block_sparse_moe.experts.down_proj"},
	maxPositions: 2048, normEps: 1e-6, auxCoef: 0.001,
	padTokenID: NoToken, bosTokenID: 1, eosTokenID: 2,
	fixed: map[string]string{"position_embedding_type": `["rope"]`}, // transformers 4 rotates nothing otherwise
}
