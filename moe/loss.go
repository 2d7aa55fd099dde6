package moe

import "fmt"

// AuxForm names a definition of the load-balancing loss. p is the router's distribution of a token, c_le the number of tokens of layer l
// that chose expert e.
type AuxForm string

// The forms of the load-balancing loss. They differ by a factor of K at balance, so a coefficient belongs to one form.
const (
	// AuxNone adds no load-balancing loss.
	AuxNone AuxForm = "none"
	// AuxHF pools the tokens of all layers, as load_balancing_loss_func of transformers does and the Mula runs did:
	// E · Σ_e (Σ_l c_le / N) · (Σ p_e / N) with N = L·T. It is K at balance.
	AuxHF AuxForm = "hf"
	// AuxMegaBlocks takes each layer by itself, as batched_load_balancing_loss of MegaBlocks does and OLMoE's training did:
	// E/(L·T·K) · Σ_l Σ_e c_le · (Σ_t p_le / T). It is 1 at balance.
	AuxMegaBlocks AuxForm = "megablocks"
)

// LossOptions are the terms that a training step adds to the cross-entropy. The zero value adds none.
type LossOptions struct {
	Aux            AuxForm // empty means AuxNone
	AuxCoefficient float64 // factor of the load-balancing loss; 0.01 in OLMoE (megablocks) and Mula (hf)

	// ZCoefficient is the factor of the router z-loss Σ logsumexp(router logits)² / (L·T·K), in the normalisation of MegaBlocks; OLMoE
	// trained with 0.001.
	ZCoefficient float64
}

// Validate says what is wrong with o, or returns nil.
func (o LossOptions) Validate() error {
	switch o.Aux {
	case "", AuxNone, AuxHF, AuxMegaBlocks:
	default:
		return fmt.Errorf("moe: load-balancing loss %q is unknown; known are %q, %q and %q", o.Aux, AuxNone, AuxHF, AuxMegaBlocks)
	}
	if !(o.AuxCoefficient >= 0) || !(o.ZCoefficient >= 0) {
		return fmt.Errorf("moe: coefficients %g (load balancing) and %g (z-loss) must not be negative", o.AuxCoefficient, o.ZCoefficient)
	}
	return nil
}

// drawTarget draws an index with probability proportional to weights, by the inverse of their cumulative distribution: the first index at
// which the sum of the weights, added up in order in float64, exceeds a uniform share of the whole. The share is a function of seed and
// number: output number of the generator SplitMix64 (Steele, Lea and Flood 2014) whose state is the finalised seed. If the weights have no
// sum, which only weights that are not numbers lack, the draw is the last of a positive weight, or 0.
func drawTarget(weights []float32, seed, number uint64) int {
	whole := 0.0
	for _, x := range weights {
		whole += float64(x)
	}
	left := whole * (float64(mix64(mix64(seed)+(number+1)*0x9e3779b97f4a7c15)>>11) / (1 << 53))
	sum, last := 0.0, 0
	for i, x := range weights {
		if x > 0 {
			last = i
		}
		if sum += float64(x); sum > left {
			return i
		}
	}
	return last
}

// mix64 is the finaliser of SplitMix64.
func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
