package train

import "mula/blend"

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

func summarize(c Config, p *blend.Plan, device string) Summary {
	n := c.Model.TotalParameters()
	m := c.Model.Memory(c.MicroBatchSize, p.SequenceLength)
	perStep := int64(c.BatchSize) * int64(p.SequenceLength)
	return Summary{
		Config: c, Plan: p.Fingerprint(), Device: device,
		Parameters: n, ActiveParameters: c.Model.ActiveParameters(),
		TokensPerStep: perStep, TotalTokens: perStep * c.Steps,
		FLOPsPerToken: c.Model.FLOPsPerToken(p.SequenceLength),
		Memory:        Memory{Weights: m.Weights, Gradients: m.Gradients, Moments: 8 * n, Buffers: m.Buffers},
	}
}
