package moe

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/moe/safetensors"
	"mula/xpu"
	"mula/xpu/cpu"
)

func mustPreset(t testing.TB, name string) Config {
	t.Helper()
	c, err := Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Parameter counts of the published configurations and the work per token at a sequence length of
// 2048, from the table of Mula models.
func TestPresets(t *testing.T) {
	want := []struct {
		name          string
		total, active int64
		gigaflops     float64
	}{
		{"mula-nano", 198_208, 124_480, 0},
		{"mula-tiny", 9_457_920, 4_739_328, 0},
		{"mula-mini", 261_505_536, 85_344_768, 0},
		{"mula-1b", 1_279_787_008, 1_279_787_008, 7.87},
		{"auroragpt-7b", 5_933_109_248, 5_933_109_248, 0},
		{"mula-7b-a1b", 6_919_161_856, 1_282_017_280, 7.87},
		{"mula-20b-a2b", 20_076_824_576, 2_360_084_480, 15.11},
		{"mula-100b-a7b", 99_987_557_376, 7_578_651_648, 48.04},
		{"mula-220b-a10b", 220_205_681_664, 10_020_719_616, 63.74},
	}
	var names []string
	for _, w := range want {
		names = append(names, w.name)
		c := mustPreset(t, w.name)
		if err := c.Validate(); err != nil {
			t.Error(err)
		}
		if c.TotalParameters() != w.total || c.ActiveParameters() != w.active {
			t.Errorf("%s has %d parameters, %d active; want %d, %d", w.name, c.TotalParameters(), c.ActiveParameters(),
				w.total, w.active)
		}
		if got := c.FLOPsPerToken(2048) / 1e9; w.gigaflops != 0 && math.Abs(got-w.gigaflops) > 0.005 {
			t.Errorf("%s: %.3f GFLOP a token, want %.2f", w.name, got, w.gigaflops)
		}
	}
	if !slices.Equal(Presets(), names) {
		t.Errorf("presets %v, want %v", Presets(), names)
	}
	if _, err := Preset("mula-2b"); err == nil || !strings.Contains(err.Error(), "mula-7b-a1b") {
		t.Errorf("unknown preset: %v; want the known names", err)
	}
}

// The parameters that a model lists are as many as its configuration counts, whatever the
// architecture.
func TestParametersCount(t *testing.T) {
	for name, c := range gradientCases(t) {
		m := newModel(t, c, 1)
		seen, n := map[string]bool{}, int64(0)
		for _, p := range m.Parameters() {
			size := 1
			for _, d := range p.Shape {
				size *= d
			}
			if p.Weight.Elements() != size || p.Grad.Elements() != size || seen[p.Name] {
				t.Errorf("%s: parameter %s of shape %v has %d weights and %d gradients, or occurs twice", name, p.Name,
					p.Shape, p.Weight.Elements(), p.Grad.Elements())
			}
			seen[p.Name] = true
			n += int64(size)
		}
		if n != c.TotalParameters() {
			t.Errorf("%s: %d weights are listed, the configuration counts %d", name, n, c.TotalParameters())
		}
	}
}

func TestValidateNamesTheField(t *testing.T) {
	dense := func(layers LayerSet, width int) func(c *Config) {
		return func(c *Config) { c.Architecture, c.DenseLayers, c.DenseSize = Qwen3MoE, layers, width }
	}
	granite := func(change func(c *Config)) func(c *Config) {
		return func(c *Config) { c.Architecture, c.NormTopK = GraniteMoE, true; change(c) }
	}
	for _, test := range []struct {
		change func(c *Config)
		want   string
	}{
		{func(c *Config) { c.Architecture = "gpt2" }, "model_type"},
		{func(c *Config) { c.VocabSize = 0 }, "vocab_size"},
		{func(c *Config) { c.VocabSize = math.MaxInt }, "vocab_size"},
		{func(c *Config) { c.HiddenSize = -1 }, "hidden_size"},
		{func(c *Config) { c.HiddenSize = 66 }, "hidden_size"},
		{func(c *Config) { c.HiddenSize = 60 }, "hidden_size"},
		{func(c *Config) { c.IntermediateSize = 0 }, "intermediate_size"},
		{func(c *Config) { c.Layers = 0 }, "num_hidden_layers"},
		{func(c *Config) { c.Heads = 0 }, "num_attention_heads"},
		{func(c *Config) { c.KVHeads = 3 }, "num_key_value_heads"},
		{func(c *Config) { c.Experts = 0 }, "num_experts"},
		{func(c *Config) { c.Experts = 1 << 20 }, "num_experts"},
		{func(c *Config) { c.ExpertsPerToken = 9 }, "num_experts_per_tok"},
		{func(c *Config) { c.Architecture = OLMo }, "num_experts"},
		{func(c *Config) { c.Architecture, c.NormTopK = OLMo, true }, "norm_topk_prob"},
		{func(c *Config) { c.Architecture, c.Experts, c.ExpertsPerToken, c.NormEps = OLMo, 0, 0, 1e-6 },
			"rms_norm_eps"},
		{func(c *Config) { c.MaxPositions = 0 }, "max_position_embeddings"},
		{func(c *Config) { c.RopeTheta = math.NaN() }, "rope_theta"},
		{func(c *Config) { c.NormEps = 0 }, "rms_norm_eps"},
		{func(c *Config) { c.ClipQKV = -1 }, "clip_qkv"},
		{func(c *Config) { c.ClipQKV = math.Inf(1) }, "clip_qkv"},
		{func(c *Config) { c.InitStd = math.Inf(1) }, "initializer_range"},
		{func(c *Config) { c.InitCutoff = math.Inf(1) }, "initializer_cutoff"},
		{func(c *Config) { c.RouterAuxLossCoef = math.Inf(1) }, "router_aux_loss_coef"},
		{func(c *Config) { c.InitCutoff = 0.01 }, "initializer_cutoff"},
		{func(c *Config) { c.RouterAuxLossCoef = math.NaN() }, "router_aux_loss_coef"},
		{func(c *Config) { c.PadTokenID = 512 }, "pad_token_id"},
		{func(c *Config) { c.EOSTokenID = -2 }, "eos_token_id"},
		{func(c *Config) { c.DenseLayers, c.DenseSize = "0", 8 }, "dense_layers"}, // not of OLMoE
		{func(c *Config) { c.DenseSize = 8 }, "dense_intermediate_size"},
		{dense("0", 0), "dense_intermediate_size"},
		{dense("2", 8), "dense_layers"},
		{dense("0-1", 8), "dense_layers"},
		{dense("0,0", 8), "dense_layers"},
		{dense("1-0", 8), "dense_layers"},
		{dense("00", 8), "dense_layers"},
		{dense("-1", 8), "dense_layers"},
		{dense("0-99999999999999999999", 8), "dense_layers"},
		{dense("0-1000000000000", 8), "dense_layers"},
		{dense(",", 8), "dense_layers"},
		{func(c *Config) { c.EmbeddingMultiplier = 2 }, "embedding_multiplier"}, // not of OLMoE
		{granite(func(c *Config) { c.EmbeddingMultiplier = math.NaN() }), "embedding_multiplier"},
		{granite(func(c *Config) { c.AttentionMultiplier = -1 }), "attention_multiplier"},
		{granite(func(c *Config) { c.ResidualMultiplier = math.Inf(1) }), "residual_multiplier"},
		{granite(func(c *Config) { c.LogitsScaling = 1e-38 }), "logits_scaling"},
		{granite(func(c *Config) { c.NormTopK = false }), "norm_topk_prob"},
		{granite(func(c *Config) { c.HeadSize = 8 }), "head_dim"},
		{func(c *Config) { // experts in layers 0, 2 and 3
			c.Architecture, c.Layers, c.NormTopK, c.DenseLayers, c.DenseSize = Ernie45MoE, 4, true, "1", 8
		}, "dense_layers"},
	} {
		c := mustPreset(t, "mula-nano")
		test.change(&c)
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), test.want+" ") {
			t.Errorf("%+v: error %v, want one about %s", c, err, test.want)
		}
		if _, err := New(c, cpu.New(1, xpu.FP32)); err == nil {
			t.Errorf("New takes an invalid configuration (%s)", test.want)
		}
	}
}

func TestConfigJSONRoundTrip(t *testing.T) {
	configs := gradientCases(t)
	for _, name := range Presets() {
		configs[name] = mustPreset(t, name)
	}
	for name, c := range configs {
		var b bytes.Buffer
		if err := WriteConfigJSON(&b, c, safetensors.BF16); err != nil {
			t.Fatal(err)
		}
		got, err := readConfigJSON(&b, name)
		if err != nil {
			t.Fatal(err)
		}
		if got != c {
			t.Errorf("%s: read %+v, wrote %+v", name, got, c)
		}
	}
}

// transformers 5 refuses a config.json with an integer where it wants a float.
func TestConfigJSONFloats(t *testing.T) {
	c := mustPreset(t, "mula-nano")
	c.ClipQKV, c.RouterAuxLossCoef, c.InitStd, c.RopeTheta = 2, 0, 1, 1e21
	var b bytes.Buffer
	if err := WriteConfigJSON(&b, c, safetensors.F32); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"clip_qkv": 2.0,`, `"router_aux_loss_coef": 0.0,`, `"initializer_range": 1.0,`,
		`"rope_theta": 1e+21`, `"rms_norm_eps": 0.00001,`, `"attention_dropout": 0.0,`} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%s is not in\n%s", want, b.String())
		}
	}
}

// Fields are read as transformers reads them; what would compute another model is refused by name.
func TestReadConfigJSON(t *testing.T) {
	const sizes = `"vocab_size": 60000, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4`
	const olmoe = `{"model_type": "olmoe", "num_experts_per_tok": 2, ` + sizes
	for _, test := range []struct {
		name, json string
		check      func(c Config) bool
		want       string // of the error
	}{
		{"class defaults", olmoe + `, "num_experts": 8}`, func(c Config) bool {
			return c.PadTokenID == 1 && c.EOSTokenID == 50279 && c.BOSTokenID == NoToken && c.MaxPositions == 4096 &&
				c.NormEps == 1e-5 &&
				c.RopeTheta == 10000 && c.KVHeads == 4 && c.RouterAuxLossCoef == 0.01 && !c.TieEmbeddings &&
				c.InitStd == 0.02
		}, ""},
		{"dense defaults", `{"model_type": "olmo", ` + sizes + `}`,
			func(c Config) bool { return c.MaxPositions == 2048 && c.NormEps == 1e-5 }, ""},
		{"alias of num_experts", olmoe + `, "num_local_experts": 8}`, func(c Config) bool { return c.Experts == 8 },
			""},
		{"null ids", olmoe + `, "num_experts": 8, "pad_token_id": null, "eos_token_id": [7]}`,
			func(c Config) bool { return c.PadTokenID == NoToken && c.EOSTokenID == 7 }, ""},
		{"rope of version 4", olmoe + `, "num_experts": 8, "rope_theta": 500, "rope_scaling": null}`,
			func(c Config) bool { return c.RopeTheta == 500 }, ""},
		{"rope of version 5",
			olmoe + `, "num_experts": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 700.5}}`,
			func(c Config) bool { return c.RopeTheta == 700.5 }, ""},
		{"two bases", olmoe + `, "num_experts": 8, "rope_theta": 500, "rope_parameters": {"rope_theta": 700}}`, nil,
			"rope_theta is 500 and rope_theta in rope_parameters is 700"},
		{"scaled rope", olmoe + `, "num_experts": 8, "rope_scaling": {"type": "linear", "factor": 2}}`, nil,
			`in rope_scaling: type is "linear"`},
		{"scaled rope of version 5", olmoe + `, "num_experts": 8, "rope_parameters": {"rope_type": "yarn"}}`, nil,
			`in rope_parameters: rope_type is "yarn"`},
		{"rope by kind of layer",
			olmoe + `, "num_experts": 8, "rope_parameters": {"full_attention": {"rope_type": "default"}}}`, nil,
			`in rope_parameters: full_attention is {"rope_type":"default"}`},
		{"two numbers of experts", olmoe + `, "num_experts": 8, "num_local_experts": 4}`, nil,
			"num_experts is 8 and num_local_experts 4"},
		{"sliding window", olmoe + `, "num_experts": 8, "sliding_window": 512}`, nil, "sliding_window"},
		{"rope of the wrong type", olmoe + `, "num_experts": 8, "rope_parameters": {"rope_theta": "x"}}`, nil,
			"rope_parameters"},
		{"renormalised", olmoe + `, "num_experts": 8, "norm_topk_prob": null}`, nil, "norm_topk_prob"},
		{"bias", olmoe + `, "num_experts": 8, "attention_bias": true}`, nil, "attention_bias"},
		{"dropout", olmoe + `, "num_experts": 8, "attention_dropout": 0.1}`, nil, "attention_dropout"},
		{"activation", olmoe + `, "num_experts": 8, "hidden_act": "gelu"}`, nil, "hidden_act"},
		{"head size", olmoe + `, "num_experts": 8, "head_dim": 32}`, nil, "head_dim"},
		{"quantised", olmoe + `, "num_experts": 8, "quantization_config": {}}`, nil, "quantization_config"},
		{"several ends", olmoe + `, "num_experts": 8, "eos_token_id": [1, 2]}`, nil, "eos_token_id is [1,2]"},
		{"clip to nothing", olmoe + `, "num_experts": 8, "clip_qkv": 0}`, nil, "clip_qkv"},
		{"no experts", olmoe + `}`, nil, "num_experts is missing"},
		{"no sizes", `{"model_type": "olmoe"}`, nil, "vocab_size is missing"},
		{"wrong type", `{"model_type": "olmo", "vocab_size": "many"}`, nil, "vocab_size"},
		{"other model", `{"model_type": "gpt2"}`, nil, `model_type is "gpt2"`},
		{"refused family", `{"model_type": "phimoe"}`, nil, `model_type is "phimoe", which is not supported, because `},
		{"not JSON", `model_type: olmoe`, nil, "invalid character"},
	} {
		c, err := readConfigJSON(strings.NewReader(test.json), "x/config.json")
		if test.want != "" {
			if err == nil || !strings.Contains(err.Error(), test.want) ||
				!strings.Contains(err.Error(), "x/config.json") {
				t.Errorf("%s: error %v, want one with the file's name and %q", test.name, err, test.want)
			}
			continue
		}
		if err != nil || !test.check(c) {
			t.Errorf("%s: %+v, %v", test.name, c, err)
		}
	}
}

func FuzzReadConfigJSON(f *testing.F) {
	files, err := filepath.Glob("testdata/hf-*/config.json")
	if err != nil || len(files) == 0 {
		f.Fatal("no seeds", err)
	}
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := readConfigJSON(bytes.NewReader(text), "config.json")
		if err != nil {
			return
		}
		var b bytes.Buffer
		if err := WriteConfigJSON(&b, c, safetensors.F32); err != nil {
			t.Fatalf("read %+v, which cannot be written: %v", c, err)
		}
		if again, err := readConfigJSON(&b, "again"); err != nil || again != c {
			t.Fatalf("read %+v, then %+v, %v", c, again, err)
		}
		if c.TotalParameters() < c.ActiveParameters() || c.ActiveParameters() <= 0 ||
			c.Memory(Pass{Rows: 1, SequenceLength: 1}).Total() <= 0 {
			t.Fatalf("%+v: sizes overflow", c)
		}
	})
}
