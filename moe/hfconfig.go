package moe

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"mula/moe/safetensors"
)

// The values that transformers' OlmoeConfig and OlmoConfig give to a field that config.json leaves out. Sizes are not among them: a
// config.json without its sizes is refused, because the class defaults are those of another model than one would think (OlmoeConfig's
// intermediate_size is 2048, OLMoE's own is 1024).
const (
	hfPadTokenID = 1
	hfEOSTokenID = 50279
	hfRopeTheta  = 10000
	hfInitStd    = 0.02
	hfNormEps    = 1e-5
	hfAuxCoef    = 0.01
)

var hfClass = map[Architecture]struct {
	name         string
	maxPositions int
}{
	OLMoE: {"OlmoeForCausalLM", 4096},
	OLMo:  {"OlmoForCausalLM", 2048},
}

// torchDTypes are PyTorch's names of the element types of weights.
var torchDTypes = map[safetensors.DType]string{
	safetensors.F32: "float32", safetensors.F16: "float16", safetensors.BF16: "bfloat16",
}

// A fraction is a number that Python reads as a float: transformers 5 refuses an integer where it wants one.
type fraction float64

// MarshalJSON writes the number with a point or an exponent.
func (x fraction) MarshalJSON() ([]byte, error) {
	text, err := json.Marshal(float64(x))
	if err == nil && !bytes.ContainsAny(text, ".e") {
		text = append(text, ".0"...)
	}
	return text, err
}

// WriteConfigJSON writes c as the config.json of a Hugging Face model whose weights have the given element type. It holds the fields of
// transformers 4 (rope_theta, torch_dtype) and of transformers 5 (rope_parameters, dtype). InitCutoff has no field there.
func WriteConfigJSON(w io.Writer, c Config, dtype safetensors.DType) error {
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
	fields := map[string]any{
		"architectures": []string{hfClass[c.Architecture].name}, "model_type": c.Architecture,
		"vocab_size": c.VocabSize, "hidden_size": c.HiddenSize, "intermediate_size": c.IntermediateSize,
		"num_hidden_layers": c.Layers, "num_attention_heads": c.Heads, "num_key_value_heads": c.KVHeads,
		"max_position_embeddings": c.MaxPositions, "tie_word_embeddings": c.TieEmbeddings,
		"pad_token_id": id(c.PadTokenID), "bos_token_id": id(c.BOSTokenID), "eos_token_id": id(c.EOSTokenID),
		"initializer_range": fraction(c.InitStd), "hidden_act": "silu", "attention_bias": false, "attention_dropout": fraction(0), "clip_qkv": nil,
		"rope_theta": fraction(c.RopeTheta), "rope_scaling": nil,
		"rope_parameters": map[string]any{"rope_type": "default", "rope_theta": fraction(c.RopeTheta)},
		"dtype":           torch, "torch_dtype": torch, "use_cache": true,
	}
	if c.ClipQKV > 0 {
		fields["clip_qkv"] = fraction(c.ClipQKV)
	}
	if c.moe() {
		fields["num_experts"], fields["num_experts_per_tok"] = c.Experts, c.ExpertsPerToken
		fields["rms_norm_eps"], fields["router_aux_loss_coef"] = fraction(c.NormEps), fraction(c.RouterAuxLossCoef)
		fields["norm_topk_prob"], fields["output_router_logits"] = false, false
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

// maxConfig bounds the config.json that is read.
const maxConfig = 1 << 20

// ReadConfigJSON reads a config.json of transformers 4 or 5; name stands for the file in errors. Fields that it leaves out have the values
// that transformers gives them, except sizes, which must be there. A model that this package would not compute exactly is refused.
func ReadConfigJSON(r io.Reader, name string) (Config, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxConfig+1))
	if err != nil {
		return Config{}, fmt.Errorf("reading %s: %w", name, err)
	}
	if len(text) > maxConfig {
		return Config{}, fmt.Errorf("%s: more than %d bytes, which no config.json has", name, maxConfig)
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return Config{}, fmt.Errorf("%s: %w", name, err)
	}
	c, err := fromFields(hfFields{fields: fields})
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", name, err)
	}
	if err := c.Validate(); err != nil {
		return Config{}, fmt.Errorf("%s: %w", name, err)
	}
	return c, nil
}

// hfFields reads fields of a config.json and remembers the first error.
type hfFields struct {
	fields map[string]json.RawMessage
	err    error
}

func (f *hfFields) fail(format string, args ...any) {
	if f.err == nil {
		f.err = fmt.Errorf(format, args...)
	}
}

// set says whether a field is there and not null.
func (f *hfFields) set(name string) bool {
	raw, ok := f.fields[name]
	return ok && string(raw) != "null"
}

// read stores a field in v if it is set.
func (f *hfFields) read(name string, v any) {
	if !f.set(name) {
		return
	}
	if err := json.Unmarshal(f.fields[name], v); err != nil {
		f.fail("field %s: %w", name, err)
	}
}

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

// token reads a token id, of which null means none.
func (f *hfFields) token(name string, absent int) int {
	raw, ok := f.fields[name]
	if !ok {
		return absent
	}
	if string(raw) == "null" {
		return NoToken
	}
	var list []int
	if err := json.Unmarshal(raw, &list); err == nil {
		if len(list) != 1 {
			f.fail("field %s lists %d ids; one or null is supported", name, len(list))
			return NoToken
		}
		return list[0]
	}
	id := NoToken
	f.read(name, &id)
	if id < 0 { // some configurations write -1 for none
		return NoToken
	}
	return id
}

func fromFields(f hfFields) (Config, error) {
	c := Config{Architecture: Architecture(f.text("model_type"))}
	class, ok := hfClass[c.Architecture]
	if !ok {
		return Config{}, fmt.Errorf("model_type is %q; %q and %q are supported", c.Architecture, OLMoE, OLMo)
	}
	c.VocabSize = f.size("vocab_size")
	c.HiddenSize = f.size("hidden_size")
	c.IntermediateSize = f.size("intermediate_size")
	c.Layers = f.size("num_hidden_layers")
	c.Heads = f.size("num_attention_heads")
	c.KVHeads = c.Heads
	f.read("num_key_value_heads", &c.KVHeads)
	c.MaxPositions = class.maxPositions
	f.read("max_position_embeddings", &c.MaxPositions)
	c.NormEps = hfNormEps
	if c.moe() {
		c.Experts = f.size("num_experts", "num_local_experts")
		if n := c.Experts; f.set("num_local_experts") {
			if f.read("num_local_experts", &n); n != c.Experts {
				f.fail("num_experts is %d and num_local_experts %d, which is another name for it; remove one", c.Experts, n)
			}
		}
		c.ExpertsPerToken = f.size("num_experts_per_tok")
		c.NormEps = f.float("rms_norm_eps", hfNormEps)
		c.RouterAuxLossCoef = f.float("router_aux_loss_coef", hfAuxCoef)
		if f.bool("norm_topk_prob") {
			f.fail("norm_topk_prob is true; only routing weights without renormalisation (false) are supported")
		}
	}
	c.InitStd = f.float("initializer_range", hfInitStd)
	c.ClipQKV = f.float("clip_qkv", 0)
	if f.set("clip_qkv") && c.ClipQKV == 0 {
		f.fail("clip_qkv is 0; write null for no clipping")
	}
	c.TieEmbeddings = f.bool("tie_word_embeddings")
	c.PadTokenID = f.token("pad_token_id", hfPadTokenID)
	c.BOSTokenID = f.token("bos_token_id", NoToken)
	c.EOSTokenID = f.token("eos_token_id", hfEOSTokenID)
	c.RopeTheta = f.rope()

	if act := f.text("hidden_act"); act != "" && act != "silu" {
		f.fail("hidden_act is %q; only \"silu\" is supported", act)
	}
	if f.bool("attention_bias") {
		f.fail("attention_bias is true; only projections without bias are supported")
	}
	if p := f.float("attention_dropout", 0); p != 0 {
		f.fail("attention_dropout is %g; only 0 is supported", p)
	}
	for _, name := range []string{"sliding_window", "quantization_config"} {
		if f.set(name) {
			f.fail("field %s is set, which is not supported", name)
		}
	}
	if d := 0; f.set("head_dim") {
		f.read("head_dim", &d)
		if c.Heads > 0 && d*c.Heads != c.HiddenSize {
			f.fail("head_dim is %d; only hidden_size / num_attention_heads is supported", d)
		}
	}
	return c, f.err
}

func (f *hfFields) text(name string) (s string) {
	f.read(name, &s)
	return s
}

// rope reads the base of the rotary embedding: rope_parameters in transformers 5, rope_theta and rope_scaling before.
func (f *hfFields) rope() float64 {
	theta := f.float("rope_theta", hfRopeTheta)
	for _, name := range []string{"rope_scaling", "rope_parameters"} {
		if !f.set(name) {
			continue
		}
		inner := hfFields{fields: map[string]json.RawMessage{}}
		f.read(name, &inner.fields)
		for key, value := range inner.fields {
			if strings.HasPrefix(string(value), "{") {
				f.fail("%s has parameters of %q; only one set of parameters for all layers is supported", name, key)
			}
		}
		for _, key := range []string{"rope_type", "type"} {
			if kind := inner.text(key); kind != "" && kind != "default" {
				f.fail("%s has %s %q; only \"default\" is supported", name, key, kind)
			}
		}
		if p := inner.float("partial_rotary_factor", 1); p != 1 {
			f.fail("%s has partial_rotary_factor %g; only 1 is supported", name, p)
		}
		inherited := inner.float("rope_theta", theta)
		if f.set("rope_theta") && inherited != theta {
			f.fail("rope_theta is %g and %s says %g; remove one", theta, name, inherited)
		}
		theta = inherited
		if inner.err != nil {
			f.fail("field %s: %s", name, strings.TrimPrefix(inner.err.Error(), "field "))
		}
	}
	return theta
}
