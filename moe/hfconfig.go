package moe

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"

	"mula/internal/strictjson"
	"mula/internal/suggest"
	"mula/moe/safetensors"
	"mula/xpu"
)

// The defaults of transformers, for all families, for a field missing from config.json. Each
// [family] has more.
const (
	hfRopeTheta = 10000
	hfInitStd   = 0.02
)

// torchDTypes are PyTorch's names of the element types of weights.
var torchDTypes = map[safetensors.DType]string{
	safetensors.F32: "float32", safetensors.F16: "float16", safetensors.BF16: "bfloat16",
}

// A fraction is a number that Python must read as a float: transformers 5 refuses an integer there.
type fraction float64

// MarshalJSON writes the number with a point or an exponent.
func (x fraction) MarshalJSON() ([]byte, error) {
	text, err := json.Marshal(float64(x))
	if err == nil && !bytes.ContainsAny(text, ".e") {
		text = append(text, ".0"...)
	}
	return text, err
}

// WriteConfigJSON writes c as the config.json of a Hugging Face model whose weights have element
// type dtype. The file has the fields of transformers 4 (rope_theta, torch_dtype) and of
// transformers 5 (rope_parameters, dtype). It has no field for InitCutoff.
func WriteConfigJSON(w io.Writer, c Config, dtype safetensors.DType) error {
	return writeConfigJSON(w, c, dtype, 0)
}

// writeConfigJSON is WriteConfigJSON of a model with a number of layers of multi-token prediction.
func writeConfigJSON(w io.Writer, c Config, dtype safetensors.DType, predictionLayers int) error {
	if err := c.Validate(); err != nil {
		return err
	}
	torch, ok := torchDTypes[dtype]
	if !ok {
		return fmt.Errorf("config.json: element type %q has no PyTorch name", dtype)
	}
	id := func(v int) any {
		if v == NoToken {
			return nil
		}
		return v
	}
	family, scaling, parameters := c.family(), c.RopeScaling.json(), c.RopeScaling.json()
	if parameters == nil {
		parameters = map[string]any{"rope_type": "default"}
	}
	parameters["rope_theta"] = fraction(c.RopeTheta)
	fields := map[string]any{
		"architectures": []string{family.class}, "model_type": c.Architecture,
		"vocab_size": c.VocabSize, "hidden_size": c.HiddenSize, "intermediate_size": c.IntermediateSize,
		"num_hidden_layers": c.Layers, "num_attention_heads": c.Heads, "num_key_value_heads": c.KVHeads,
		"max_position_embeddings": c.MaxPositions, "tie_word_embeddings": c.TieEmbeddings,
		"pad_token_id": id(c.PadTokenID), "bos_token_id": id(c.BOSTokenID), "eos_token_id": id(c.EOSTokenID),
		"initializer_range": fraction(c.InitStd), "hidden_act": "silu", "attention_bias": false,
		"attention_dropout": fraction(0),
		"rope_theta":        fraction(c.RopeTheta), "rope_scaling": scaling, "rope_parameters": parameters,
		"dtype": torch, "torch_dtype": torch, "use_cache": true,
	}
	if family.qkvBias { // without a field for them
		delete(fields, "attention_bias")
	}
	if family.outBias {
		fields["attention_bias"] = true
	}
	if family.clamp != (xpu.Clamp{}) {
		fields["swiglu_limit"], fields["swiglu_alpha"] = fraction(clampLimit), fraction(clampAlpha)
	}
	if family.biasField {
		fields["attention_bias"] = c.AttentionBias
	}
	if family.attentionFields {
		fields["attention_bias"], fields["use_qk_norm"] = c.AttentionBias, c.QKNorm
	}
	if family.rotaryPart != 0 {
		part := fraction(cmp.Or(c.RotaryPart, 1))
		fields["partial_rotary_factor"], parameters["partial_rotary_factor"] = part, part
	}
	c.multiplierFields(fields)
	if family.latent {
		fields["q_lora_rank"], fields["kv_lora_rank"] = nil, c.KVRank
		if c.QueryRank > 0 {
			fields["q_lora_rank"] = c.QueryRank
		}
		fields["qk_nope_head_dim"], fields["qk_rope_head_dim"] = c.PlainSize, c.RotatedSize
		fields["v_head_dim"] = c.ValueSize
		if family.interleaveField {
			fields["rope_interleave"] = c.RopeInterleave
		}
	}
	if family.headDim { // transformers 4 needs it for Mistral with YaRN
		fields["head_dim"] = c.HeadDim()
	}
	c.windowFields(fields)
	if family.windowsUnscaled {
		fields["rope_parameters"] = map[string]any{fullAttention: parameters,
			slidingAttention: map[string]any{"rope_type": "default", "rope_theta": fraction(c.RopeTheta)}}
	}
	switch {
	case c.ClipQKV > 0:
		fields["clip_qkv"] = fraction(c.ClipQKV)
	case family.clip:
		fields["clip_qkv"] = nil
	}
	if family.rms {
		fields["rms_norm_eps"] = fraction(c.NormEps)
	}
	if c.moe() {
		fields[cmp.Or(family.expertCount, "num_experts")] = c.Experts
		fields[cmp.Or(family.expertsPerToken, "num_experts_per_tok")] = c.ExpertsPerToken
		if fields["output_router_logits"] = false; !family.noAuxCoef {
			fields["router_aux_loss_coef"] = fraction(c.RouterAuxLossCoef)
		}
		if family.jitterField {
			fields["router_jitter_noise"] = fraction(c.RouterJitter)
		}
		c.routerFields(fields)
		c.sharedFields(fields)
		if !family.renormalized && family.router.groups != largest {
			fields["norm_topk_prob"] = c.NormTopK
		}
		if family.expertWidth != "" {
			fields[family.expertWidth] = c.IntermediateSize
		}
		c.denseFields(fields)
		if family.predictionLayers != "" {
			fields[family.predictionLayers] = max(predictionLayers, c.PredictionLayers)
		}
	}
	text, err := json.MarshalIndent(fields, "", "  ")
	if err != nil {
		return fmt.Errorf("config.json: %w", err)
	}
	if _, err := w.Write(append(text, '\n')); err != nil {
		return fmt.Errorf("writing config.json: %w", err)
	}
	return nil
}

// maxConfig is the maximum size of a config.json, in bytes.
const maxConfig = 1 << 20

// readConfigJSON reads a config.json of transformers 4 or 5; name is the file name in errors.
// Missing fields get the defaults of transformers, but sizes are required. A field or value that
// makes transformers compute something that this package does not support is an error, and so is an
// unknown field. The error lists all of them.
func readConfigJSON(r io.Reader, name string) (Config, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxConfig+1))
	if err != nil {
		return Config{}, fmt.Errorf("reading %s: %w", name, err)
	}
	if len(text) > maxConfig {
		return Config{}, fmt.Errorf("%s: larger than %d bytes, the limit for a config.json", name, maxConfig)
	}
	var fields map[string]json.RawMessage
	if err := strictjson.DecodeLoosely(text, &fields); err != nil {
		return Config{}, fmt.Errorf("%s: %w", name, err)
	}
	f := &hfFields{fields: fields, known: map[string]bool{}}
	c := f.config()
	if len(f.problems) == 0 {
		if err := c.Validate(); err != nil {
			f.fail("%w", err)
		}
	}
	for i, err := range f.problems {
		f.problems[i] = fmt.Errorf("%s: %w", name, err)
	}
	if len(f.problems) > 0 {
		return Config{}, errors.Join(f.problems...)
	}
	return c, nil
}

// hfIgnored are the fields that this package accepts with any value. They record where a model came
// from, how transformers returns outputs or generates text, or the head of another task. None of
// them changes a logit of these models.
var hfIgnored = []string{
	"_name_or_path", "name_or_path", "_commit_hash", "transformers_version",
	"return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "tie_last_hidden_states",
	"use_cache", "torchscript",
	"use_bfloat16", "tf_legacy_loss", "gradient_checkpointing", "chunk_size_feed_forward", "is_decoder",
	"_attn_implementation_autoset",
	"id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
	"tokenizer_class", "prefix", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id",
	"decoder_start_token_id",
	// Settings of generate(), which older versions of transformers wrote into config.json.
	"assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
	"diversity_penalty", "do_sample",
	"early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
	"exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
	"min_length",
	"no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams",
	"num_return_sequences",
	"output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
	"target_lookbehind",
	"temperature", "top_k", "top_p", "typical_p",
}

// hfAttention and hfExperts are the implementations that are part of transformers. All of them
// compute the same function. Another name is a kernel that transformers downloads.
const (
	hfAttention = `[null, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"]`
	hfExperts   = `[null, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe"]`
	hfDTypes    = `[null, "float32", "bfloat16", "float16"]`
)

// hfFixed lists the fields for which this package supports only the given values. null is listed
// where transformers reads it as the default. It is not listed for is_causal, where null means that
// tokens attend both ways.
var hfFixed = map[string]string{
	"is_causal": `[true]`, "hidden_act": `["silu"]`, "attention_bias": `[false]`, "attention_dropout": `[0]`,
	"attention_chunk_size": `[null]`, "num_kv_shared_layers": `[null]`,
	"kv_sharing_modes":      `[null]`,
	"partial_rotary_factor": `[null, 1]`, "alibi": `[null, false]`, "use_alibi": `[null, false]`,
	"is_encoder_decoder": `[false]`, "add_cross_attention": `[false]`, "cross_attention_hidden_size": `[null]`,
	"tie_encoder_decoder": `[false]`,
	"text_config":         `[null]`, "decoder": `[null]`, "generator": `[null]`, "text_encoder": `[null]`,
	"pruned_heads": `[null, {}]`, "per_layer_config": `[null, {}]`, "fusion_config": `[null, {}]`,
	"quantization_config":  `[null]`,
	"transformers_weights": `[null]`, "auto_map": `[null, {}]`, "dtype": hfDTypes, "torch_dtype": hfDTypes,
	"attn_implementation": hfAttention, "_attn_implementation": hfAttention,
	"_attn_implementation_internal": hfAttention,
	"experts_implementation":        hfExperts, "_experts_implementation": hfExperts,
	"_experts_implementation_internal": hfExperts,
}

// hfFields reads fields of a config.json and collects all errors.
type hfFields struct {
	fields   map[string]json.RawMessage
	known    map[string]bool // the fields that were read
	problems []error
}

func (f *hfFields) fail(format string, args ...any) {
	f.problems = append(f.problems, fmt.Errorf(format, args...))
}

// set reports whether a field exists and is not null.
func (f *hfFields) set(name string) bool {
	f.known[name] = true
	raw, ok := f.fields[name]
	return ok && string(raw) != "null"
}

// read stores a field in v if it exists. null is an error: transformers either fails on it or reads
// it as something other than the default.
func (f *hfFields) read(name string, v any) {
	f.known[name] = true
	raw, ok := f.fields[name]
	if !ok {
		return
	}
	if string(raw) == "null" {
		f.fail("%s is null; give it a value or remove it", name)
	} else if err := strictjson.Value(raw, v); err != nil {
		f.fail("%s is %s; %w", name, shown(raw), err)
	}
}

// optional is read, but null leaves v unchanged.
func (f *hfFields) optional(name string, v any) {
	if f.set(name) {
		f.read(name, v)
	}
}

// fixed checks a field that may only have one of the listed values.
func (f *hfFields) fixed(name, list string) {
	f.known[name] = true
	raw, ok := f.fields[name]
	if !ok {
		return
	}
	var value any
	var supported []any
	if err := json.Unmarshal(raw, &value); err != nil { // a number beyond the range of a float64
		value = nil
	} else if err := json.Unmarshal([]byte(list), &supported); err != nil {
		panic(err) // the lists are constants of this package
	}
	for _, s := range supported {
		if reflect.DeepEqual(value, s) {
			return
		}
	}
	one := "only " + list[1:len(list)-1] + " is supported"
	if len(supported) > 1 {
		one = "supported are " + list[1:len(list)-1]
	}
	f.fail("%s is %s; %s", name, shown(raw), one)
}

// shown formats a value for an error message.
func shown(raw json.RawMessage) string {
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil {
		return string(raw)
	}
	if text := []rune(b.String()); len(text) > 100 {
		return string(text[:100]) + "…"
	}
	return b.String()
}

// size reads a required whole number under the first of the names that is set.
func (f *hfFields) size(names ...string) (n int) {
	for _, name := range names {
		if f.set(name) {
			f.read(name, &n)
			return n
		}
	}
	f.fail("field %s is missing", names[0])
	return 0
}

func (f *hfFields) float(name string, absent float64) float64 {
	f.read(name, &absent)
	return absent
}

func (f *hfFields) bool(name string) (b bool) {
	f.read(name, &b)
	return b
}

// token reads a token id; null means none.
func (f *hfFields) token(name string, absent int) int {
	if _, ok := f.fields[name]; !ok {
		f.known[name] = true
		return absent
	}
	if !f.set(name) {
		return NoToken
	}
	id := NoToken
	if raw := f.fields[name]; raw[0] == '[' {
		var list []int
		f.read(name, &list)
		if len(list) != 1 {
			f.fail("%s is %s; only one id or null is supported", name, shown(raw))
			return NoToken
		}
		id = list[0]
	} else {
		f.read(name, &id)
	}
	if id < 0 {
		// Some configurations write -1 for none, but PyTorch counts a negative padding_idx from the
		// end of the embedding.
		if name == "pad_token_id" {
			f.fail("%s is %d, which PyTorch counts from the end of the embedding; write null for none, or the id "+
				"itself", name, id)
		}
		return NoToken
	}
	return id
}

// config converts the fields to a Config and collects all problems. The Config is valid only if
// there are none.
func (f *hfFields) config() (c Config) {
	f.read("model_type", (*string)(&c.Architecture))
	family, ok := families[c.Architecture]
	if !ok {
		switch reason := refused[c.Architecture]; {
		case len(f.problems) > 0:
		case reason != "":
			f.fail("model_type is %q, which is not supported, because %s; supported are %q", c.Architecture, reason,
				architectures())
		default:
			f.fail("model_type is %q; supported are %q", c.Architecture, architectures())
		}
		return c
	}
	c.VocabSize = f.size("vocab_size")
	c.HiddenSize = f.size("hidden_size")
	c.IntermediateSize = f.size(cmp.Or(family.expertWidth, "intermediate_size"))
	c.Layers = f.size("num_hidden_layers")
	c.Heads = f.size("num_attention_heads")
	c.KVHeads = c.Heads
	if _, given := f.fields["num_key_value_heads"]; !given && family.kvHeads != 0 {
		c.KVHeads = family.kvHeads
	}
	f.optional("num_key_value_heads", &c.KVHeads)
	if family.latent {
		f.latent(&c)
	} else {
		f.headDim(&c)
	}
	f.multipliers(&c)
	c.MaxPositions = family.maxPositions
	f.read("max_position_embeddings", &c.MaxPositions)
	c.NormEps = family.normEps
	if family.rms {
		f.read("rms_norm_eps", &c.NormEps)
	}
	if c.moe() {
		c.Experts = f.experts(family)
		c.ExpertsPerToken = f.size(cmp.Or(family.expertsPerToken, "num_experts_per_tok"))
		switch c.NormTopK = family.renormalized || family.normTopK; {
		case family.renormalized, family.router.groups == largest: // without norm_topk_prob, or its effect
		default:
			f.read("norm_topk_prob", &c.NormTopK)
		}
		if !family.noAuxCoef {
			c.RouterAuxLossCoef = f.float("router_aux_loss_coef", family.auxCoef)
		}
		f.router(&c)
		f.sharedExperts(&c)
		f.denseLayers(&c)
	}
	for _, name := range slices.Sorted(maps.Keys(family.fixed)) {
		f.fixed(name, family.fixed[name])
	}
	if family.biasField {
		f.read("attention_bias", &c.AttentionBias)
	}
	if family.attentionFields {
		f.read("attention_bias", &c.AttentionBias)
		f.read("use_qk_norm", &c.QKNorm)
	}
	c.InitStd = f.float("initializer_range", hfInitStd)
	if family.clip {
		f.optional("clip_qkv", &c.ClipQKV)
		if f.set("clip_qkv") && c.ClipQKV == 0 {
			f.fail("clip_qkv is 0; write null for no clipping")
		}
	}
	c.TieEmbeddings = family.tied
	f.read("tie_word_embeddings", &c.TieEmbeddings)
	c.PadTokenID = f.token("pad_token_id", family.padTokenID)
	c.BOSTokenID = f.token("bos_token_id", family.bosTokenID)
	c.EOSTokenID = f.token("eos_token_id", family.eosTokenID)
	r := rotary{}
	if family.windowsUnscaled {
		r = f.ropeOfLayers(family)
	} else {
		r = f.rope(family)
	}
	c.RopeTheta, c.RopeScaling = r.theta, r.scaling
	if r.part != 1 { // complete heads
		c.RotaryPart = r.part
	}
	if family.jitterField {
		f.optional("router_jitter_noise", &c.RouterJitter)
	}
	if name := family.predictionLayers; name != "" {
		n := 0
		if f.optional(name, &n); n < 0 {
			f.fail("%s is %d; it must not be negative", name, n)
		}
	}
	f.fixed("architectures", fmt.Sprintf(`[null, [%q]]`, family.class))
	f.windows(&c)
	if family.transposed {
		f.quantization()
	}
	f.others(family)
	return c
}

// experts reads the number of experts. In most families, transformers 5 has another name of it.
func (f *hfFields) experts(family *family) int {
	const other = "num_local_experts"
	name := cmp.Or(family.expertCount, "num_experts")
	if family.oneExpertCount {
		return f.size(name)
	}
	n := f.size(name, other)
	if also := n; f.set(other) {
		if f.read(other, &also); also != n {
			f.fail("%s is %d and %s %d, two names of the same field; remove one", name, n, other, also)
		}
	}
	return n
}

// latent reads the sizes of latent attention. transformers also writes two sizes that follow from
// them.
func (f *hfFields) latent(c *Config) {
	if _, given := f.fields["q_lora_rank"]; !given {
		f.fail("field q_lora_rank is missing; write null for queries without latent")
	}
	if f.optional("q_lora_rank", &c.QueryRank); f.set("q_lora_rank") && c.QueryRank == 0 {
		f.fail("q_lora_rank is 0; write null for queries without latent")
	}
	c.KVRank, c.PlainSize = f.size("kv_lora_rank"), f.size("qk_nope_head_dim")
	c.RotatedSize, c.ValueSize = f.size("qk_rope_head_dim"), f.size("v_head_dim")
	c.RopeInterleave = true
	if c.family().interleaveField {
		f.read("rope_interleave", &c.RopeInterleave)
	}
	f.fixed("head_dim", fmt.Sprintf("[%d]", c.RotatedSize))
	f.fixed("qk_head_dim", fmt.Sprintf("[%d]", c.queryElements()))
}

// headDim reads the size of a head. [Config] has 0 for hidden_size / num_attention_heads.
func (f *hfFields) headDim(c *Config) {
	if _, given := f.fields["head_dim"]; !given {
		c.HeadSize = families[c.Architecture].headSize
	}
	if f.optional("head_dim", &c.HeadSize); f.set("head_dim") && c.HeadSize == 0 {
		f.fail("head_dim is 0; write null for hidden_size / num_attention_heads")
	}
	if c.HeadSize*c.Heads == c.HiddenSize {
		c.HeadSize = 0
	}
}

// others checks the fields that [Config] does not have. Fields that are in no list are refused,
// because transformers keeps every field and may compute something else because of it.
func (f *hfFields) others(family *family) {
	for _, name := range slices.Sorted(maps.Keys(f.fields)) {
		list, fixed := hfFixed[name]
		switch {
		case slices.Contains(family.ignored, name), f.known[name]:
		case fixed:
			f.fixed(name, list)
		case !slices.Contains(hfIgnored, name):
			advice := "remove it if the model's outputs do not depend on it"
			if near := suggest.Nearest(name, slices.Sorted(maps.Keys(f.known))); near != "" {
				advice = fmt.Sprintf("did you mean %q?", near)
			}
			f.fail("unknown field %s with value %s; %s", name, shown(f.fields[name]), advice)
		}
	}
}

// A rotary is the rotary embedding of a file.
type rotary struct {
	theta   float64
	part    float64 // of a head that is rotated, if the family has it; otherwise 0
	scaling RopeScaling
}

// rope reads the rotary embedding: rope_parameters in transformers 5, rope_theta and rope_scaling
// before. A file may have both if they are equal, so that all releases read the same.
func (f *hfFields) rope(family *family) rotary {
	r := rotary{theta: cmp.Or(family.ropeTheta, hfRopeTheta), part: family.rotaryPart}
	f.read("rope_theta", &r.theta)
	if family.rotaryPart != 0 {
		f.read("partial_rotary_factor", &r.part)
	}
	_, given := f.fields["rope_theta"]
	var all []RopeScaling
	for _, name := range []string{"rope_scaling", "rope_parameters"} {
		if !f.set(name) {
			continue
		}
		inner := &hfFields{fields: map[string]json.RawMessage{}, known: map[string]bool{}}
		f.read(name, &inner.fields)
		f.within(inner, name, "rope_theta", &r.theta)
		if family.rotaryPart != 0 {
			f.within(inner, name, "partial_rotary_factor", &r.part)
		} else {
			inner.fixed("partial_rotary_factor", `[1]`)
		}
		all = append(all, inner.scaling(family))
		for _, err := range inner.problems {
			f.fail("in %s: %w", name, err)
		}
	}
	if len(all) == 0 && family.ropeScaling.Type != "" {
		if r.scaling = family.ropeScaling; f.fields["rope_scaling"] != nil || f.fields["rope_parameters"] != nil {
			f.fail("rope_scaling is null, which releases of transformers read differently; set rope_parameters, or " +
				"remove rope_scaling for the default")
		}
	}
	if len(all) == 2 && (all[0] != all[1] || !given) {
		f.fail("rope_scaling and rope_parameters are both set, and differ; remove one")
	}
	if len(all) > 0 {
		r.scaling = all[0]
	}
	if family.rotaryPart != 0 && r.part == 0 {
		f.fail("partial_rotary_factor is 0; it must be above 0")
	}
	return r
}

// within reads a number from inner, the fields of rope_scaling or rope_parameters. v has the number
// that the file itself has, or the number of the family; both must be equal.
func (f *hfFields) within(inner *hfFields, of, name string, v *float64) {
	own := *v
	if inner.read(name, v); *v == own {
		return
	}
	switch _, given := f.fields[name]; {
	case given:
		f.fail("%s is %g and %s in %s is %g; remove one", name, own, name, of, *v)
	case of == "rope_scaling":
		f.fail("%s in rope_scaling is %g, which transformers 5 uses and transformers 4 ignores; move it out of "+
			"rope_scaling", name, *v)
	}
}

// ropeOfLayers is rope for a family whose layers with a window have an unscaled rotary embedding.
// rope_parameters has an entry for each type of layer. Without it, transformers 4 uses rope_theta
// in all layers, and transformers 5 its own default in layers with a window.
func (f *hfFields) ropeOfLayers(family *family) rotary {
	if !f.set("rope_parameters") {
		_, given := f.fields["rope_theta"]
		r := f.rope(family)
		if !given || r.theta != family.ropeTheta {
			f.fail("without rope_parameters, rope_theta must be %g; transformers 4 and 5 read another value, or none, "+
				"differently", family.ropeTheta)
		}
		return r
	}
	types := map[string]json.RawMessage{}
	f.read("rope_parameters", &types)
	if len(types) != 2 || types[fullAttention] == nil || types[slidingAttention] == nil {
		f.fail("rope_parameters is %s; it must have %s and %s", shown(f.fields["rope_parameters"]), fullAttention,
			slidingAttention)
		return rotary{}
	}
	of := func(kind string) rotary {
		layers := &hfFields{fields: maps.Clone(f.fields), known: f.known}
		layers.fields["rope_parameters"] = types[kind]
		if kind == slidingAttention {
			delete(layers.fields, "rope_scaling")
		}
		defer func() { f.problems = append(f.problems, layers.problems...) }()
		return layers.rope(family)
	}
	full := of(fullAttention)
	if sliding := of(slidingAttention); sliding.theta != full.theta || sliding.scaling.kind() != "default" {
		f.fail("rope_parameters is %s; %s must have the rope_theta of %s and no scaling",
			shown(f.fields["rope_parameters"]), slidingAttention, fullAttention)
	}
	return full
}

// scaling reads the fields of rope_scaling or rope_parameters.
func (f *hfFields) scaling(family *family) (r RopeScaling) {
	f.read("type", &r.Type) // the name of old releases
	f.read("rope_type", &r.Type)
	types, err := json.Marshal(family.ropeTypes())
	if err != nil {
		panic(err) // they are strings
	}
	f.fixed("type", string(types))
	f.fixed("rope_type", string(types))
	kind := ropeFields[r.kind()]
	numbers := r.numbers()
	for _, name := range slices.Concat(kind.required, kind.optional) {
		if v := numbers[name]; v != nil {
			f.optional(name, v)
		} else {
			f.optional(name, &r.OriginalMaxPositions)
		}
	}
	if r.kind() == "yarn" {
		truncate := true
		f.read("truncate", &truncate)
		r.NoTruncate = !truncate
		if !family.latent {
			f.fixed("mscale", `[null, 0]`)
			f.fixed("mscale_all_dim", `[null, 0]`)
		}
	}
	if len(f.problems) == 0 { // other types have further parameters
		for _, key := range slices.Sorted(maps.Keys(f.fields)) {
			if !f.known[key] {
				f.fail("%s is %s, but the type %s has no such field", key, shown(f.fields[key]), r.kind())
			}
		}
	}
	if r.Type == "default" {
		r.Type = ""
	}
	return r
}

// json returns the fields of rope_scaling in config.json, or nil.
func (r RopeScaling) json() map[string]any {
	if r.kind() == "default" {
		return nil
	}
	fields := map[string]any{"rope_type": r.Type}
	for name, v := range r.numbers() {
		if *v != 0 {
			fields[name] = fraction(*v)
		}
	}
	if r.NoTruncate {
		fields["truncate"] = false
	}
	if n := r.OriginalMaxPositions; n != 0 {
		fields["original_max_position_embeddings"] = n
	}
	return fields
}
