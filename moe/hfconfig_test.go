package moe

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// minimalConfig is a config.json with the fields that must be there, and the changes given.
func minimalConfig(architecture Architecture, changes ...string) string {
	family, changed := families[architecture], strings.Join(changes, ", ")
	text := fmt.Sprintf(`{"model_type": %q, "vocab_size": 110000, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4`, architecture)
	add := func(field, value string) { // unless it is among the changes
		if !strings.Contains(changed, strconv.Quote(field)+":") {
			text += fmt.Sprintf(", %q: %s", field, value)
		}
	}
	if family.expertWidth != "" {
		add(family.expertWidth, "32")
	}
	if family.experts {
		text += fmt.Sprintf(`, %q: 8, %q: 2`, cmp.Or(family.expertCount, "num_experts"),
			cmp.Or(family.expertsPerToken, "num_experts_per_tok"))
	}
	if family.kvHeads != 0 {
		add("num_key_value_heads", "4")
	}
	if family.windowsUnscaled {
		add("rope_theta", "500000")
	}
	more := map[string]string{}
	if family.latent {
		more = map[string]string{"q_lora_rank": "null", "kv_lora_rank": "16", "v_head_dim": "12",
			"qk_nope_head_dim": "8", "qk_rope_head_dim": "16"}
	}
	switch shared := family.shared; {
	case shared.gated():
		more[shared.width] = "40"
	case shared.exist():
		more[shared.number] = "2"
	}
	if family.router.groups != noGroups {
		more["n_group"], more["topk_group"] = "4", "2"
	}
	if family.dense == firstLayers {
		more["first_k_dense_replace"] = "1"
	}
	for field, value := range more {
		add(field, value)
	}
	return text + ", " + changed + "}"
}

// A value that transformers would compute something else for is refused with a message that names
// file, field and value.
func TestConfigJSONRefusesValues(t *testing.T) {
	for _, test := range []struct{ field, value, shown string }{
		{"is_causal", "false", ""},
		{"is_causal", "null", ""}, // transformers 5 takes null for false
		{"is_causal", "0", ""},
		{"hidden_act", `"gelu"`, ""},
		{"hidden_act", "null", ""},
		{"attention_bias", "true", ""},
		{"attention_dropout", "0.1", ""},
		{"attention_dropout", "1e999", ""},
		{"sliding_window", "512", ""},
		{"attention_chunk_size", "512", ""},
		{"num_kv_shared_layers", "1", ""},
		{"kv_sharing_modes", `["reuse"]`, ""},
		{"layer_types", `["full_attention", "sliding_attention"]`, `"sliding_attention"`},
		{"layer_types", `["full_attention"]`, "1 entries"},
		{"layer_types", `"full_attention"`, ""},
		{"partial_rotary_factor", "0.5", ""},
		{"rope_theta", "null", ""},
		{"rope_theta", `"10000"`, ""},
		{"rope_scaling", `{"type": "linear", "factor": 2.0}`, `type is "linear"`},
		{"rope_scaling", `{"rope_type": "llama3", "factor": 8}`, `rope_type is "llama3"`},
		{"rope_scaling", `{"rope_theta": 500.0}`, "500"},
		{"rope_scaling", `[]`, ""},
		{"rope_parameters", `{"rope_type": "yarn", "factor": 2}`, `rope_type is "yarn"`},
		{"rope_parameters", `{"rope_type": null}`, "rope_type is null"},
		{"rope_parameters", `{"rope_type": "default", "factor": 2}`, "factor is 2"},
		{"rope_parameters", `{"rope_type": "default", "partial_rotary_factor": 0.5}`, "partial_rotary_factor is 0.5"},
		{"rope_parameters", `{"rope_theta": 500}, "rope_scaling": {"rope_type": "default"}`, "both set"},
		{"alibi", "true", ""},
		{"use_alibi", "true", ""},
		{"is_encoder_decoder", "true", ""},
		{"add_cross_attention", "true", ""},
		{"cross_attention_hidden_size", "64", ""},
		{"tie_encoder_decoder", "true", ""},
		{"text_config", `{"hidden_size": 32}`, `{"hidden_size":32}`},
		{"decoder", `{"hidden_size": 32}`, `{"hidden_size":32}`},
		{"generator", `{}`, ""},
		{"text_encoder", `{}`, ""},
		{"pruned_heads", `{"0": [1]}`, `{"0":[1]}`},
		{"per_layer_config", `{"0": {"intermediate_size": 16}}`, `{"0":{"intermediate_size":16}}`},
		{"fusion_config", `{"patch_embeddings": true}`, `{"patch_embeddings":true}`},
		{"quantization_config", `{"quant_method": "bitsandbytes"}`, "bitsandbytes"},
		{"transformers_weights", `"other.safetensors"`, ""},
		{"auto_map", `{"AutoModelForCausalLM": "modeling.Mine"}`, `{"AutoModelForCausalLM":"modeling.Mine"}`},
		{"dtype", `"float8_e4m3fn"`, ""},
		{"torch_dtype", `"float64"`, ""},
		{"attn_implementation", `"kernels-community/attention"`, ""},
		{"_attn_implementation", `{"": "mine"}`, `{"":"mine"}`},
		{"experts_implementation", `"mine"`, ""},
		{"architectures", `["OlmoModel"]`, ""},
		{"architectures", `[]`, ""},
		{"tie_word_embeddings", "1", ""},
		{"tie_word_embeddings", "null", ""},
		{"clip_qkv", "true", ""},
		{"clip_qkv", "0", ""},
		{"clip_qkv", `{"__float__": "Infinity"}`, `{"__float__":"Infinity"}`},
		{"head_dim", "32", ""},
		{"pad_token_id", "-1", ""},
		{"eos_token_id", "[1, 2]", "[1,2]"},
		{"eos_token_id", "1.0", ""},
		{"max_position_embeddings", "null", ""},
		{"initializer_range", "1e400", ""},
		{"num_key_value_heads", "2.0", ""},
		{"residual_multiplier", "0.5", ""},
		{"mlp_layer_types", `["dense", "sparse"]`, `["dense","sparse"]`},
	} {
		for _, architecture := range architectures() {
			family := families[architecture]
			if family.scaling && strings.HasPrefix(test.field, "rope_") || // see TestConfigJSONOfLlama
				slices.Contains(family.ignored, test.field) || !family.clip && test.field == "clip_qkv" ||
				family.windows != noWindows && test.field == "sliding_window" ||
				family.windows == lastLayers && !family.windowSwitch && strings.Contains(test.value, `"full_attention", "s`) ||
				(family.attentionFields || family.biasField || family.outBias) && test.field == "attention_bias" ||
				family.multipliers && test.field == "residual_multiplier" ||
				family.rotaryPart != 0 && test.field == "partial_rotary_factor" ||
				family.headDim && test.field == "head_dim" {
				continue
			}
			_, err := readConfigJSON(strings.NewReader(minimalConfig(architecture, fmt.Sprintf("%q: %s", test.field,
				test.value))), "dir/config.json")
			shown := test.shown
			if shown == "" {
				shown = test.value
			}
			if err == nil || !strings.HasPrefix(err.Error(), "dir/config.json: ") ||
				!strings.Contains(err.Error(), test.field) || !strings.Contains(err.Error(), shown) {
				t.Errorf("%s, %s: %s: error %v, want one with the file, the field and %s", architecture, test.field,
					test.value, err, shown)
			}
		}
	}
	for field, value := range map[string]string{"norm_topk_prob": "1", "rms_norm_eps": "null",
		"router_aux_loss_coef": `"x"`, "num_local_experts": "4"} {
		if _, err := readConfigJSON(strings.NewReader(minimalConfig(OLMoE, fmt.Sprintf("%q: %s", field, value))),
			"config.json"); err == nil ||
			!strings.Contains(err.Error(), field) || !strings.Contains(err.Error(), value) {
			t.Errorf("%s: %s: %v", field, value, err)
		}
	}
}

func TestConfigJSONOfLlama(t *testing.T) {
	llama3 := `{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0, ` +
		`"original_max_position_embeddings": 64}`
	for _, test := range []struct{ changes, problem string }{
		{changes: `"rope_scaling": null`},
		{changes: `"rope_scaling": {"type": "linear", "factor": 2.0}`},
		{changes: `"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}`},
		{changes: `"rope_scaling": ` + llama3},
		{changes: `"rope_theta": 9, "rope_parameters": ` + llama3 + `, "rope_scaling": ` + llama3},
		{changes: `"max_position_embeddings": 128, "rope_scaling": {"rope_type": "yarn", "factor": 2, ` +
			`"original_max_position_embeddings": 64, "beta_fast": 16.0, "mscale": null, "truncate": true}`},
		{`"rope_scaling": {"rope_type": "longrope", "factor": 2.0}`, `rope_type is "longrope"; supported are "default"`},
		{`"rope_scaling": {"type": "linear"}`, "rope_scaling.factor is 0"},
		{`"rope_scaling": {"type": "linear", "factor": 0.5}`, "rope_scaling.factor is 0.5"},
		{`"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}`, "beta_fast is 3, but the type linear has no"},
		{`"rope_scaling": {"rope_type": "llama3", "factor": 8}`, "_factor is 0; llama3 needs"},
		{`"rope_scaling": ` + strings.Replace(llama3, "4.0", "0.5", 1), "it must be below high_freq_factor"},
		{`"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 64}`,
			"it must be max_position_embeddings 2048 / original_max_position_embeddings 64"},
		{changes: `"rope_scaling": {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 64, ` +
			`"truncate": false}`},
		{`"rope_scaling": {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 64, "truncate": null}`,
			"truncate is null"},
		{`"rope_scaling": {"rope_type": "linear", "factor": 2, "truncate": false}`, "truncate is false, but the type linear"},
		{`"rope_parameters": ` + llama3 + `, "rope_scaling": ` + llama3, "both set, and differ"}, // theta of transformers 4
		{`"rope_theta": 9, "rope_parameters": {"rope_type": "default"}, "rope_scaling": ` + llama3,
			"both set, and differ"},
		{changes: `"head_dim": 24`},
		{changes: `"head_dim": 16`}, // hidden_size / num_attention_heads
		{`"head_dim": 25`, "head_dim is 25; rotary embedding needs an even"},
		{`"head_dim": 0`, "head_dim is 0; write null"},
		{`"head_dim": -2`, "head_dim is -2"},
		{`"clip_qkv": null`, "unknown field clip_qkv"},
		{`"mlp_bias": true`, "mlp_bias is true"},
		{`"pretraining_tp": 2`, "pretraining_tp is 2"},
		{`"rms_norm_eps": 0`, "rms_norm_eps is 0"},
	} {
		c, err := readConfigJSON(strings.NewReader(minimalConfig(Llama, test.changes)), "config.json")
		switch {
		case test.problem != "" && (err == nil || !strings.Contains(err.Error(), test.problem)):
			t.Errorf("%s: error %v, want %s", test.changes, err, test.problem)
		case test.problem == "" && err != nil:
			t.Errorf("%s: %v", test.changes, err)
		case err == nil: // WriteConfigJSON keeps all fields
			var text strings.Builder
			if err := WriteConfigJSON(&text, c, "F32"); err != nil {
				t.Fatal(err)
			}
			if again, err := readConfigJSON(strings.NewReader(text.String()), "config.json"); err != nil || again != c {
				t.Errorf("%s: %v\n%+v\n%+v", text.String(), err, again, c)
			}
		}
	}
}

// Mistral has other defaults than the other families: a window, and eight heads of keys. null is no
// window.
func TestConfigJSONOfMistral(t *testing.T) {
	text := minimalConfig(Mistral, `"sliding_window": null`)
	c, err := readConfigJSON(strings.NewReader(strings.Replace(text, `"num_attention_heads": 4, `+
		`"num_key_value_heads": 4`, `"num_attention_heads": 16`, 1)), "config.json")
	if err != nil || c.KVHeads != 8 {
		t.Errorf("%d heads of keys, want 8; %v", c.KVHeads, err)
	}
	var written strings.Builder
	if err := WriteConfigJSON(&written, c, "F32"); err != nil ||
		!strings.Contains(written.String(), `"sliding_window": null`) {
		t.Errorf("%v: %s has a window in transformers", err, written.String())
	}
	c, err = readConfigJSON(strings.NewReader(minimalConfig(Mistral, `"bos_token_id": 1`)), "config.json")
	if err != nil || c.SlidingWindow != 4096 {
		t.Errorf("a window of %d, want 4096; %v", c.SlidingWindow, err)
	}
}

// Qwen2's fields of sliding windows have no effect until use_sliding_window is set.
func TestConfigJSONOfQwen2(t *testing.T) {
	text := minimalConfig(Qwen2, `"use_sliding_window": false, "sliding_window": 131072, "max_window_layers": 28`)
	if _, err := readConfigJSON(strings.NewReader(text), "config.json"); err != nil {
		t.Error(err)
	}
	text = strings.Replace(text, "false", "true", 1)
	c, err := readConfigJSON(strings.NewReader(text), "config.json")
	if err != nil || c.SlidingWindow != 131072 || c.MaxWindowLayers != 28 {
		t.Errorf("%v; %+v", err, c)
	}
}

// Fields of windows are read, refused, and written again.
func TestConfigJSONOfWindows(t *testing.T) {
	const full, sliding = `"full_attention"`, `"sliding_attention"`
	rope := func(full, sliding string) string {
		return fmt.Sprintf(`"rope_parameters": {"full_attention": %s, "sliding_attention": %s}`, full, sliding)
	}
	scaled := `{"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}`
	for _, test := range []struct {
		architecture Architecture
		changes      string
		windows      [2]int // of the two layers
		problem      string
	}{
		{Mistral, `"sliding_window": 5`, [2]int{5, 5}, ""},
		{Mistral, `"sliding_window": 0`, [2]int{}, "sliding_window is 0; write null"},
		{Mistral, `"sliding_window": -1`, [2]int{}, "sliding_window is -1"},
		{Mistral, `"sliding_window": null, "layer_types": [` + full + ", " + sliding + "]", [2]int{}, "for layer 1"},
		{Mixtral, `"sliding_window": null`, [2]int{}, ""},
		{Mixtral, `"sliding_window": 5`, [2]int{5, 5}, ""},
		{Qwen3MoE, `"use_sliding_window": true, "sliding_window": 5`, [2]int{5, 5}, ""},
		{Qwen3MoE, `"use_sliding_window": false, "sliding_window": 5`, [2]int{}, ""},
		{Qwen3, `"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1`, [2]int{0, 5}, ""},
		{Qwen3, `"use_sliding_window": true, "sliding_window": null`, [2]int{}, ""},
		{Qwen3, `"use_sliding_window": true`, [2]int{}, ""}, // the first 28 layers have no window
		{Qwen3, `"use_sliding_window": true, "layer_types": [` + full + ", " + sliding + "]", [2]int{0, 4096}, ""},
		{Qwen3, `"use_sliding_window": true, "layer_types": [` + sliding + ", " + full + "]", [2]int{},
			`layer_types is "full_attention" for layer 1`},
		{OLMo3, `"eos_token_id": 3`, [2]int{4096, 4096}, ""},
		{OLMo3, `"sliding_window": 5, "layer_types": [` + sliding + ", " + sliding + "]", [2]int{5, 5}, ""},
		{OLMo3, `"sliding_window": null`, [2]int{}, "sliding_window is 0"},
		{OLMo3, `"layer_types": [` + full + ", " + sliding + "]", [2]int{}, "for layer 0"},
		{OLMo3, `"rope_theta": 10000`, [2]int{}, "rope_theta must be 500000"},
		{OLMo3, `"rope_theta": 9, ` + rope(scaled, `{"rope_type": "default", "rope_theta": 9}`), [2]int{4096, 4096}, ""},
		{OLMo3, `"rope_theta": 9, ` + rope(scaled, `{"rope_type": "default", "rope_theta": 8}`), [2]int{}, "rope_theta"},
		{OLMo3, `"rope_theta": 9, ` + rope(scaled, scaled), [2]int{}, "and no scaling"},
		{OLMo3, `"rope_parameters": {"rope_theta": 500000}`, [2]int{}, "must have full_attention and sliding_attention"},
		{OLMo2, `"sliding_window": 5`, [2]int{}, "sliding_window is 5"},
		{Qwen2MoE, `"use_sliding_window": false, "sliding_window": 5, "max_window_layers": 1`, [2]int{}, ""},
		{Qwen2MoE, `"use_sliding_window": true`, [2]int{}, "use_sliding_window is true"},
		{Dots1, `"sliding_window": 5`, [2]int{}, ""}, // the first 62 layers have no window
		{Dots1, `"sliding_window": 5, "max_window_layers": 1`, [2]int{0, 5}, ""},
		{Dots1, `"layer_types": [` + full + ", " + sliding + "]", [2]int{0, 4096}, ""},
		{Dots1, `"sliding_window": null`, [2]int{}, ""},
	} {
		c, err := readConfigJSON(strings.NewReader(minimalConfig(test.architecture, test.changes)), "config.json")
		switch {
		case test.problem != "" && (err == nil || !strings.Contains(err.Error(), test.problem)):
			t.Errorf("%s, %s: error %v, want %s", test.architecture, test.changes, err, test.problem)
		case test.problem == "" && err != nil:
			t.Errorf("%s, %s: %v", test.architecture, test.changes, err)
		case err == nil:
			if got := [2]int{c.window(0), c.window(1)}; got != test.windows {
				t.Errorf("%s, %s: windows %d, want %d", test.architecture, test.changes, got, test.windows)
			}
			var text strings.Builder
			if err := WriteConfigJSON(&text, c, "F32"); err != nil {
				t.Fatal(err)
			}
			if again, err := readConfigJSON(strings.NewReader(text.String()), "config.json"); err != nil || again != c {
				t.Errorf("%s: %v\n%+v\n%+v", text.String(), err, again, c)
			}
		}
	}
	c := Config{Architecture: OLMo3, SlidingWindow: 5, Layers: 9}
	for l, want := range []int{5, 5, 5, 0, 5, 5, 5, 0, 5} {
		if got := c.window(l); got != want {
			t.Errorf("OLMo 3, layer %d: a window of %d, want %d", l, got, want)
		}
	}
}

// The heads of Qwen3 have 128 elements unless its config.json has another number.
func TestConfigJSONOfQwen3(t *testing.T) {
	c, err := readConfigJSON(strings.NewReader(minimalConfig(Qwen3, `"tie_word_embeddings": false`)), "config.json")
	if err != nil || c.HeadDim() != 128 {
		t.Errorf("heads of %d elements, want 128; %v", c.HeadDim(), err)
	}
	var written strings.Builder
	c.HeadSize = 0
	if err := WriteConfigJSON(&written, c, "F32"); err != nil ||
		!strings.Contains(written.String(), `"head_dim": 16`) {
		t.Errorf("%v: %s has other heads in transformers", err, written.String())
	}
}

// An expert of Qwen3MoE has its own field of the width. intermediate_size is the width of the
// layers without experts.
func TestConfigJSONOfQwen3MoE(t *testing.T) {
	text := minimalConfig(Qwen3MoE, `"decoder_sparse_step": 1, "mlp_only_layers": []`)
	text = strings.Replace(text, `"intermediate_size": 32`, `"intermediate_size": 5`, 1)
	c, err := readConfigJSON(strings.NewReader(text), "config.json")
	if err != nil || c.IntermediateSize != 32 || c.RouterAuxLossCoef != 0.001 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, test := range []struct {
		step, only string
		dense      LayerSet
		problem    string
	}{
		{"1", "null", "", ""},
		{"2", "[]", "0,2,4,6", ""},
		{"3", "[]", "0-1,3-4,6", ""},
		{"1", "[6, 0, 1, 0]", "0-1,6", ""},
		{"2", "[3, 5]", "0,2-6", ""},
		{"0", "[]", "", "decoder_sparse_step is 0"},
		{"1", "[7]", "", "mlp_only_layers has 7"},
		{"1", "[-1]", "", "mlp_only_layers has -1"},
		{"8", "[]", "", "decoder_sparse_step 8 and mlp_only_layers [] leave no layer with experts"},
	} {
		text := minimalConfig(Qwen3MoE, fmt.Sprintf(`"decoder_sparse_step": %s, "mlp_only_layers": %s`, test.step,
			test.only))
		text = strings.NewReplacer(`"num_hidden_layers": 2`, `"num_hidden_layers": 7`, `"intermediate_size": 32`,
			`"intermediate_size": 5`).Replace(text)
		c, err := readConfigJSON(strings.NewReader(text), "config.json")
		if test.problem != "" {
			if err == nil || !strings.Contains(err.Error(), test.problem) {
				t.Errorf("%s: error %v, want %s", text, err, test.problem)
			}
			continue
		}
		if err != nil || c.DenseLayers != test.dense || c.IntermediateSize != 32 ||
			(c.DenseSize == 5) == (c.DenseLayers == "") {
			t.Errorf("%s: %v, %+v", text, err, c)
		}
		var written strings.Builder
		if err := WriteConfigJSON(&written, c, "F32"); err != nil {
			t.Fatal(err)
		}
		if again, err := readConfigJSON(strings.NewReader(written.String()), "config.json"); err != nil || again != c {
			t.Errorf("%s: %v\n%+v\n%+v", written.String(), err, again, c)
		}
	}
	text = strings.Replace(minimalConfig(Qwen3MoE, `"mlp_only_layers": [1]`), `"intermediate_size": 32, `, "", 1)
	if _, err := readConfigJSON(strings.NewReader(text), "config.json"); err == nil ||
		!strings.Contains(err.Error(), "field intermediate_size is missing") {
		t.Errorf("%s: %v", text, err)
	}
}

// The fields of families with shared experts, and values that would be other models.
func TestConfigJSONOfSharedExperts(t *testing.T) {
	yarn := func(fields string) string {
		return `"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 32, ` +
			`"original_max_position_embeddings": 128` + fields + `}`
	}
	for _, test := range []struct {
		architecture     Architecture
		changes, problem string // of a part of the error, "" for none
	}{
		{DeepSeekV3, `"num_nextn_predict_layers": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"`, ""},
		{DeepSeekV3, `"auto_map": {"AutoModel": "modeling.Model"}, "seq_aux": true, "aux_loss_alpha": 0.001`, ""},
		{DeepSeekV3, `"rope_interleave": false, "q_lora_rank": 24, "norm_topk_prob": false`, ""},
		{DeepSeekV3, `"n_group": 1, "topk_group": 1, "head_dim": 16, "qk_head_dim": 24`, ""},
		{DeepSeekV3, yarn(`, "mscale": 1.0, "mscale_all_dim": 0.5`), ""},
		{DeepSeekV2, yarn(`, "mscale": 0.707, "mscale_all_dim": 0.707`), ""},
		{DeepSeekV2, `"topk_method": "group_limited_greedy"`, ""},
		{DeepSeekV2, `"norm_topk_prob": false`, ""},
		{DeepSeekV2, `"norm_topk_prob": true`, "norm_topk_prob is true"},
		{DeepSeekV2, `"topk_method": "noaux_tc"`, `topk_method is "noaux_tc"`},
		{DeepSeekV2, `"rope_interleave": true`, "unknown field rope_interleave"},
		{DeepSeekV3, `"topk_method": "greedy"`, `topk_method is "greedy"`},
		{DeepSeekV3, `"scoring_func": "softmax"`, `scoring_func is "softmax"`},
		{DeepSeekV3, `"moe_layer_freq": 2`, "moe_layer_freq is 2"},
		{DeepSeekV3, `"ep_size": 2`, "ep_size is 2"},
		{DeepSeekV3, `"num_nextn_predict_layers": -1`, "num_nextn_predict_layers is -1"},
		{DeepSeekV3, `"attention_bias": true`, "attention_bias is true"},
		{DeepSeekV3, `"head_dim": 24`, "head_dim is 24"},
		{DeepSeekV3, `"qk_head_dim": 25`, "qk_head_dim is 25"},
		{DeepSeekV3, `"num_key_value_heads": 2`, "num_key_value_heads is 2"},
		{DeepSeekV3, `"qk_rope_head_dim": 5`, "qk_rope_head_dim is 5"},
		{DeepSeekV3, `"q_lora_rank": 0`, "q_lora_rank is 0"},
		{DeepSeekV3, `"v_head_dim": 0`, "v_head_dim is 0"},
		{DeepSeekV3, `"n_group": 3`, "n_group is 3"},
		{DeepSeekV3, `"n_group": 8`, "n_group is 8"},
		{DeepSeekV3, `"n_group": null`, "n_group is null"},
		{DeepSeekV3, `"topk_group": 5`, "topk_group is 5"},
		{DeepSeekV3, `"topk_group": 0`, "topk_group 0"},
		{DeepSeekV3, `"num_experts_per_tok": 5, "topk_group": 2`, "topk_group is 2"},
		{DeepSeekV3, `"routed_scaling_factor": 0`, "routed_scaling_factor is 0"},
		{DeepSeekV3, `"n_shared_experts": 0`, "n_shared_experts is 0"},
		{DeepSeekV3, `"first_k_dense_replace": 2`, "first_k_dense_replace 2 leaves no layer"},
		{DeepSeekV3, `"rope_interleave": null`, "rope_interleave is null"},
		{DeepSeekV3, `"quantization_config": {"quant_method": "fp8"}`, "quantization_config is"},
		{DeepSeekV3, `"num_local_experts": 8`, ""},
		{DeepSeekV3, `"num_local_experts": 4`, "n_routed_experts is 8 and num_local_experts 4"},
		{DeepSeekV2, `"num_local_experts": 8`, "unknown field num_local_experts"},
		{Qwen2MoE, `"num_local_experts": 8`, "unknown field num_local_experts"},
		{Dots1, `"num_local_experts": 8, "use_sliding_window": false`, ""},
		{GLM4MoE, `"attention_bias": true, "use_qk_norm": true, "num_nextn_predict_layers": 1`, ""},
		{GLM4MoE, `"partial_rotary_factor": 1`, ""},
		{GLM4MoE, `"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.25}`, ""},
		{GLM4MoE, `"rope_parameters": {"partial_rotary_factor": 0.25}`, ""},
		{GLM4MoE, yarn(``), ""},
		{GLM4MoE, `"attention_bias": null`, "attention_bias is null"},
		{GLM4MoE, `"use_qk_norm": 1`, "use_qk_norm is 1"},
		{GLM4MoE, `"partial_rotary_factor": 0`, "partial_rotary_factor is 0"},
		{GLM4MoE, `"partial_rotary_factor": 1.5`, "partial_rotary_factor is 1.5"},
		{GLM4MoE, `"partial_rotary_factor": 0.2`, "partial_rotary_factor is 0.2, and rotates 3 of 16"},
		{GLM4MoE, `"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}`,
			"partial_rotary_factor is 0.25 and partial_rotary_factor in rope_parameters is 0.5; remove one"},
		{GLM4MoE, `"rope_scaling": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.25}`,
			"partial_rotary_factor in rope_scaling is 0.25"},
		{GLM4MoE, `"hidden_act": "gelu"`, `hidden_act is "gelu"`},
		{Dots1, `"use_qk_norm": true`, "unknown field use_qk_norm"},
		{Dots1, `"scoring_func": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": true`, ""},
		{Dots1, `"scoring_func": "softmax"`, `scoring_func is "softmax"`},
		{Dots1, `"attention_bias": true`, "attention_bias is true"},
		{Dots1, `"moe_layer_freq": 2`, "moe_layer_freq is 2"},
		{Dots1, `"router_aux_loss_coef": 0.1`, "unknown field router_aux_loss_coef"},
		{Ernie45MoE, `"moe_norm_min": 1e-12, "use_bias": false, "num_nextn_predict_layers": 1`, ""},
		{Ernie45MoE, `"moe_use_aux_free": true, "moe_gate": "topk", "moe_capacity": [64, 64, 64]`, ""},
		{Ernie45MoE, `"moe_layer_start_index": 0, "moe_layer_end_index": 0, "moe_num_shared_experts": 0`, ""},
		{Ernie45MoE, `"moe_layer_interval": 2, "moe_layer_end_index": 9, "tie_word_embeddings": false`, ""},
		{Ernie45MoE, `"moe_layer_interval": 0`, "moe_layer_interval is 0"},
		{Ernie45MoE, `"moe_layer_start_index": 2`, "moe_layer_start_index 2, moe_layer_end_index 1 and "},
		{Ernie45MoE, `"moe_layer_end_index": -2`, "moe_layer_end_index -2"},
		{Ernie45MoE, `"moe_layer_end_index": null`, "moe_layer_end_index is null"},
		{Ernie45MoE, `"moe_num_shared_experts": -1`, "moe_num_shared_experts is -1"},
		{Ernie45MoE, `"moe_norm_min": 1e-6`, "moe_norm_min is 1e-6"},
		{Ernie45MoE, `"use_bias": true`, "use_bias is true"},
		{Ernie45MoE, `"num_experts_per_tok": 2`, "unknown field num_experts_per_tok"},
		{Ernie45MoE, `"norm_topk_prob": true`, "unknown field norm_topk_prob"},
		{GPTOSS, `"attention_bias": true, "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "experts_per_token": 4`, ""},
		{GPTOSS, `"layer_types": ["sliding_attention", "full_attention"], "initial_context_length": 4096`, ""},
		{GPTOSS, `"rope_scaling": {"rope_type": "linear", "factor": 2}`, ""},
		{GPTOSS, `"rope_parameters": {"rope_type": "default"}, "rope_scaling": null`, ""},
		{GPTOSS, `"rope_scaling": null`, "rope_scaling is null"},
		{GPTOSS, `"rope_parameters": null`, "rope_scaling is null"},
		{GPTOSS, `"attention_bias": false`, "attention_bias is false"},
		{GPTOSS, `"swiglu_limit": null`, "swiglu_limit is null"},
		{GPTOSS, `"swiglu_limit": 6.5`, "swiglu_limit is 6.5"},
		{GPTOSS, `"swiglu_alpha": 1.7`, "swiglu_alpha is 1.7"},
		{GPTOSS, `"sliding_window": null`, "sliding_window is 0; it must be above 0"},
		{GPTOSS, `"layer_types": ["full_attention", "sliding_attention"]`, "for layer 0"},
		{GPTOSS, `"quantization_config": {"quant_method": "mxfp4"}`, ""},
		{GPTOSS, `"quantization_config": null`, ""},
		{GPTOSS, `"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": null, "dequantize": true}`, ""},
		{GPTOSS, `"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ` +
			`["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}`, ""},
		{GPTOSS, `"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.0"]}`,
			`in quantization_config: modules_to_not_convert has "model.layers.0"`},
		{GPTOSS, `"quantization_config": {"quant_method": "fp8"}`, `in quantization_config: quant_method is "fp8"`},
		{GPTOSS, `"quantization_config": {}`, "in quantization_config: field quant_method is missing"},
		{GPTOSS, `"quantization_config": "mxfp4"`, `quantization_config is "mxfp4"`},
		{GPTOSS, `"quantization_config": {"quant_method": "mxfp4", "group_size": 16}`, "unknown field group_size"},
		{Mixtral, `"quantization_config": {"quant_method": "mxfp4"}`, "quantization_config is"},
		{GPTOSS, `"norm_topk_prob": true`, "unknown field norm_topk_prob"},
		{Mixtral, `"swiglu_limit": 7.0`, "unknown field swiglu_limit"},
		{DeepSeekV3, `"moe_num_shared_experts": 1`, "unknown field moe_num_shared_experts"},
		{GraniteMoE, `"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 6.0`, ""},
		{GraniteMoE, `"attention_multiplier": 0.015625, "position_embedding_type": "rope"`, ""},
		{GraniteMoE, `"attention_multiplier": 0.25, "rope_scaling": {"type": "linear", "factor": 2.0}`, ""},
		{GraniteMoE, `"attention_bias": true`, ""},
		{GraniteMoE, `"attention_bias": null`, "attention_bias is null"},
		{GraniteMoE, `"attention_multiplier": 0`, "attention_multiplier is 0"},
		{GraniteMoE, `"attention_multiplier": null`, "attention_multiplier is null"},
		{GraniteMoE, `"residual_multiplier": -0.22`, "residual_multiplier is -0.22"},
		{GraniteMoE, `"logits_scaling": "6"`, "logits_scaling is \"6\""},
		{GraniteMoE, `"embedding_multiplier": 1e31`, "embedding_multiplier is 1e+31"},
		{GraniteMoE, `"position_embedding_type": "nope"`, "position_embedding_type is \"nope\""},
		{GraniteMoE, `"position_embedding_type": null`, "position_embedding_type is null"},
		{GraniteMoE, `"head_dim": 8`, "head_dim is 8"},
		{GraniteMoE, `"norm_topk_prob": true`, "unknown field norm_topk_prob"},
		{GraniteMoE, `"num_experts": 8`, "unknown field num_experts"},
		{GraniteMoE, `"sliding_window": 8`, "sliding_window"},
		{Mixtral, `"residual_multiplier": 0.5`, "unknown field residual_multiplier"},
		{Qwen2MoE, `"shared_expert_intermediate_size": 5, "qkv_bias": true`, ""},
		{Qwen2MoE, `"shared_expert_intermediate_size": 0`, "shared_expert_intermediate_size is 0"},
		{Qwen2MoE, `"qkv_bias": false`, "qkv_bias is false"},
		{Qwen2MoE, `"head_dim": 24`, "head_dim is 24"},
		{Llama, `"q_lora_rank": 8`, "unknown field q_lora_rank"},
		{Llama, yarn(`, "mscale": 1.0`), "mscale is 1"},
	} {
		text := minimalConfig(test.architecture, test.changes)
		if strings.Contains(test.changes, "num_experts_per_tok") {
			text = strings.Replace(text, `"num_experts_per_tok": 2, `, "", 1)
		}
		c, err := readConfigJSON(strings.NewReader(text), "config.json")
		if test.problem != "" {
			if err == nil || !strings.Contains(err.Error(), test.problem) {
				t.Errorf("%s: error %v, want %s", test.changes, err, test.problem)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", test.changes, err)
			continue
		}
		var written strings.Builder
		if err := WriteConfigJSON(&written, c, "F32"); err != nil {
			t.Fatal(err)
		}
		if again, err := readConfigJSON(strings.NewReader(written.String()), "config.json"); err != nil || again != c {
			t.Errorf("%s: %v\n%+v\n%+v", written.String(), err, again, c)
		}
	}
	c, err := readConfigJSON(strings.NewReader(strings.NewReplacer(`"n_group": 4, `, "", `"topk_group": 2, `, "",
		`: 8, "num_experts_per_tok"`, `: 16, "num_experts_per_tok"`).Replace(minimalConfig(DeepSeekV3,
		`"use_cache": true`))), "config.json")
	if err != nil || c.Groups != 8 || c.TopGroups != 4 || c.RoutingScale != 2.5 || !c.NormTopK || !c.RopeInterleave {
		t.Errorf("defaults of transformers: %+v, %v", c, err)
	}
}

// Mixtral always renormalises, has its own name of the number of experts, and its own base of the
// rotary embedding.
func TestConfigJSONOfMixtral(t *testing.T) {
	c, err := readConfigJSON(strings.NewReader(minimalConfig(Mixtral, `"router_jitter_noise": 0.0`)), "config.json")
	if err != nil || !c.NormTopK || c.RopeTheta != 1e6 || c.Experts != 8 {
		t.Errorf("%+v, %v", c, err)
	}
	var written strings.Builder
	if err := WriteConfigJSON(&written, c, "F32"); err != nil ||
		!strings.Contains(written.String(), `"num_local_experts": 8`) ||
		strings.Contains(written.String(), "norm_topk_prob") || strings.Contains(written.String(), "num_experts\"") {
		t.Errorf("%v: %s", err, written.String())
	}
	noisy, err := readConfigJSON(strings.NewReader(minimalConfig(Mixtral, `"router_jitter_noise": 0.1`)), "config.json")
	if err != nil || noisy.RouterJitter != 0.1 || WriteConfigJSON(&written, noisy, "F32") != nil ||
		!strings.Contains(written.String(), `"router_jitter_noise": 0.1`) {
		t.Errorf("noise of %+v, %v", noisy, err)
	}
	_, err = readConfigJSON(strings.NewReader(minimalConfig(Mixtral, `"router_jitter_noise": 1.5`,
		`"norm_topk_prob": true`, `"num_experts": 8`)), "config.json")
	for _, want := range []string{"unknown field norm_topk_prob",
		"unknown field num_experts"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
	if c.NormTopK = false; c.Validate() == nil {
		t.Error("a Mixtral model without renormalised routing weights is valid")
	}
}

// All problems of a file are in one error.
func TestConfigJSONReportsAllProblems(t *testing.T) {
	_, err := readConfigJSON(strings.NewReader(`{"model_type": "olmo", "vocab_size": "many", "hidden_size": 32.5, "is_causal": false, "tie_word_embedings": true}`), "config.json")
	want := `config.json: vocab_size is "many"; want a whole number
config.json: hidden_size is 32.5; want a whole number
config.json: field intermediate_size is missing
config.json: field num_hidden_layers is missing
config.json: field num_attention_heads is missing
config.json: is_causal is false; only true is supported
config.json: unknown field tie_word_embedings with value true; did you mean "tie_word_embeddings"?`
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant\n%s", err, want)
	}
}

// The supported values are accepted, and so are all fields that do not change the logits.
func TestConfigJSONAcceptsValues(t *testing.T) {
	changes := []string{`"is_causal": true`, `"layer_types": ["full_attention", "full_attention"]`,
		`"layer_types": null`, `"head_dim": 16`, `"head_dim": null`,
		`"rope_scaling": {"rope_type": "default", "type": "default"}`,
		`"rope_parameters": {"rope_theta": 7.5, "partial_rotary_factor": 1.0}`,
		`"rope_theta": 500, "rope_scaling": {"rope_theta": 500.0}`, `"attention_dropout": 0.0`, `"eos_token_id": [7]`,
		`"bos_token_id": -1`}
	for field, list := range hfFixed {
		var values []json.RawMessage
		if err := json.Unmarshal([]byte(list), &values); err != nil || len(values) == 0 {
			t.Fatalf("%s: %s: %v", field, list, err)
		}
		for _, v := range values {
			changes = append(changes, fmt.Sprintf("%q: %s", field, v))
		}
	}
	for _, field := range hfIgnored {
		changes = append(changes, fmt.Sprintf(`%q: {"any": ["value"]}`, field))
	}
	for _, architecture := range architectures() {
		for _, change := range append(changes, fmt.Sprintf(`"architectures": [%q]`, families[architecture].class)) {
			if f := families[architecture]; strings.Contains(change, "rope_") && f.windowsUnscaled {
				continue // see TestConfigJSONOfWindows
			} else if f.latent && change == `"head_dim": null` ||
				f.rotaryPart != 0 && change == `"partial_rotary_factor": null` ||
				f.outBias && change == `"attention_bias": false` ||
				f.ropeScaling.Type != "" && change == `"rope_scaling": null` {
				continue
			} else if f.windows == everySecond {
				change = strings.Replace(change, "full_attention", "sliding_attention", 1)
			} else if f.window > 0 && !f.windowSwitch {
				change = strings.ReplaceAll(change, "full_attention", "sliding_attention")
			}
			if _, err := readConfigJSON(strings.NewReader(minimalConfig(architecture, change)),
				"config.json"); err != nil {
				t.Errorf("%s: %s: %v", architecture, change, err)
			}
		}
	}
}

// Whatever transformers itself writes for these models is accepted. testdata/configs.py made the
// files.
func TestConfigJSONOfTransformers(t *testing.T) {
	text, err := os.ReadFile("testdata/configs.json")
	if err != nil {
		t.Fatal(err)
	}
	var configs map[string]json.RawMessage
	if err := json.Unmarshal(text, &configs); err != nil {
		t.Fatal(err)
	}
	if want := 8 * len(families); len(configs) != want {
		t.Errorf("%d files, want %d", len(configs), want)
	}
	for name, text := range configs {
		c, err := readConfigJSON(strings.NewReader(string(text)), name)
		if err != nil {
			t.Error(err)
			continue
		}
		clip, pad := 8.0, 3
		if !c.family().clip {
			clip = 0
		}
		if c.family().padTokenID != NoToken { // the others have another value than the default
			pad = NoToken
		}
		others := strings.Contains(name, "others")
		if !others {
			clip = 0
		}
		if c.TieEmbeddings != (others != c.family().tied) || c.ClipQKV != clip || (c.KVHeads == 2) != others ||
			(c.PadTokenID == pad) != others {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// docs/formats/config-json.md names every field that is read, in the table where it belongs.
func TestConfigJSONDocumentation(t *testing.T) {
	text, err := os.ReadFile("../docs/formats/config-json.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(text)
	// the names in backticks, in the first cells of each row of a table
	section := func(title string, cells int) map[string]bool {

		_, after, ok := strings.Cut(page, "\n## "+title+"\n")
		if !ok {
			t.Fatalf("no section %q", title)
		}
		after, _, _ = strings.Cut(after, "\n## ")
		names := map[string]bool{}
		for line := range strings.Lines(after) {
			if strings.HasPrefix(line, "|") {
				line = strings.Join(strings.Split(line, "|")[:cells+1], "|")
			} else if cells > 0 {
				continue
			}
			for i, word := range strings.Split(line, "`") {
				if i%2 == 1 {
					names[word] = true
				}
			}
		}
		return names
	}
	used, fixed, ignored := section("Fields that mula uses", 1), section("Fields with one supported value",
		2), section("Fields that mula ignores", 0)
	everyFixed := maps.Clone(hfFixed)
	for _, family := range families {
		maps.Copy(everyFixed, family.fixed)
	}
	var read []string
	for architecture := range families {
		of, _ := fromFieldsOf(t, minimalConfig(architecture, `"use_cache": true`))
		for name := range of.known {
			read = append(read, name)
			_, isFixed := everyFixed[name]
			if name == "architectures" || name == "layer_types" {
				isFixed = true
			}
			if isFixed && !fixed[name] && !used[name] || !isFixed && !used[name] {
				t.Errorf("%s of %s is not where it belongs", name, architecture)
			}
		}
	}
	for name, list := range everyFixed {
		if !fixed[name] {
			t.Errorf("%s is not in the list of fields with one supported value", name)
		}
		for _, value := range strings.Split(list[1:len(list)-1], ", ") {
			if !fixed[value] {
				t.Errorf("%s: the value %s is not named", name, value)
			}
		}
	}
	for _, name := range hfIgnored {
		if !ignored[name] {
			t.Errorf("%s is not in the list of ignored fields", name)
		}
	}
	types := section("Scaled rotary embeddings", 2)
	for kind, fields := range ropeFields {
		for _, name := range append(slices.Concat(fields.required, fields.optional), kind) {
			if !types[name] && kind != "default" {
				t.Errorf("%s is not in the list of rope_types", name)
			}
		}
	}
	all := slices.Concat(read, slices.Collect(maps.Keys(everyFixed)), hfIgnored)
	for _, family := range families {
		for _, name := range family.ignored {
			if !ignored[name] && !fixed[name] && !used[name] {
				t.Errorf("%s is not in the list of ignored fields", name)
			}
		}
		all = append(all, family.ignored...)
	}
	for _, names := range []map[string]bool{used, ignored} {
		for name := range names {
			if name != "aux_loss" && !slices.Contains(all, name) {
				t.Errorf("%s is documented and not known", name)
			}
		}
	}
}

// fromFieldsOf returns what was asked of a config.json.
func fromFieldsOf(t *testing.T, text string) (*hfFields, Config) {
	t.Helper()
	f := &hfFields{known: map[string]bool{}}
	if err := json.Unmarshal([]byte(text), &f.fields); err != nil {
		t.Fatal(err)
	}
	c := f.config()
	if len(f.problems) != 0 {
		t.Fatal(f.problems)
	}
	return f, c
}
