package moe

import (
	"fmt"
	"maps"
	"math"
	"slices"
)

// RopeScaling changes the frequencies of the rotary embedding, so that a model can use more
// positions than it was pretrained with. Its fields have their names in rope_scaling of
// config.json. The zero value changes nothing.
type RopeScaling struct {
	// "" or "default": no change. "linear": all frequencies divided by Factor. "dynamic": no change
	// up to max_position_embeddings, which is the limit of this package. "llama3": low frequencies
	// divided by Factor. "yarn": low frequencies divided by Factor, and queries and keys multiplied
	// by AttentionFactor (https://arxiv.org/abs/2309.00071).
	Type   string  `yaml:"rope_type,omitempty"`
	Factor float64 `yaml:"factor,omitempty"` // at least 1

	// llama3 and yarn: max_position_embeddings of the pretraining.
	OriginalMaxPositions int `yaml:"original_max_position_embeddings,omitempty"`

	// llama3: frequencies with at least HighFreqFactor periods in the original positions are kept,
	// and those with at most LowFreqFactor are divided; between them lies a linear transition.
	LowFreqFactor  float64 `yaml:"low_freq_factor,omitempty"`
	HighFreqFactor float64 `yaml:"high_freq_factor,omitempty"`

	// yarn: frequencies with at least BetaFast periods in the original positions are kept, and
	// those with at most BetaSlow are divided.
	BetaFast        float64 `yaml:"beta_fast,omitempty"`        // 0 means 32
	BetaSlow        float64 `yaml:"beta_slow,omitempty"`        // 0 means 1
	AttentionFactor float64 `yaml:"attention_factor,omitempty"` // 0 means 0.1·ln(Factor) + 1

	// yarn: the bounds of the transition are not rounded to whole pairs of elements; truncate is
	// false in config.json
	NoTruncate bool `yaml:"no_truncate,omitempty"`

	// yarn with latent attention: with both, AttentionFactor is the quotient of
	// 0.1·MScale·ln(Factor) + 1 and 0.1·MScaleAllDim·ln(Factor) + 1, if it is 0. The attention's
	// scores are multiplied by the square of the second.
	MScale       float64 `yaml:"mscale,omitempty"`
	MScaleAllDim float64 `yaml:"mscale_all_dim,omitempty"`
}

// yarnScale returns the scale of YaRN for a factor of positions, with a multiplier of its
// logarithm.
func yarnScale(factor, multiplier float64) float64 {
	return 0.1*multiplier*math.Log(max(1, factor)) + 1
}

// kind returns the type, "default" if there is none.
func (r RopeScaling) kind() string {
	if r.Type == "" {
		return "default"
	}
	return r.Type
}

// ropeFields lists the fields of each type besides rope_type and rope_theta, and which of them are
// required.
var ropeFields = map[string]struct{ required, optional []string }{
	"default": {},
	"linear":  {required: []string{"factor"}},
	"dynamic": {required: []string{"factor"}, optional: []string{"original_max_position_embeddings"}},
	"llama3": {required: []string{"factor", "low_freq_factor", "high_freq_factor",
		"original_max_position_embeddings"}},
	"yarn": {required: []string{"factor", "original_max_position_embeddings"},
		optional: []string{"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}},
}

// ropeTypes lists the values of rope_type that a family supports.
func (f *family) ropeTypes() []string {
	if !f.scaling {
		return []string{"default"}
	}
	return slices.Sorted(maps.Keys(ropeFields))
}

// numbers returns the fields by name.
func (r *RopeScaling) numbers() map[string]*float64 {
	return map[string]*float64{"factor": &r.Factor, "low_freq_factor": &r.LowFreqFactor,
		"high_freq_factor": &r.HighFreqFactor, "beta_fast": &r.BetaFast, "beta_slow": &r.BetaSlow,
		"attention_factor": &r.AttentionFactor, "mscale": &r.MScale, "mscale_all_dim": &r.MScaleAllDim}
}

func (r RopeScaling) validate(f *family) error {
	bad := func(field, format string, args ...any) error {
		return &FieldError{"rope_scaling." + field, fmt.Sprintf(format, args...)}
	}
	fields, known := ropeFields[r.kind()]
	switch {
	case !known || r.kind() != "default" && !f.scaling:
		return bad("rope_type", "is %q; supported are %q", r.Type, f.ropeTypes())
	}
	set := map[string]float64{"original_max_position_embeddings": float64(r.OriginalMaxPositions)}
	for name, v := range r.numbers() {
		set[name] = *v
	}
	if slices.Contains(fields.required, "factor") && r.Factor < 1 {
		return bad("factor", "is %g; %s needs a number of at least 1", r.Factor, r.Type)
	}
	for _, name := range fields.required {
		if v := set[name]; !(v > 0) || math.IsInf(v, 0) {
			return bad(name, "is %g; %s needs a number above 0", v, r.Type)
		}
		delete(set, name)
	}
	for _, name := range fields.optional {
		if v := set[name]; !(v >= 0) || math.IsInf(v, 0) {
			return bad(name, "is %g; it must be positive, or 0 for the default", v)
		}
		delete(set, name)
	}
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if v := set[name]; v != 0 {
			return bad(name, "is %g, but the type %s does not use it; remove it", v, r.kind())
		}
	}
	if r.NoTruncate && r.Type != "yarn" {
		return bad("no_truncate", "is true, but the type %s does not use it; remove it", r.kind())
	}
	for _, name := range []string{"mscale", "mscale_all_dim"} {
		if v := *r.numbers()[name]; v != 0 && !f.latent {
			return bad(name, "is %g; it must be 0 without latent attention", v)
		}
	}
	if r.Type == "llama3" && r.LowFreqFactor >= r.HighFreqFactor {
		return bad("low_freq_factor", "is %g; it must be below high_freq_factor %g", r.LowFreqFactor, r.HighFreqFactor)
	}
	return nil
}

// frequencies returns the angle of a position step for each pair of a head's elements, and a factor
// of all cosines and sines. It rounds to float32 where transformers does.
func (c Config) frequencies() (f []float32, factor float32) {
	dim, base, r := float64(c.ropeSize()), float64(float32(c.RopeTheta)), c.RopeScaling
	f, factor = make([]float32, c.ropeSize()/2), 1
	powers := make([]float32, len(f)) // of the base
	for j := range f {
		powers[j] = float32(math.Pow(base, float64(float32(2*j)/float32(dim))))
		f[j] = 1 / powers[j]
	}
	by := float32(r.Factor)
	switch r.kind() {
	case "linear":
		for j := range f {
			f[j] /= by
		}
	case "llama3":
		low, high, original := float32(r.LowFreqFactor), float32(r.HighFreqFactor), float32(r.OriginalMaxPositions)
		for j, frequency := range f {
			periods := original / (float32(2*math.Pi) / frequency)
			switch {
			case periods < low:
				f[j] = frequency / by
			case periods <= high:
				kept := (periods - low) / (high - low)
				f[j] = (1-kept)*frequency/by + kept*frequency
			}
		}
	case "yarn":
		at := func(periods, otherwise float64) float64 { // the pair with this number of periods
			if periods == 0 {
				periods = otherwise
			}
			return dim * math.Log(float64(r.OriginalMaxPositions)/(periods*2*math.Pi)) / (2 * math.Log(c.RopeTheta))
		}
		first, last := at(r.BetaFast, 32), at(r.BetaSlow, 1)
		if !r.NoTruncate {
			first, last = math.Floor(first), math.Ceil(last)
		}
		first, last = max(0, first), min(dim-1, last)
		if first == last {
			last += 0.001
		}
		for j := range f {
			kept := 1 - min(1, max(0, (float32(j)-float32(first))/float32(last-first)))
			f[j] = 1/(by*powers[j])*(1-kept) + f[j]*kept
		}
		factor = float32(r.AttentionFactor)
		switch {
		case factor != 0:
		case r.MScale != 0 && r.MScaleAllDim != 0:
			factor = float32(yarnScale(r.Factor, r.MScale) / yarnScale(r.Factor, r.MScaleAllDim))
		default:
			factor = float32(yarnScale(r.Factor, 1))
		}
	}
	return f, factor
}
