package train

import (
	"fmt"
	"runtime"
	"slices"
	"sort"
	"strings"

	"mula/blend"
	"mula/moe"
	"mula/train/devices"
	"mula/train/estimate"
	"mula/train/pipeline"
	"mula/train/samples"
	"mula/xpu"
)

// A Summary describes a run before it starts, before large memory is allocated.
type Summary struct {
	Config Config // every field has its value

	Plan      string // fingerprint
	Device    string
	DeviceWhy string // reason for the choice, if the configuration left one; otherwise ""
	Resumed   string // name of the checkpoint that the run resumes from, "" for a new run
	NextStep  int64
	Transport string // transport between ranks, "" for one rank

	MicroBatches int     // micro-batches per rank and step
	Bubble       float64 // fraction of time in which pipeline stages are idle; 0 for one stage

	Parameters       int64
	ActiveParameters int64 // weights used per token, embeddings included
	TokensPerStep    int64 // batch size times sequence length
	TotalTokens      int64 // of all steps; less if positions are skipped
	FLOPsPerToken    float64
	Memory           estimate.Memory // of each rank of a run, of the largest pipeline stage
	Groups           []GroupSummary  // of parameters; nil if all have the settings of the optimizer
	// maximum bytes that a rank's device may allocate in addition to Memory; 0 if unknown
	Scratch int64

	logitsTokens int // of a block of logits, for Memory
}

// fits returns an error if ranks ranks need more memory than this machine has. It returns nil if
// the machine's memory is unknown.
func (s Summary) fits(machine int64, ranks int) error {
	most := machine / int64(ranks)
	if machine == 0 || s.Memory.Total() <= most {
		return nil
	}
	advice := s.wouldFit(most, estimate.Memory.Total)
	m := s.Memory
	needs := fmt.Sprintf("%.4g GB of memory (weights %.4g, gradients %.4g, optimizer %.4g, activations %.4g",
		float64(m.Total())/gb, float64(m.Weights)/gb, float64(m.Gradients)/gb, float64(m.Optimizer)/gb,
		float64(m.Buffers())/gb)
	if m.Checkpoint > 0 {
		needs += fmt.Sprintf(", checkpoint in the background %.4g", float64(m.Checkpoint)/gb)
	}
	if m.Snapshots > 0 {
		needs += fmt.Sprintf(", snapshots %.4g", float64(m.Snapshots)/gb)
	}
	needs += fmt.Sprintf("), but this machine has %.4g GB", float64(machine)/gb)
	if ranks > 1 {
		return fmt.Errorf("each rank needs %s for %d ranks: %s; otherwise run fewer ranks per machine, or raise "+
			"layout.ep or layout.pp", needs, ranks, advice)
	}
	return fmt.Errorf("the run needs %s: %s; otherwise choose a smaller model or a larger machine", needs, advice)
}

// fitsDevice returns an error if ranks ranks need more memory than the device that they share. A
// capacity of 0 means that the device uses the machine's memory.
func (s Summary) fitsDevice(capacity int64, ranks int) error {
	need, most := s.Memory.OnDevice(), capacity/int64(ranks)
	if capacity == 0 || need <= most {
		return nil
	}
	sharing := ""
	if ranks > 1 {
		sharing = fmt.Sprintf(" for %d ranks", ranks)
	}
	return fmt.Errorf("a rank needs %.4g GB of its device's memory (weights %.4g, gradients %.4g, optimizer and "+
		"activations %.4g), but %s has %.4g GB%s: %s; otherwise choose a smaller model, raise layout.ep or "+
		"layout.pp, or set device: %s", float64(need)/gb, float64(s.Memory.Weights)/gb,
		float64(s.Memory.Gradients)/gb, float64(need-s.Memory.Weights-s.Memory.Gradients)/gb, s.Device,
		float64(capacity)/gb, sharing, s.wouldFit(most, estimate.Memory.OnDevice), devices.CPU)
}

const gb = 1e9 // bytes

// wouldFit suggests changes with which a rank needs at most most bytes, as computed by need. It
// names the least recomputation that fits, which does not change results, and the largest
// micro-batch that fits. If neither fits alone, it names both together.
func (s Summary) wouldFit(most int64, need func(estimate.Memory) int64) string {
	c, rows := s.Config, s.Config.rankRows()
	length := int(s.TokensPerStep / int64(c.BatchSize))
	needs := func(level moe.Recompute, micro int) int64 {
		c.Recompute, c.MicroBatchSize = level, micro
		return need(c.memory(micro, length, s.logitsTokens))
	}
	// largest returns the largest fitting micro-batch below the configured one, 0 for none.
	largest := func(level moe.Recompute, below int) int {
		return sort.Search(below-1, func(i int) bool { return needs(level, i+1) > most })
	}
	levels := []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers}
	levels = levels[max(0, slices.Index(levels, s.Config.Recompute)):]
	now := min(s.Config.MicroBatchSize, rows)
	var fit []string
	for _, level := range levels[1:] {
		if n := needs(level, now); n <= most {
			fit = append(fit, fmt.Sprintf("recompute: %s (%.4g GB)", level, float64(n)/gb))
			break
		}
	}
	if micro := largest(levels[0], now); micro > 0 {
		fit = append(fit, fmt.Sprintf("micro_batch_size: %d (%.4g GB; new runs only)", micro,
			float64(needs(levels[0], micro))/gb))
	}
	for _, level := range levels[1:] {
		if micro := largest(level, now); fit == nil && micro > 0 {
			fit = append(fit, fmt.Sprintf("recompute: %s with micro_batch_size: %d (%.4g GB; new runs only)", level,
				micro, float64(needs(level, micro))/gb))
		}
	}
	if fit == nil {
		last := levels[len(levels)-1]
		return fmt.Sprintf("recompute: %s with micro_batch_size: 1 still needs %.4g GB", last,
			float64(needs(last, 1))/gb)
	}
	return "these settings would fit: " + strings.Join(fit, ", or ")
}

// summarize describes a run on a device, or without one on a processor.
func summarize(c Config, p *blend.Plan, device xpu.Device) Summary {
	name, logitsTokens := "", 0
	if device != nil {
		name, logitsTokens = device.Name(), c.logitsTokens(device)
	}
	n := c.Model.TotalParameters()
	l := c.Layout
	rows := c.rankRows()
	microBatches := (rows + c.MicroBatchSize - 1) / c.MicroBatchSize
	perStep := int64(c.BatchSize) * int64(p.SequenceLength)
	return Summary{
		Config: c, Plan: p.Fingerprint(), Device: name,
		Parameters: n, ActiveParameters: c.Model.ActiveParameters(),
		TokensPerStep: perStep, TotalTokens: perStep * c.Steps,
		FLOPsPerToken: c.Model.FLOPsPerToken(p.SequenceLength),
		MicroBatches:  microBatches, Bubble: pipeline.Bubble(l.PP, l.VirtualStages, microBatches),
		Memory: c.memory(c.MicroBatchSize, p.SequenceLength, logitsTokens), logitsTokens: logitsTokens,
		Groups: c.groups(),
	}
}

// rankRows returns the number of rows of a step on a rank.
func (c Config) rankRows() int { return c.BatchSize / c.Layout.readers() }

// logitsTokens returns the number of tokens in a block of logits on a device.
func (c Config) logitsTokens(device xpu.Device) int {
	return moe.LogitsTokens(c.Model.VocabSize, device.ProductRows(), device.Capacity())
}

// memory returns the memory of a rank of the largest stage, with micro-batches of the given number
// of rows. logitsTokens is the number of tokens in a block of logits, 0 for a processor's.
func (c Config) memory(rows, sequenceLength, logitsTokens int) estimate.Memory {
	layout := c.estimateLayout(sequenceLength)
	layout.MicroBatchSize, layout.LogitsTokens = rows, logitsTokens
	return estimate.RankMemory(c.Model.Config, layout, c.estimateTrainer())
}

// EstimateInput returns the input for an estimate of one step of the run on plan p, on a machine.
func (c Config) EstimateInput(p *blend.Plan, machine estimate.Machine) (estimate.Input, error) {
	c, err := c.resolve(p)
	if err != nil {
		return estimate.Input{}, err
	}
	layout := c.estimateLayout(p.SequenceLength)
	layout.Sources = len(p.Sources)
	return estimate.Input{
		Model: c.Model.Preset, Config: c.Model.Config, Trainer: c.estimateTrainer(), Precision: c.Precision,
		Machine: machine, Layout: layout,
	}, nil
}

// estimateTrainer returns mula's trainer with the optimizer of a resolved configuration.
func (c Config) estimateTrainer() estimate.Trainer {
	t := estimate.Mula
	name, threads := c.Optimizer.Name, c.Threads
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	tensors := name.State("", nil)
	bytes := c.Optimizer.MomentBytes()
	t.MomentBytes = bytes
	t.Averages = name.Averages()
	t.Whole, t.State, t.SliceUpdate = name.NeedsWholeTensors(), bytes*tensors, name.SliceUpdate()
	t.Scratch, t.HostScratch = name.ScratchBytes(c.Model.Config, threads, max(1, c.Layout.TP))
	t.TensorState = func(tensor string, shape []int) int { return bytes * name.State(tensor, shape) }
	if c.Precision.Weights() == xpu.BFloat16 {
		t = t.Mixed(c.Precision, c.Layout.sent())
	}
	return t
}

// estimateLayout returns the layout of a resolved configuration for samples of that length.
func (c Config) estimateLayout(sequenceLength int) estimate.Layout {
	copies := 0
	if c.Checkpoint.SnapshotEvery > 0 {
		copies = min(2, c.Layout.Ranks()) // several ranks may be on several hosts
	}
	return estimate.Layout{
		Shape:     c.Layout.shape(),
		Optimizer: c.Layout.Optimizer, Dispatch: c.Layout.Dispatch, SumReplicas: c.Layout.SumReplicas,
		SequenceRanks: c.Layout.CP, VirtualStages: c.Layout.VirtualStages,
		ReduceNorm: c.Layout.Norm == reduceNorms, GlobalBalance: c.AuxLoss.Form == moe.AuxGlobal,
		SequenceBalance: c.AuxLoss.Form == moe.AuxSequence, BatchSize: c.BatchSize,
		MicroBatchSize: c.MicroBatchSize, SequenceLength: sequenceLength,
		Recompute: c.Recompute, Activations: c.activations(), Documents: c.Attention == samples.DocumentAttention,
		Background: c.Checkpoint.Background, SnapshotCopies: copies,
	}
}

// GroupSummary describes a group of parameters.
type GroupSummary struct {
	Match                          []string // nil: all parameters without a group
	WeightDecay, LearningRateScale float64
	Tensors                        int
	Parameters                     int64
}

// groups returns the groups of a resolved configuration, and last the group of all other
// parameters. It returns nil without groups.
func (c Config) groups() []GroupSummary {
	if len(c.Optimizer.Groups) == 0 {
		return nil
	}
	all := make([]GroupSummary, len(c.Optimizer.Groups)+1)
	for i, s := range c.Optimizer.Settings() {
		all[i].WeightDecay, all[i].LearningRateScale = s.WeightDecay, s.RateScale
		if i > 0 {
			all[i].Match = c.Optimizer.Groups[i-1].Match
		}
	}
	for _, t := range c.Model.Tensors() {
		g := &all[c.Optimizer.GroupOf(t.Name, t.Shape)]
		g.Tensors++
		g.Parameters += t.Elements()
	}
	return append(all[1:], all[0])
}
