package moe

// mistral is Mistral (https://arxiv.org/abs/2310.06825). Before version 0.2, Mistral 7B has sliding
// windows. The heads of Mistral NeMo are smaller than hidden_size / num_attention_heads.
var mistral = family{
	class: "MistralForCausalLM", rms: true, scaling: true, headDim: true,
	upcycled:     Mixtral,
	maxPositions: 4096 * 32, kvHeads: 8, normEps: 1e-6, padTokenID: NoToken, bosTokenID: 1, eosTokenID: 2,
	windows: allLayers, window: 4096,
}
