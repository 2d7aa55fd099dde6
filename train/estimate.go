package train

import (
	"mula/blend"
	"mula/train/estimate"
)

// EstimateInput is what an estimate of a step of the run on plan p is about, on a machine.
func (c Config) EstimateInput(p *blend.Plan, machine estimate.Machine) (estimate.Input, error) {
	c, err := c.resolve(p)
	if err != nil {
		return estimate.Input{}, err
	}
	trainer := estimate.Mula
	if c.Optimizer.Name == Lion { // one moment; the others have two, Muon only for what is not a matrix
		trainer.State = 4
	}
	return estimate.Input{
		Model: c.Model.Preset, Config: c.Model.Config, Trainer: trainer, Precision: c.Precision, Machine: machine,
		Layout: estimate.Layout{
			DP: c.Layout.DP, EP: c.Layout.EP, PP: c.Layout.PP,
			Optimizer: estimate.Scheme(c.Layout.Optimizer), Dispatch: c.Layout.Dispatch,
			BatchSize: c.BatchSize, MicroBatchSize: c.MicroBatchSize, SequenceLength: p.SequenceLength, Recompute: c.Recompute,
		},
	}, nil
}
