package train

import (
	"fmt"

	"mula/blend"
)

// A Summary describes a run before it starts, when nothing large has been allocated yet.
type Summary struct {
	Config Config // every field has its value

	Plan     string // fingerprint
	Device   string
	Resumed  string // name of the checkpoint that the run goes on from, "" for a new run
	NextStep int64

	Parameters       int64
	ActiveParameters int64 // weights that one token meets, embeddings included
	TokensPerStep    int64 // batch size times sequence length
	TotalTokens      int64 // of all steps; less if positions are skipped
	FLOPsPerToken    float64
	Memory           Memory
}

// Memory is how many bytes a run takes, by purpose.
type Memory struct {
	Weights, Gradients int64
	Moments            int64 // of the optimizer
	Buffers            int64 // activations and scratch of one micro-batch
}

// Total is the sum.
func (m Memory) Total() int64 { return m.Weights + m.Gradients + m.Moments + m.Buffers }

// fits refuses a run that needs more memory than the machine has; what is not known about the machine does not stop it.
func (s Summary) fits(machine int64) error {
	if machine == 0 || s.Memory.Total() <= machine {
		return nil
	}
	const gb = 1e9
	return fmt.Errorf("the run needs %.4g GB of memory (weights %.4g, gradients %.4g, optimizer %.4g, activations %.4g), and this machine has %.4g GB: "+
		"choose a smaller model, a smaller micro_batch_size, recompute: layers or a larger machine", float64(s.Memory.Total())/gb, float64(s.Memory.Weights)/gb,
		float64(s.Memory.Gradients)/gb, float64(s.Memory.Moments)/gb, float64(s.Memory.Buffers)/gb, float64(machine)/gb)
}

func summarize(c Config, p *blend.Plan, device string) Summary {
	n := c.Model.TotalParameters()
	m := c.Model.Memory(c.MicroBatchSize, p.SequenceLength, c.Recompute == RecomputeLayers)
	perStep := int64(c.BatchSize) * int64(p.SequenceLength)
	return Summary{
		Config: c, Plan: p.Fingerprint(), Device: device,
		Parameters: n, ActiveParameters: c.Model.ActiveParameters(),
		TokensPerStep: perStep, TotalTokens: perStep * c.Steps,
		FLOPsPerToken: c.Model.FLOPsPerToken(p.SequenceLength),
		Memory:        Memory{Weights: m.Weights, Gradients: m.Gradients, Moments: optimizerBytes(c.Optimizer, c.Model.Config, c.Threads), Buffers: m.Buffers},
	}
}
