package train

import (
	"fmt"
	"strings"

	"mula/blend"
	"mula/moe"
)

// A Summary describes a run before it starts, when nothing large has been allocated yet.
type Summary struct {
	Config Config // every field has its value

	Plan     string // fingerprint
	Device   string
	Resumed  string // name of the checkpoint that the run goes on from, "" for a new run
	NextStep int64
	Links    string // what carries bytes between ranks, "" for one rank

	Parameters       int64
	ActiveParameters int64 // weights that one token meets, embeddings included
	TokensPerStep    int64 // batch size times sequence length
	TotalTokens      int64 // of all steps; less if positions are skipped
	FLOPsPerToken    float64
	Memory           Memory
}

// Memory is how many bytes each rank of a run takes, by purpose.
type Memory struct {
	Weights, Gradients int64
	Moments            int64 // of the optimizer
	Buffers            int64 // activations and scratch of one micro-batch
}

// Total is the sum.
func (m Memory) Total() int64 { return m.Weights + m.Gradients + m.Moments + m.Buffers }

// fits refuses a run of so many ranks on this machine that needs more memory than it has; what is not known about the machine does not stop it.
func (s Summary) fits(machine int64, ranks int) error {
	if machine == 0 || s.Memory.Total() <= machine/int64(ranks) {
		return nil
	}
	const gb = 1e9
	if ranks > 1 {
		return fmt.Errorf("each rank needs %.4g GB of memory (weights %.4g, gradients %.4g, optimizer %.4g, activations %.4g), and this machine has %.4g GB for %d ranks: "+
			"run fewer on a machine, raise layout.ep, or choose a smaller micro_batch_size or recompute: layers", float64(s.Memory.Total())/gb, float64(s.Memory.Weights)/gb,
			float64(s.Memory.Gradients)/gb, float64(s.Memory.Moments)/gb, float64(s.Memory.Buffers)/gb, float64(machine)/gb, ranks)
	}
	return fmt.Errorf("the run needs %.4g GB of memory (weights %.4g, gradients %.4g, optimizer %.4g, activations %.4g), and this machine has %.4g GB: "+
		"choose a smaller model, a smaller micro_batch_size, recompute: layers or a larger machine", float64(s.Memory.Total())/gb, float64(s.Memory.Weights)/gb,
		float64(s.Memory.Gradients)/gb, float64(s.Memory.Moments)/gb, float64(s.Memory.Buffers)/gb, float64(machine)/gb)
}

func summarize(c Config, p *blend.Plan, device string) Summary {
	n := c.Model.TotalParameters()
	l := c.Layout
	m := c.Model.Memory(moe.Pass{Rows: min(c.MicroBatchSize, c.BatchSize/(l.DP*l.EP)), SequenceLength: p.SequenceLength, Recompute: c.Recompute == RecomputeLayers,
		ExpertRanks: l.EP, Dispatch: l.Dispatch})
	perStep := int64(c.BatchSize) * int64(p.SequenceLength)
	return Summary{
		Config: c, Plan: p.Fingerprint(), Device: device,
		Parameters: n, ActiveParameters: c.Model.ActiveParameters(),
		TokensPerStep: perStep, TotalTokens: perStep * c.Steps,
		FLOPsPerToken: c.Model.FLOPsPerToken(p.SequenceLength),
		Memory:        Memory{Weights: m.Weights, Gradients: m.Gradients, Moments: optimizerBytes(c.Optimizer, c.Model.Config, l, c.Threads), Buffers: m.Buffers + sumsBytes(c.Model.Config, l)},
	}
}

// sumsBytes is the memory in which a rank receives the gradients that it adds up: as much as the largest buckets have, of replicated weights and of
// experts.
func sumsBytes(m moe.Config, l LayoutConfig) int64 {
	if l.Ranks() == 1 {
		return 0
	}
	var largest [2]int64
	sum, layer := [2]int64{}, ""
	for _, t := range m.Tensors() {
		name := tensorLayer(t.Name)
		if name != layer {
			sum, layer = [2]int64{}, name
		}
		kind := 0
		if divided(t.Name) {
			kind = 1
		}
		sum[kind] += t.Elements()
		largest[kind] = max(largest[kind], sum[kind])
	}
	return 4 * (largest[0] + largest[1]/int64(l.EP))
}

// tensorLayer is what the names of the tensors of a layer, and of no others, begin with; of a tensor outside the layers it is its name.
func tensorLayer(name string) string {
	rest, ok := strings.CutPrefix(name, "model.layers.")
	if !ok {
		return name
	}
	number, _, _ := strings.Cut(rest, ".")
	return number
}
