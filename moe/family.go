package moe

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"mula/xpu"
)

// A family describes the models of one architecture: their parts, and their config.json.
// family_NAME.go has one each.
type family struct {
	class string // of transformers

	experts   bool   // a mixture of experts; otherwise a dense feed-forward network
	rms       bool   // RMSNorm with weights; otherwise LayerNorm without weights
	qkNorm    qkNorm // RMSNorm of queries and keys
	qkvBias   bool   // projections to queries, keys and values have biases
	outBias   bool   // the output projection of the attention has a bias, too
	sinks     bool   // heads of queries have sinks; see [xpu.Layers.AddSinks]
	biasField bool   // all projections of the attention have biases only with attention_bias
	// biases of queries, keys and values only with attention_bias, and norms of queries and keys
	// only with use_qk_norm
	attentionFields bool
	clip            bool // has the field clip_qkv
	scaling         bool // frequencies of the rotary embedding may be scaled; see [RopeScaling]
	headDim         bool // heads may have another size than hidden_size / num_attention_heads

	interleaved bool // elements 2j and 2j+1 of a head are rotated together; see latent.go for latent attention

	multipliers bool // see multipliers.go

	// rope_scaling if neither it nor rope_parameters is in the file. null is then refused, because
	// releases of transformers read it differently.
	ropeScaling RopeScaling

	rotaryPart float64 // partial_rotary_factor if it is missing; 0: heads are rotated completely

	windows         windowKind // layers with a sliding window
	windowSwitch    bool       // windows need use_sliding_window
	maxWindowLayers int        // max_window_layers if it is missing, with lastLayers; 0: 28
	windowsUnscaled bool       // in layers with a window, the rotary embedding is not scaled

	postNorm bool // norms are after attention and feed-forward instead of before them; with rms

	latent          bool // multi-head latent attention; see latent.go
	interleaveField bool // has the field rope_interleave; other latent attention is always interleaved
	router          routerParts
	expertBias      bool      // gate, up and down projections of experts have biases
	clamp           xpu.Clamp // experts have a clamped SwiGLU; zero: SwiGLU
	transposed      bool      // files have the experts in the form of transposed.go

	noAuxCoef   bool // without the field router_aux_loss_coef
	jitterField bool // has the field router_jitter_noise
	shared      sharedParts
	expertWidth string // field of the width of an expert; "": intermediate_size
	expertCount string // field of the number of experts; "": num_experts
	// num_local_experts is not another name of the number of experts in transformers 5
	oneExpertCount  bool
	expertsPerToken string     // field of the number of experts of a token; "": num_experts_per_tok
	renormalized    bool       // routing weights are always renormalised, without norm_topk_prob
	block           blockNames // zero: mlpNames
	// names in files, and in the memory of transformers 5, of the tensors of a layer with experts;
	// zero: files have the tensors of [Config.Tensors], and the memory has memoryNames
	files, memory fusedNames

	dense      denseKind // layers without experts
	firstDense int       // first_k_dense_replace if it is missing, with firstLayers

	// The family of a mixture of experts with the same attention and norms; see [Upcycling]. "":
	// none.
	upcycled Architecture

	// Field of the number of layers of multi-token prediction; "": none. Files have them behind the
	// last layer, or under names that start with predictionTensors. See predictions.go.
	predictionLayers, predictionTensors string

	// The values of transformers for fields that are missing in config.json. Sizes are not among
	// them: a config.json without sizes is an error, because the defaults of the classes surprise
	// (intermediate_size is 2048 in OlmoeConfig and 1024 in OLMoE itself).
	maxPositions                       int
	kvHeads                            int // 0: as many as heads
	headSize                           int // 0: hidden_size / num_attention_heads
	window                             int // sliding_window
	normEps, auxCoef                   float64
	ropeTheta                          float64 // 0: 10000
	padTokenID, bosTokenID, eosTokenID int
	normTopK, tied                     bool // norm_topk_prob, tie_word_embeddings
	groups, topGroups                  int
	routingScale                       float64

	// Fields that only this family has, and the only values that are supported, as in hfFixed.
	fixed map[string]string

	// Fields without an effect in this family, besides hfIgnored.
	ignored []string
}

var families = map[Architecture]*family{OLMoE: &olmoe, OLMo: &olmo, Llama: &llama, Mistral: &mistral,
	Qwen2: &qwen2, Qwen3: &qwen3, Qwen3MoE: &qwen3MoE, Mixtral: &mixtral, OLMo2: &olmo2, OLMo3: &olmo3,
	FlexOLMo: &flexOLMo, DeepSeekV2: &deepSeekV2, DeepSeekV3: &deepSeekV3, Qwen2MoE: &qwen2MoE,
	Dots1: &dots1, GLM4MoE: &glm4MoE, Ernie45MoE: &ernie45MoE,
	GraniteMoE: &graniteMoE, GPTOSS: &gptOSS}

// refused are the reasons why mula does not have a family, as sentences after "because". Other
// families are refused without a reason.
var refused = map[Architecture]string{
	// docs/decisions/0030-no-phimoe.md
	"phimoe": "its routers choose experts at random in training",
}

// blockNames are the names in files of a layer's feed-forward block, of the projections of a dense
// network or of an expert, and of a router.
type blockNames struct{ block, gate, up, down, router string }

var mlpNames = blockNames{"mlp", "gate_proj", "up_proj", "down_proj", "gate"}

func (f *family) blockNames() blockNames { return cmp.Or(f.block, mlpNames) }

// network returns the names of gate, up and down of a dense network or of an expert, whose place in
// the model is prefix.
func (n blockNames) network(prefix string) (gate, up, down string) {
	return prefix + n.gate + ".weight", prefix + n.up + ".weight", prefix + n.down + ".weight"
}

// biases returns the names of the biases of gate, up and down.
func (n blockNames) biases(prefix string) (gate, up, down string) {
	return prefix + n.gate + ".bias", prefix + n.up + ".bias", prefix + n.down + ".bias"
}

// expert returns the place of an expert of a layer.
func (n blockNames) expert(layer string, e int) string {
	return fmt.Sprintf("%s%s.experts.%d.", layer, n.block, e)
}

// A qkNorm is the RMSNorm of queries and keys after their projection.
type qkNorm int

const (
	noQKNorm     qkNorm = iota
	normOfTokens        // of all queries of a token, and of all its keys
	normOfHeads         // of each head, with the same weights for all heads of queries, or of keys
)

// qkNormWidths returns the number of weights of the norms of queries, and of keys.
func (c Config) qkNormWidths() (q, k int) {
	switch f := c.family(); {
	case f.qkNorm == noQKNorm, f.attentionFields && !c.QKNorm:
		return 0, 0
	case f.qkNorm == normOfTokens:
		return c.QueryWidth(), c.KVWidth()
	}
	return c.HeadDim(), c.HeadDim()
}

// HasWideNorms reports whether queries and keys have norms over all heads of a token.
func (c Config) HasWideNorms() bool { return c.family().qkNorm == normOfTokens }

// hasQKVBias reports whether the projections to queries, keys and values have biases.
func (c Config) hasQKVBias() bool { return c.family().qkvBias || c.AttentionBias }

// hasOutBias reports whether the output projection of the attention has a bias.
func (c Config) hasOutBias() bool {
	return c.family().outBias || c.family().biasField && c.AttentionBias
}

// validateAttention returns an error if fields of the attention do not fit the family.
func (c Config) validateAttention(bad func(field, format string, args ...any) error) error {
	f := c.family()
	switch {
	case c.AttentionBias && !f.attentionFields && !f.biasField:
		return bad("attention_bias", "is true; it must be false, because a %s model has no such field", c.Architecture)
	case c.QKNorm && !f.attentionFields:
		return bad("use_qk_norm", "is true; it must be false, because a %s model has no such field", c.Architecture)
	case c.RotaryPart != 0 && f.rotaryPart == 0:
		return bad("partial_rotary_factor", "is %g; it must be 0, because a %s model rotates complete heads",
			c.RotaryPart, c.Architecture)
	case !(c.RotaryPart >= 0 && c.RotaryPart < 1):
		return bad("partial_rotary_factor", "is %g; it must be above 0 and below 1, or 0 for complete heads",
			c.RotaryPart)
	case c.ropeSize() < 2 || c.ropeSize()%2 != 0:
		return bad("partial_rotary_factor", "is %g, and rotates %d of %d elements of a head; rotary embedding needs "+
			"an even number", c.RotaryPart, c.ropeSize(), c.HeadDim())
	}
	return nil
}

// architectures lists the architectures that this package builds, sorted by name.
func architectures() []Architecture { return slices.Sorted(maps.Keys(families)) }

// family returns the family of a configuration. An unknown architecture has no parts.
func (c Config) family() *family {
	if f := families[c.Architecture]; f != nil {
		return f
	}
	return &family{}
}

// normNames returns the names of a layer's norms, of its attention and of its feed-forward block.
func (f *family) normNames() (attention, feedForward string) {
	if f.postNorm {
		return "post_attention_layernorm.weight", "post_feedforward_layernorm.weight"
	}
	return "input_layernorm.weight", "post_attention_layernorm.weight"
}

// NormWeights returns the number of weights of a norm of the residual stream: HiddenSize, or 0.
func (c Config) NormWeights() int {
	if c.family().rms {
		return c.HiddenSize
	}
	return 0
}

// Dense reports whether the model has no experts.
func (c Config) Dense() bool { return !c.moe() }
