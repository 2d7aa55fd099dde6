package train

import (
	"runtime"

	"mula/blend"
	"mula/train/estimate"
	"mula/train/samples"
)

// EstimateInput returns the input for an estimate of one step of the run on plan p, on a machine.
func (c Config) EstimateInput(p *blend.Plan, machine estimate.Machine) (estimate.Input, error) {
	c, err := c.resolve(p)
	if err != nil {
		return estimate.Input{}, err
	}
	return estimate.Input{
		Model: c.Model.Preset, Config: c.Model.Config, Trainer: c.estimateTrainer(), Precision: c.Precision,
		Machine: machine,
		Layout:  c.estimateLayout(p.SequenceLength),
	}, nil
}

// estimateTrainer returns mula's trainer with the optimizer of a resolved configuration.
func (c Config) estimateTrainer() estimate.Trainer {
	t := estimate.Mula
	name, threads := c.Optimizer.Name, c.Threads
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	tensors, _ := name.State("", nil)
	t.Whole, t.State, t.Scratch = name.NeedsWholeTensors(), 4*tensors, name.ScratchBytes(c.Model.Config, threads)
	t.TensorState = func(tensor string, shape []int) (bytes int, onHost bool) {
		tensors, onHost := name.State(tensor, shape)
		return 4 * tensors, onHost
	}
	return t
}

// estimateLayout returns the layout of a resolved configuration for samples of that length.
func (c Config) estimateLayout(sequenceLength int) estimate.Layout {
	return estimate.Layout{
		Shape:     c.Layout.shape(),
		Optimizer: c.Layout.Optimizer, Dispatch: c.Layout.Dispatch,
		BatchSize: c.BatchSize, MicroBatchSize: c.MicroBatchSize, SequenceLength: sequenceLength,
		Recompute: c.Recompute, Documents: c.Attention == samples.DocumentAttention,
	}
}
