package moe

import (
	"fmt"
	"math"
)

// Architecture names a model family, as model_type does in a Hugging Face config.json.
type Architecture string

// The architectures this package builds.
const (
	OLMoE   Architecture = "olmoe"   // mixture of experts, RMSNorm, q/k norm
	OLMo    Architecture = "olmo"    // dense, LayerNorm without weights
	OLMo2   Architecture = "olmo2"   // dense, RMSNorm after attention and feed-forward, q/k norm
	OLMo3   Architecture = "olmo3"   // OLMo2 with sliding windows
	Llama   Architecture = "llama"   // dense, RMSNorm
	Mistral Architecture = "mistral" // dense, RMSNorm
	Qwen2   Architecture = "qwen2"   // dense, RMSNorm, biases of q, k and v
	Qwen3   Architecture = "qwen3"   // dense, RMSNorm, q/k norm of each head

	Qwen2MoE Architecture = "qwen2_moe" // mixture of experts, shared expert with a gate, otherwise as Qwen2
	Qwen3MoE Architecture = "qwen3_moe" // mixture of experts, otherwise as Qwen3
	Mixtral  Architecture = "mixtral"   // mixture of experts, otherwise as Mistral
	FlexOLMo Architecture = "flex_olmo" // mixture of experts, otherwise as OLMo2

	DeepSeekV2 Architecture = "deepseek_v2" // mixture of experts, latent attention
	DeepSeekV3 Architecture = "deepseek_v3" // the same, with sigmoid routers and correction biases
	Dots1      Architecture = "dots1"       // the attention of Qwen3, otherwise as DeepSeekV3
	GLM4MoE    Architecture = "glm4_moe"    // a part of each head is rotated, otherwise as Dots1

	// mixture of experts, interleaved rotation, softmax routers with correction biases
	Ernie45MoE Architecture = "ernie4_5_moe"

	GraniteMoE Architecture = "granitemoe" // mixture of experts with multipliers, otherwise as Mixtral

	// mixture of experts, attention with sinks, biases of all projections but the head, clamped
	// SwiGLU
	GPTOSS Architecture = "gpt_oss"
)

// NoToken is the value of a token id of [Config] that is not set.
const NoToken = -1

// Config describes a model. Its YAML field names are the field names of a Hugging Face config.json.
// Start from a [Preset], or from a Config whose token ids are [NoToken]; the zero Config is not
// valid.
type Config struct {
	Architecture     Architecture `yaml:"model_type"`
	VocabSize        int          `yaml:"vocab_size"`
	HiddenSize       int          `yaml:"hidden_size"`
	IntermediateSize int          `yaml:"intermediate_size"` // width of one expert, or of a dense model's network
	Layers           int          `yaml:"num_hidden_layers"`
	Heads            int          `yaml:"num_attention_heads"`
	// divides Heads; equal to Heads without grouped-query attention
	KVHeads         int `yaml:"num_key_value_heads"`
	HeadSize        int `yaml:"head_dim,omitempty"`  // 0: HiddenSize/Heads; see [Config.HeadDim]
	Experts         int `yaml:"num_experts"`         // 0 for a dense model
	ExpertsPerToken int `yaml:"num_experts_per_tok"` // 0 for a dense model
	// the layers without experts of a model with experts, and the width of their networks
	DenseLayers LayerSet `yaml:"dense_layers,omitempty"`
	DenseSize   int      `yaml:"dense_intermediate_size,omitempty"`
	NormTopK    bool     `yaml:"norm_topk_prob,omitempty"` // routing weights are divided by a token's sum
	// width of the network of shared experts of a layer with experts; 0: none
	SharedSize int `yaml:"shared_expert_intermediate_size,omitempty"`
	// the experts of a token are in the best TopGroups of Groups groups of experts; 0: in any
	Groups       int     `yaml:"n_group,omitempty"`
	TopGroups    int     `yaml:"topk_group,omitempty"`
	RoutingScale float64 `yaml:"routed_scaling_factor,omitempty"` // of routing weights; 0 means 1
	// in training, the inputs of layers with experts have noise; see jitter.go. Only [Mixtral] has
	// it in config.json
	RouterJitter float64 `yaml:"router_jitter_noise,omitempty"`
	// in training, limits the tokens of a sequence that an expert computes; 0: no limit; see
	// capacity.go. config.json never has it
	ExpertCapacity float64 `yaml:"expert_capacity_factor,omitempty"`
	// latent attention; see latent.go
	QueryRank      int  `yaml:"q_lora_rank,omitempty"` // 0: queries without latent
	KVRank         int  `yaml:"kv_lora_rank,omitempty"`
	PlainSize      int  `yaml:"qk_nope_head_dim,omitempty"` // elements of a head of queries and keys without rotation
	RotatedSize    int  `yaml:"qk_rope_head_dim,omitempty"` // elements with rotation
	ValueSize      int  `yaml:"v_head_dim,omitempty"`       // elements of a head of values
	RopeInterleave bool `yaml:"rope_interleave,omitempty"`  // elements 2j and 2j+1 are rotated together
	// [GLM4MoE]: projections to queries, keys and values have biases; each head of queries and keys
	// has a norm; this part of a head is rotated, 0 means complete heads. In [GraniteMoE], the
	// output projection of the attention has a bias, too
	AttentionBias bool    `yaml:"attention_bias,omitempty"`
	QKNorm        bool    `yaml:"use_qk_norm,omitempty"`
	RotaryPart    float64 `yaml:"partial_rotary_factor,omitempty"`
	// [GraniteMoE]; see multipliers.go. 0 means 1, and of scores the inverse root of a head's size
	EmbeddingMultiplier float64 `yaml:"embedding_multiplier,omitempty"`
	AttentionMultiplier float64 `yaml:"attention_multiplier,omitempty"` // of scores
	ResidualMultiplier  float64 `yaml:"residual_multiplier,omitempty"`  // of the outputs of blocks
	LogitsScaling       float64 `yaml:"logits_scaling,omitempty"`       // a divisor

	MaxPositions int         `yaml:"max_position_embeddings"`
	RopeTheta    float64     `yaml:"rope_theta"`
	RopeScaling  RopeScaling `yaml:"rope_scaling,omitempty"` // not for [OLMoE], [OLMo] and [OLMo2]
	// 0: no windows; otherwise a query attends to this number of positions, its own included, in
	// the layers that the family's windowKind names
	SlidingWindow   int     `yaml:"sliding_window,omitempty"`
	MaxWindowLayers int     `yaml:"max_window_layers,omitempty"` // [Qwen2], [Qwen3], [Dots1]: the first layers have no window
	NormEps         float64 `yaml:"rms_norm_eps"`                // fixed at 1e-5 for [OLMo]
	ClipQKV         float64 `yaml:"clip_qkv"`                    // q, k and v are clipped to ±ClipQKV; 0 = not clipped
	TieEmbeddings   bool    `yaml:"tie_word_embeddings"`
	// layers of multi-token prediction that training computes, after the other layers; see
	// predict.go. [ReadConfig] leaves it 0, also if the files have such layers
	PredictionLayers int `yaml:"num_nextn_predict_layers,omitempty"`

	// PadTokenID is padding_idx of PyTorch's Embedding: its embedding is initialized to zero and
	// gets no gradient.
	PadTokenID int `yaml:"pad_token_id"`
	BOSTokenID int `yaml:"bos_token_id"`
	EOSTokenID int `yaml:"eos_token_id"`

	// RouterAuxLossCoef is only read from and written to config.json; a training step takes its
	// coefficients from [LossOptions].
	RouterAuxLossCoef float64 `yaml:"router_aux_loss_coef"`

	InitStd float64 `yaml:"initializer_range"`
	// weights beyond this many InitStd are redrawn (OLMoE: 3); 0 = plain normal (Mula)
	InitCutoff float64 `yaml:"initializer_cutoff"`
}

// Upper bounds of sizes in a Config. They are far above any current model. They keep every product
// of sizes within an int64, so that a config.json with absurd numbers causes an error.
const (
	maxWidth   = 1 << 18
	maxVocab   = 1 << 24
	maxLayers  = 1 << 10
	maxExperts = 1 << 12
)

// A FieldError describes an invalid field of a [Config] by its name in config.json.
type FieldError struct {
	Field   string
	Problem string // reads as a sentence after the field name
}

func (e *FieldError) Error() string { return e.Field + " " + e.Problem }

// Validate returns a [FieldError] for the first invalid field of c, or nil.
func (c Config) Validate() error {
	bad := func(field, format string, args ...any) error {
		return &FieldError{field, fmt.Sprintf(format, args...)}
	}
	f, known := families[c.Architecture]
	if !known {
		return bad("model_type", "is %q; it must be one of %q", c.Architecture, architectures())
	}
	for _, s := range []struct {
		field    string
		v, limit int
	}{
		{"vocab_size", c.VocabSize, maxVocab},
		{"hidden_size", c.HiddenSize, maxWidth},
		{"intermediate_size", c.IntermediateSize, maxWidth},
		{"num_hidden_layers", c.Layers, maxLayers},
		{"num_attention_heads", c.Heads, maxWidth},
		{"num_key_value_heads", c.KVHeads, maxWidth},
		{"max_position_embeddings", c.MaxPositions, 1 << 30},
	} {
		if s.v < 1 || s.v > s.limit {
			return bad(s.field, "is %d; it must be between 1 and %d", s.v, s.limit)
		}
	}
	switch {
	case c.HeadSize == 0 && c.HiddenSize%c.Heads != 0 && !f.latent:
		return bad("hidden_size", "%d is not a multiple of num_attention_heads %d", c.HiddenSize, c.Heads)
	case c.HeadSize < 0 || c.HeadSize > maxWidth/c.Heads:
		return bad("head_dim", "is %d; it must be between 1 and %d, or 0 for hidden_size / num_attention_heads",
			c.HeadSize, maxWidth/c.Heads)
	case c.HeadSize%2 != 0:
		return bad("head_dim", "is %d; rotary embedding needs an even head size", c.HeadSize)
	case c.HeadDim()*c.Heads != c.HiddenSize && !f.headDim && !f.latent:
		return bad("head_dim", "is %d; a %s model supports only hidden_size / num_attention_heads = %d", c.HeadSize,
			c.Architecture, c.HiddenSize/c.Heads)
	}
	if c.HeadDim()%2 != 0 {
		return bad("hidden_size", "%d / num_attention_heads %d = %d is odd; rotary embedding needs an even head size",
			c.HiddenSize, c.Heads, c.HeadDim())
	}
	if c.Heads%c.KVHeads != 0 {
		return bad("num_key_value_heads", "%d does not divide num_attention_heads %d", c.KVHeads, c.Heads)
	}
	if f.experts {
		if c.Experts < 1 || c.Experts > maxExperts {
			return bad("num_experts", "is %d; it must be between 1 and %d", c.Experts, maxExperts)
		}
		if c.ExpertsPerToken < 1 || c.ExpertsPerToken > c.Experts {
			return bad("num_experts_per_tok", "is %d; it must be between 1 and num_experts %d", c.ExpertsPerToken,
				c.Experts)
		}
		if f.renormalized && !c.NormTopK {
			return bad("norm_topk_prob", "is false; it must be true, because a %s model always renormalises routing "+
				"weights", c.Architecture)
		}
	} else if c.NormTopK {
		return bad("norm_topk_prob", "is true; a dense model has no routing weights")
	} else if c.Experts != 0 || c.ExpertsPerToken != 0 {
		return bad("num_experts", "is %d and num_experts_per_tok %d; the dense architecture has none (0)",
			c.Experts, c.ExpertsPerToken)
	}
	if err := c.validateLatent(bad); err != nil {
		return err
	}
	if err := c.validateAttention(bad); err != nil {
		return err
	}
	if err := c.validateMultipliers(bad); err != nil {
		return err
	}
	if err := c.validateShared(bad); err != nil {
		return err
	}
	if err := c.validateRouter(bad); err != nil {
		return err
	}
	if err := c.validateDense(bad); err != nil {
		return err
	}
	if err := c.validatePredictions(bad); err != nil {
		return err
	}
	if err := c.validateCapacity(bad); err != nil {
		return err
	}
	if err := c.validateJitter(bad); err != nil {
		return err
	}
	if f.rms && !(c.NormEps > 0 && c.NormEps < 1) {
		return bad("rms_norm_eps", "is %g; it must be between 0 and 1", c.NormEps)
	}
	if !f.rms && c.NormEps != f.normEps {
		return bad("rms_norm_eps", "is %g; it must be 1e-5, the fixed value of the LayerNorm of %q", c.NormEps,
			c.Architecture)
	}
	if !(c.RopeTheta > 0) || math.IsInf(c.RopeTheta, 0) {
		return bad("rope_theta", "is %g; it must be positive", c.RopeTheta)
	}
	if !(c.ClipQKV >= 0) || math.IsInf(c.ClipQKV, 0) {
		return bad("clip_qkv", "is %g; it must be positive, or 0 for none", c.ClipQKV)
	}
	if c.ClipQKV != 0 && !f.clip {
		return bad("clip_qkv", "is %g; it must be 0, because a %s model does not clip", c.ClipQKV, c.Architecture)
	}
	if err := c.RopeScaling.validate(f); err != nil {
		return err
	}
	if r := c.RopeScaling; r.Type == "yarn" && r.Factor*float64(r.OriginalMaxPositions) != float64(c.MaxPositions) {
		return bad("rope_scaling.factor", "is %g; it must be max_position_embeddings %d / "+
			"original_max_position_embeddings %d, which transformers 4 uses instead of it", r.Factor, c.MaxPositions,
			r.OriginalMaxPositions)
	}
	if err := c.validateWindows(bad); err != nil {
		return err
	}
	if !(c.InitStd >= 0) || math.IsInf(c.InitStd, 0) {
		return bad("initializer_range", "is %g; it must not be negative", c.InitStd)
	}
	if !(c.InitCutoff == 0 || c.InitCutoff >= 0.1) || math.IsInf(c.InitCutoff, 0) {
		return bad("initializer_cutoff", "is %g standard deviations; it must be at least 0.1, or 0 for none",
			c.InitCutoff)
	}
	if !(c.RouterAuxLossCoef >= 0) || math.IsInf(c.RouterAuxLossCoef, 0) {
		return bad("router_aux_loss_coef", "is %g; it must be a finite number that is not negative",
			c.RouterAuxLossCoef)
	}
	for _, id := range []struct {
		field string
		v     int
	}{{"pad_token_id", c.PadTokenID}, {"bos_token_id", c.BOSTokenID}, {"eos_token_id", c.EOSTokenID}} {
		if id.v < NoToken || id.v >= c.VocabSize {
			return bad(id.field, "is %d; it must be below vocab_size %d, or %d for none", id.v, c.VocabSize,
				NoToken)
		}
	}
	return nil
}

// HeadDim returns the size of one attention head, with its padding in a latent attention.
func (c Config) HeadDim() int {
	if c.latent() {
		return c.latentHeadDim()
	}
	if c.HeadSize != 0 {
		return c.HeadSize
	}
	return c.HiddenSize / c.Heads
}

// QueryWidth returns the width of a token's queries, and KVWidth the width of its keys, and of its
// values.
func (c Config) QueryWidth() int { return c.Heads * c.HeadDim() }
func (c Config) KVWidth() int    { return c.KVHeads * c.HeadDim() }

func (c Config) qkvWidth() int { return c.QueryWidth() + 2*c.KVWidth() }
func (c Config) moe() bool     { return c.family().experts }

// TotalParameters returns the number of weights of the model.
func (c Config) TotalParameters() int64 { return c.parameters(c.Experts) }

// ActiveParameters returns the number of weights used for one token, including the embeddings. Of
// the experts, only the ExpertsPerToken chosen ones count.
func (c Config) ActiveParameters() int64 { return c.parameters(c.ExpertsPerToken) }

func (c Config) parameters(experts int) int64 { return stagesOf(c, 0, 1, 1)[0].parameters(c, experts) }

// parameters returns the number of weights of a stage with the given number of experts in each
// layer with experts.
func (s stage) parameters(c Config, experts int) int64 {
	h := int64(c.HiddenSize)
	total := int64(0)
	if s.first {
		total += int64(c.VocabSize) * h
	}
	if s.last && !c.TieEmbeddings {
		total += int64(c.VocabSize) * h
	}
	if s.last {
		total += int64(c.NormWeights())
	}
	for l := s.from; l < s.from+s.layers; l++ {
		replicated, expert := c.LayerParameters(l)
		total += replicated + int64(experts)*expert
	}
	return total
}

// LayerParameters returns the number of weights of a layer outside of its experts, and of one
// expert; 0 for a layer without experts. The layers of multi-token prediction follow the others.
func (c Config) LayerParameters(layer int) (replicated, expert int64) {
	h, q, kv := int64(c.HiddenSize), int64(c.QueryWidth()), int64(c.KVWidth())
	qNorm, kNorm := c.qkNormWidths()
	replicated = 2*h*q + 2*h*kv + 2*int64(c.NormWeights()) + int64(qNorm+kNorm) // with q, o and k, v
	if c.latent() {
		projections, _ := c.latentParameters()
		replicated = projections + h*int64(c.ContextWidth()) + 2*int64(c.NormWeights())
	}
	if layer >= c.Layers {
		replicated += 2*h*h + 3*h // projection, and norms of its inputs and of the layer's output
	}
	if c.hasQKVBias() {
		replicated += q + 2*kv
	}
	if c.hasOutBias() {
		replicated += h
	}
	if c.family().sinks {
		replicated += int64(c.Heads)
	}
	if !c.HasExperts(layer) {
		return replicated + 3*h*int64(c.denseWidth()), 0
	}
	replicated += int64(c.Experts)*h + 3*h*int64(c.SharedSize) // router and shared experts
	if c.family().shared.gated() {
		replicated += h
	}
	ffn := int64(c.IntermediateSize)
	if expert = 3 * h * ffn; c.family().expertBias {
		expert += 2*ffn + h
	}
	if c.family().router.outBias {
		replicated += int64(c.Experts)
	}
	return replicated, expert
}

// FLOPsPerToken returns the floating-point operations of one token in a training step, forward and
// backward: the sum of [Config.LayerFLOPs], and 6·V·H for the head.
func (c Config) FLOPsPerToken(sequenceLength int) float64 {
	sum := 6 * float64(c.VocabSize) * float64(c.HiddenSize)
	for l := range c.AllLayers() {
		sum += c.LayerFLOPs(l, sequenceLength)
	}
	return sum
}

// LayerFLOPs returns the part of a layer in [Config.FLOPsPerToken]. It counts matrix products only,
// with full attention (not halved for causality), and without router and norms. Optimus counts in
// the same way:
//
//	12·H·A·D + 12·H·G·D + 12·S·A·D + 18·H·W
//
// W is [Config.ActiveWidth]. In layers with a smaller window, S is the window. Latent attention has
// 6 operations for each weight of its projections, and 6·S·A·(p+r+v) for p+r elements of a head of
// queries and v of values. A layer of multi-token prediction has 12·H·H more for its projection,
// and 6·V·H for the head.
func (c Config) LayerFLOPs(layer, sequenceLength int) float64 {
	if window := c.window(layer); window > 0 {
		sequenceLength = min(sequenceLength, window)
	}
	h, q, kv := float64(c.HiddenSize), float64(c.QueryWidth()), float64(c.KVWidth())
	prediction := 0.0
	if layer >= c.Layers {
		prediction = 12*h*h + 6*float64(c.VocabSize)*h
	}
	if c.latent() {
		return prediction + c.latentFLOPs(sequenceLength) + 18*h*float64(c.ActiveWidth(layer))
	}
	return prediction + 12*h*q + 12*h*kv + 12*float64(sequenceLength)*q + 18*h*float64(c.ActiveWidth(layer))
}
