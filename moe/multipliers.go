package moe

import (
	"cmp"
	"math"

	"mula/xpu"
)

// Some families multiply activations by constants (https://arxiv.org/abs/2408.13359; the method is
// in https://arxiv.org/abs/2203.03466, table 8). With embedding E, multipliers e of it, a of scores
// and r of blocks, and a divisor s of logits:
//
//	x₀ = e·E[token]
//	scores = a·q·k, instead of D^(-1/2)·q·k
//	x + r·f(norm(x)) for each block f
//	logits = W·norm(x_L)/s
//
// The final norm is divided by s instead of the logits, which are the larger matrix.

// multipliers lists the multipliers of a configuration by the names of their fields, with the value
// that 0 means.
func (c *Config) multipliers() []multiplier {
	return []multiplier{
		{"embedding_multiplier", &c.EmbeddingMultiplier, 1},
		{"attention_multiplier", &c.AttentionMultiplier, c.headScale()},
		{"residual_multiplier", &c.ResidualMultiplier, 1},
		{"logits_scaling", &c.LogitsScaling, 1},
	}
}

// headScale returns the usual factor of scores, or 0 without heads.
func (c Config) headScale() float64 {
	if c.Heads == 0 {
		return 0
	}
	return 1 / math.Sqrt(float64(c.HeadDim()))
}

// A multiplier is a field of [Config].
type multiplier struct {
	field   string
	value   *float64
	usually float64 // the meaning of 0
}

// validateMultipliers returns an error if a multiplier does not fit the family.
func (c Config) validateMultipliers(bad func(field, format string, args ...any) error) error {
	for _, m := range c.multipliers() {
		switch v := *m.value; {
		case v != 0 && !c.family().multipliers:
			return bad(m.field, "is %g; it must be 0, because a %s model has no such multiplier", v, c.Architecture)
		case !(v >= 0) || v > 0 && (v < 1e-30 || v > 1e30):
			return bad(m.field, "is %g; it must be between 1e-30 and 1e30, or 0 for %g", v, m.usually)
		}
	}
	return nil
}

// multipliers reads the multipliers. transformers has 1 for each that is missing.
func (f *hfFields) multipliers(c *Config) {
	if !c.family().multipliers {
		return
	}
	for _, m := range c.multipliers() {
		*m.value = 1
		if f.read(m.field, m.value); *m.value == 0 {
			f.fail("%s is 0; it must be positive", m.field)
		}
		if *m.value == m.usually {
			*m.value = 0
		}
	}
}

// multiplierFields sets the fields of multipliers in a config.json.
func (c Config) multiplierFields(fields map[string]any) {
	if c.family().multipliers {
		for _, m := range c.multipliers() {
			fields[m.field] = fraction(cmp.Or(*m.value, m.usually))
		}
	}
}

// multiply multiplies the matrix x by a multiplier, where 0 means 1.
func (m *Model) multiply(x xpu.Tensor, by float64) {
	if by != 0 && by != 1 {
		m.dev.Combine(x, x, xpu.Tensor{}, float32(by), 0, 0)
	}
}

// normalizeLast sets ws.h to the input of the head: the final norm, divided by the divisor of
// logits. known means that the statistics of the norm were computed before.
func (m *Model) normalizeLast(known bool) {
	m.dev.Normalize(m.ws.h, m.ws.xL, m.normL(), known)
	m.multiply(m.ws.h, m.cfg.headMultiplier())
}

// headMultiplier returns the factor of the input of the head.
func (c Config) headMultiplier() float64 {
	if c.LogitsScaling == 0 {
		return 0
	}
	return 1 / c.LogitsScaling
}
