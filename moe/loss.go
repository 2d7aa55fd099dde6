package moe

import "fmt"

// AuxForm names a definition of the load-balancing loss. p is the router's distribution of a token,
// c_le the number of tokens of layer l that chose expert e.
type AuxForm string

// The forms of the load-balancing loss. They differ by a factor of K at balance, so a coefficient
// belongs to one form.
const (
	// AuxNone adds no load-balancing loss.
	AuxNone AuxForm = "none"
	// AuxHF pools the tokens of all layers, as load_balancing_loss_func of transformers does and
	// the Mula runs did: E · Σ_e (Σ_l c_le / N) · (Σ p_e / N) with N = L·T. It is K at balance.
	AuxHF AuxForm = "hf"
	// AuxMegaBlocks takes each layer by itself, as batched_load_balancing_loss of MegaBlocks does
	// and OLMoE's training did: E/(L·T·K) · Σ_l Σ_e c_le · (Σ_t p_le / T). It is 1 at balance.
	AuxMegaBlocks AuxForm = "megablocks"
)

// LossOptions are the terms that a training step adds to the cross-entropy. The zero value adds
// none.
type LossOptions struct {
	Aux            AuxForm // empty means AuxNone
	AuxCoefficient float64 // factor of the load-balancing loss; 0.01 in OLMoE (megablocks) and Mula (hf)

	// ZCoefficient is the factor of the router z-loss Σ logsumexp(router logits)² / (L·T·K), in the
	// normalisation of MegaBlocks; OLMoE trained with 0.001.
	ZCoefficient float64
}

// Validate says what is wrong with o, or returns nil.
func (o LossOptions) Validate() error {
	switch o.Aux {
	case "", AuxNone, AuxHF, AuxMegaBlocks:
	default:
		return fmt.Errorf("load-balancing loss %q is unknown; known are %q, %q and %q", o.Aux, AuxNone, AuxHF,
			AuxMegaBlocks)
	}
	if !(o.AuxCoefficient >= 0) || !(o.ZCoefficient >= 0) {
		return fmt.Errorf("coefficients %g (load balancing) and %g (z-loss) must not be negative", o.AuxCoefficient,
			o.ZCoefficient)
	}
	return nil
}
