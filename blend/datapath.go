package blend

import (
	"context"
	"fmt"
	"math/big"
	"strconv"

	"mula/index/megatron"
	"mula/shards/facts"
)

// ForMegatron converts a blend.yaml to a Megatron-LM configuration, to train with Megatron-LM's own
// order of the same shards. It sets the blend, the split, the numbers of samples, the sequence
// length and the seed. The other fields come from base.
//
// Every shard becomes a token file. Its weight is the weight of its source times the shard's share
// of the source's tokens. ForMegatron fails if the blend has several stages, skips or epoch limits,
// because Megatron-LM has none. Validation windows become the validation split, with one sample for
// each window.
func ForMegatron(ctx context.Context, c *Config, base megatron.Config) (megatron.Config, error) {
	if c.Order == orderMegatron {
		return base, c.file.Errorf("$.order",
			"the order is already %s; to compare its index files, run `mula index verify`", c.Order)
	}
	if c.Packing != "" {
		return base, c.file.Errorf("$.packing", "Megatron-LM does not pack documents; remove packing")
	}
	if len(c.Skips) > 0 {
		return base, c.file.Errorf("$.skips", "Megatron-LM cannot skip positions; remove skips")
	}
	for i, s := range c.Sources {
		if s.MaxEpochs.IsSet() {
			return base, c.file.Errorf(fmt.Sprintf("$.sources[%d].max_epochs", i),
				"Megatron-LM does not limit epochs; remove max_epochs of %q", s.Name)
		}
	}
	if c.Seed > 1<<32-1 {
		return base, c.file.Errorf("$.seed", "seed is %d; Megatron-LM accepts at most 2^32-1", c.Seed)
	}
	l := facts.Open()
	defer l.Close()
	d, err := survey(ctx, c, l, nil)
	if err != nil {
		return base, err
	}
	defer d.Close()
	p := d.Plan
	if len(p.Stages) != 1 {
		return base, c.file.Errorf("$.stages", "Megatron-LM has one stage, this blend has %d; build an index for each",
			len(p.Stages))
	}
	blend := megatron.Blend{Weights: []float64{}}
	held := int64(0)
	for i, s := range p.Sources {
		var tokens int64
		for j := range s.Shards {
			tokens += s.Shards[j].Tokens
		}
		for j := range s.Shards {
			w := new(big.Rat).SetUint64(p.Stages[0].Weights[i])
			if w.Sign() == 0 || s.Shards[j].Tokens == 0 {
				continue // Megatron-LM draws samples even if the weight is 0
			}
			w.Mul(w, big.NewRat(s.Shards[j].Tokens, tokens))
			f, _ := w.Float64()
			blend.Prefixes = append(blend.Prefixes, p.ShardPath(i, j))
			blend.Weights = append(blend.Weights, f)
		}
		held += s.Validation
	}
	base.Blend, base.SequenceLength, base.Seed = blend, int64(p.SequenceLength), uint32(p.Seed)
	base.Split = "100,0,0"
	if c.Validation.sign() > 0 {
		rest := new(big.Rat).Sub(one, c.Validation.rat)
		train, _ := rest.Float64()
		valid, _ := c.Validation.rat.Float64()
		base.Split = fmt.Sprintf("%s,%s,0", decimal(train), decimal(valid))
	}
	base.Samples = [3]megatron.Size{megatron.SizeOf(p.Length()), megatron.SizeOf(held), megatron.SizeOf(0)}
	return base, nil
}

// decimal formats a fraction without an exponent, because Megatron-LM's split has no exponents.
func decimal(share float64) string { return strconv.FormatFloat(share, 'f', -1, 64) }
