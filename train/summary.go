package train

import (
	"fmt"
	"strings"

	"mula/blend"
	"mula/moe"
	"mula/moe/safetensors"
)

// A Summary describes a run before it starts, when nothing large has been allocated yet.
type Summary struct {
	Config Config // every field has its value

	Plan      string // fingerprint
	Device    string
	DeviceWhy string // why it is this one, where the configuration left a choice, and otherwise ""
	Resumed   string // name of the checkpoint that the run goes on from, "" for a new run
	NextStep  int64
	Links     string // what carries bytes between ranks, "" for one rank

	MicroBatches int     // in which a rank computes its rows of a step
	Bubble       float64 // share of their time that the stages of a pipeline wait for each other; 0 for one stage

	Parameters       int64
	ActiveParameters int64 // weights that one token meets, embeddings included
	TokensPerStep    int64 // batch size times sequence length
	TotalTokens      int64 // of all steps; less if positions are skipped
	FLOPsPerToken    float64
	Memory           Memory
}

// Memory is how many bytes each rank of a run takes, by purpose; with several stages of a pipeline, one of the stage that takes most.
type Memory struct {
	Weights, Gradients int64
	Moments            int64 // of the optimizer
	Buffers            int64 // activations and scratch of the micro-batches that are under way at once: one, but for a pipeline

	HostOnly int64 // what of all this a device with memory of its own has no twin of
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
			"run fewer on a machine, raise layout.ep or layout.pp, or choose a smaller micro_batch_size or recompute: layers", float64(s.Memory.Total())/gb, float64(s.Memory.Weights)/gb,
			float64(s.Memory.Gradients)/gb, float64(s.Memory.Moments)/gb, float64(s.Memory.Buffers)/gb, float64(machine)/gb, ranks)
	}
	return fmt.Errorf("the run needs %.4g GB of memory (weights %.4g, gradients %.4g, optimizer %.4g, activations %.4g), and this machine has %.4g GB: "+
		"choose a smaller model, a smaller micro_batch_size, recompute: layers or a larger machine", float64(s.Memory.Total())/gb, float64(s.Memory.Weights)/gb,
		float64(s.Memory.Gradients)/gb, float64(s.Memory.Moments)/gb, float64(s.Memory.Buffers)/gb, float64(machine)/gb)
}

// fitsDevice refuses a run that needs more memory than its device has, which so many ranks share. A capacity of 0 is that of a device whose memory is
// the machine's.
func (s Summary) fitsDevice(capacity int64, ranks int) error {
	need := s.Memory.Total() - s.Memory.HostOnly
	if capacity == 0 || need <= capacity/int64(ranks) {
		return nil
	}
	const gb = 1e9
	sharing := ""
	if ranks > 1 {
		sharing = fmt.Sprintf(" for %d ranks", ranks)
	}
	return fmt.Errorf("a rank needs %.4g GB of its device's memory (weights %.4g, gradients %.4g, optimizer and activations %.4g), and %s has %.4g GB%s: "+
		"choose a smaller model, a smaller micro_batch_size or recompute: layers, raise layout.ep or layout.pp, or set device: %s", float64(need)/gb,
		float64(s.Memory.Weights)/gb, float64(s.Memory.Gradients)/gb, float64(need-s.Memory.Weights-s.Memory.Gradients)/gb, s.Device, float64(capacity)/gb, sharing, DeviceCPU)
}

func summarize(c Config, p *blend.Plan, device string) Summary {
	n := c.Model.TotalParameters()
	l := c.Layout
	rows := c.BatchSize / (l.DP * l.EP) // of a rank
	microBatches := (rows + c.MicroBatchSize - 1) / c.MicroBatchSize
	perStep := int64(c.BatchSize) * int64(p.SequenceLength)
	return Summary{
		Config: c, Plan: p.Fingerprint(), Device: device,
		Parameters: n, ActiveParameters: c.Model.ActiveParameters(),
		TokensPerStep: perStep, TotalTokens: perStep * c.Steps,
		FLOPsPerToken: c.Model.FLOPsPerToken(p.SequenceLength),
		MicroBatches:  microBatches, Bubble: bubble(l.PP, microBatches),
		Memory: c.memory(min(c.MicroBatchSize, rows), microBatches, p.SequenceLength),
	}
}

// memory is what a rank of the stage that takes most takes, with so many micro-batches of so many rows in a step.
func (c Config) memory(rows, microBatches, sequenceLength int) Memory {
	var most Memory
	l := c.Layout
	for stage := range l.PP {
		m := c.Model.Memory(moe.Pass{Rows: rows, SequenceLength: sequenceLength, Recompute: c.Recompute,
			ExpertRanks: l.EP, Dispatch: l.Dispatch, Stage: stage, Stages: l.PP, InFlight: min(l.PP-stage, microBatches)})
		held := stageTensors(c.Model.Config, stage, l.PP)
		own := Memory{Weights: m.Weights, Gradients: m.Gradients, Buffers: m.Buffers + sumsBytes(held, l), HostOnly: sumsBytes(held, l)}
		onDevice, onHost := optimizerBytes(c.Optimizer, c.Model.Config, held, l, c.Threads)
		own.Moments = onDevice + onHost
		own.HostOnly += onHost
		if l.PP > 1 {
			own.Buffers += 2 * 4 * int64(rows*sequenceLength) * int64(c.Model.HiddenSize) // what comes from one stage and goes to the other
		}
		if own.Total() > most.Total() {
			most = own
		}
	}
	return most
}

// sumsBytes is the memory in which a rank that holds these tensors receives the gradients that it adds up: as much as the largest buckets have, of
// replicated weights and of experts.
func sumsBytes(held []safetensors.Tensor, l LayoutConfig) int64 {
	if l.DP*l.EP == 1 {
		return 0
	}
	var largest [2]int64
	sum, layer := [2]int64{}, ""
	for _, t := range held {
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
