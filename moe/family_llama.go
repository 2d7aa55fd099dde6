package moe

// llama is Llama (https://arxiv.org/abs/2302.13971), and models of the same structure, such as
// AuroraGPT. Llama 3 has a scaled rotary embedding.
var llama = family{
	class: "LlamaForCausalLM", rms: true, scaling: true, headDim: true,
	upcycled:     Mixtral,
	maxPositions: 2048, normEps: 1e-6, padTokenID: NoToken, bosTokenID: 1, eosTokenID: 2,
	// pretraining_tp divides products in transformers 4, which changes no more than their last
	// bits.
	fixed: map[string]string{"mlp_bias": `[false]`, "pretraining_tp": `[null, 1]`},
}
