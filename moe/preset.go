package moe

import (
	"fmt"
	"slices"
	"strings"
)

// preset is one row of the table of presets: the sizes that differ between them.
type preset struct {
	name             string
	arch             Architecture
	v, h, a, l       int
	experts, topK, i int
	positions        int
	kv               int  // key and value heads; 0: as many as heads
	dolma            bool // vocabulary of the tokenizer allenai/gpt-neox-olmo-dolma-v1_5: padding 1, end of text 50279
}

// The models of the Mula paper (https://arxiv.org/abs/2604.00785; sizes from
// https://github.com/IntelLabs/Optimus-LM), and three small models of the same shape for tests and
// benchmarks. The small vocabularies belong to the user's own tokenizer, so they have no special
// ids.
var presets = []preset{
	{name: "mula-nano", arch: OLMoE, v: 512, h: 64, a: 4, l: 2, experts: 8, topK: 2, i: 32, positions: 4096},
	{name: "mula-tiny", arch: OLMoE, v: 4096, h: 256, a: 4, l: 4, experts: 16, topK: 4, i: 128, positions: 4096},
	{name: "mula-mini", arch: OLMoE, v: 50304, h: 512, a: 8, l: 8, experts: 64, topK: 8, i: 256, positions: 4096,
		dolma: true},
	{name: "mula-1b", arch: OLMo, v: 50304, h: 2048, a: 16, l: 16, i: 8192, positions: 2048, dolma: true},
	// The arguments that Argonne's Megatron-DeepSpeed has for AuroraGPT-7B
	// (https://github.com/argonne-lcf/Megatron-DeepSpeed, ALCF/helpers.sh), with Llama 2's
	// tokenizer.
	{name: "auroragpt-7b", arch: Llama, v: 32000, h: 4096, a: 32, kv: 8, l: 32, i: 11008, positions: 4096},
	{name: "mula-7b-a1b", arch: OLMoE, v: 50304, h: 2048, a: 16, l: 16, experts: 64, topK: 8, i: 1024, positions: 4096,
		dolma: true},
	{name: "mula-20b-a2b", arch: OLMoE, v: 50304, h: 2048, a: 16, l: 32, experts: 96, topK: 8, i: 1024, positions: 4096,
		dolma: true},
	{name: "mula-100b-a7b", arch: OLMoE, v: 50304, h: 3072, a: 24, l: 48, experts: 144, topK: 8, i: 1536,
		positions: 4096, dolma: true},
	{name: "mula-220b-a10b", arch: OLMoE, v: 50304, h: 3072, a: 24, l: 64, experts: 240, topK: 8, i: 1536,
		positions: 4096, dolma: true},
}

// Presets lists the names that [Preset] accepts, from the smallest model to the largest.
func Presets() []string {
	names := make([]string, len(presets))
	for i, p := range presets {
		names[i] = p.name
	}
	return names
}

// Preset returns the configuration of a named model.
func Preset(name string) (Config, error) {
	i := slices.IndexFunc(presets, func(p preset) bool { return p.name == name })
	if i < 0 {
		return Config{}, fmt.Errorf("unknown preset %q; the choices are %s", name, strings.Join(Presets(), ", "))
	}
	p := presets[i]
	if p.kv == 0 {
		p.kv = p.a
	}
	c := Config{
		Architecture: p.arch, VocabSize: p.v, HiddenSize: p.h, IntermediateSize: p.i, Layers: p.l, Heads: p.a,
		KVHeads: p.kv,
		Experts: p.experts, ExpertsPerToken: p.topK, MaxPositions: p.positions, RopeTheta: 10000, NormEps: 1e-5,
		PadTokenID: NoToken, BOSTokenID: NoToken, EOSTokenID: NoToken, InitStd: 0.02,
	}
	if c.moe() {
		c.RouterAuxLossCoef = 0.01
	}
	switch {
	case p.dolma:
		c.PadTokenID, c.EOSTokenID = 1, 50279
	case p.arch == Llama:
		c.BOSTokenID, c.EOSTokenID = 1, 2
	}
	return c, nil
}
