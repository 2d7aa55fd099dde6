package moe

import "fmt"

// AuxForm names a definition of the load-balancing loss. p is a token's router distribution, c_le
// the number of tokens of layer l that chose expert e.
type AuxForm string

// The forms of the load-balancing loss. At balance they differ by a factor of K, so a coefficient
// is meaningful for one form only.
const (
	// AuxNone adds no load-balancing loss.
	AuxNone AuxForm = "none"
	// AuxHF pools the tokens of all layers, like load_balancing_loss_func of transformers and the
	// Mula runs: E · Σ_e (Σ_l c_le / N) · (Σ p_e / N) with N = L·T. It is K at balance.
	AuxHF AuxForm = "hf"
	// AuxMegaBlocks computes the loss per layer, like batched_load_balancing_loss of MegaBlocks and
	// OLMoE's training: E/(L·T·K) · Σ_l Σ_e c_le · (Σ_t p_le / T). It is 1 at balance.
	AuxMegaBlocks AuxForm = "megablocks"
	// AuxSequence computes the loss for each row and layer, as DeepSeek-V3 does
	// (https://arxiv.org/abs/2412.19437, equations 17 to 20), with the softmax as the affinity. It
	// is the mean over rows and layers of E/(S·K) · Σ_e c_lre · (Σ_t p_le / S), for S tokens of a
	// row; c_lre of them chose expert e. It is 1 at balance. It does not depend on the division of
	// rows into batches, or among ranks.
	AuxSequence AuxForm = "sequence"
	// AuxGlobal computes the loss of each layer over all tokens of the step, of all micro-batches
	// and ranks (https://arxiv.org/abs/2501.11873): E/(L·T·K) · Σ_l Σ_e c_le · (Σ_t p_le / T), for
	// T tokens of the step; c_le of them chose expert e. It is AuxMegaBlocks of the step
	// as one batch, and 1 at balance. It needs [BackwardOptions.StepCounts]. It does not depend on
	// the division of the step into batches, or among ranks.
	AuxGlobal AuxForm = "global"
)

// LossOptions are the terms that a training step adds to the cross entropy. The zero value adds
// none.
type LossOptions struct {
	Aux            AuxForm // empty means AuxNone
	AuxCoefficient float64 // factor of the load-balancing loss; 0.01 in OLMoE (megablocks) and Mula (hf)

	// ZCoefficient is the factor of the router z-loss Σ logsumexp(router logits)² / (L·T·K),
	// normalised as in MegaBlocks; OLMoE trained with 0.001.
	ZCoefficient float64

	// PredictionCoefficient is the factor λ of the losses of multi-token prediction; see
	// predict.go. DeepSeek-V3 trained with 0.3, and with 0.1 after 10 T tokens. It has no effect on
	// a model without such layers.
	PredictionCoefficient float64
}

// Validate returns an error if the form is unknown or a coefficient is negative.
func (o LossOptions) Validate() error {
	switch o.Aux {
	case "", AuxNone, AuxHF, AuxMegaBlocks, AuxSequence, AuxGlobal:
	default:
		return fmt.Errorf("unknown load-balancing loss %q; the choices are %q, %q, %q, %q and %q", o.Aux, AuxNone,
			AuxHF, AuxMegaBlocks, AuxSequence, AuxGlobal)
	}
	if !(o.AuxCoefficient >= 0) || !(o.ZCoefficient >= 0) || !(o.PredictionCoefficient >= 0) {
		return fmt.Errorf("coefficients %g (load balancing), %g (z-loss) and %g (multi-token prediction) must not be "+
			"negative", o.AuxCoefficient, o.ZCoefficient, o.PredictionCoefficient)
	}
	return nil
}
