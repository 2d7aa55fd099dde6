package estimate

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/comm"
)

// Scheme determines how gradients are summed and which rank updates which weights.
// docs/reference/estimate.md has the formulas of each scheme.
type Scheme string

// The schemes. All give the same weights.
const (
	Unsharded Scheme = "unsharded" // every rank updates all its weights
	SO        Scheme = "so"        // the update is divided among the replicas of an expert
	EPSO      Scheme = "epso"      // replicated weights are divided among all data ranks, experts among their replicas
)

// Schemes lists the schemes, the default first.
func Schemes() []string { return []string{string(EPSO), string(SO), string(Unsharded)} }

// Layout divides a training step among the ranks of a mesh.
type Layout struct {
	comm.Shape `json:"-"`

	Optimizer Scheme       `json:"optimizer"`
	Dispatch  moe.Dispatch `json:"dispatch"`

	SumReplicas int `json:"sum_replicas"` // layout.sum_replicas; 0 means 1
	// layout.cp: consecutive data ranks that share each sequence; 0 means 1
	SequenceRanks int `json:"cp"`

	// layout.virtual_stages: groups of layers of each pipeline stage; 0 means 1
	VirtualStages int `json:"virtual_stages,omitempty"`

	ReduceNorm bool `json:"reduce_norm"` // layout.norm is reduce

	// aux_loss.form of mula is global: the load-balancing loss needs the choices of the whole step
	GlobalBalance bool `json:"global_balance,omitempty"`
	// aux_loss.form of mula is sequence: the load-balancing loss needs the choices of each sequence
	SequenceBalance bool `json:"sequence_balance,omitempty"`

	BatchSize      int           `json:"batch_size"`       // sequences per step, over all ranks
	MicroBatchSize int           `json:"micro_batch_size"` // sequences that a rank computes at once
	SequenceLength int           `json:"sequence_length"`
	Recompute      moe.Recompute `json:"recompute"` // experts is level 1 of Optimus, layers is level 7
	Activations    xpu.DType     `json:"-"`         // of mula; see [moe.Model.SetActivations]
	Documents      bool          `json:"-"`         // attention is restricted to documents
	// of a block of logits, see [moe.LogitsTokens]; 0 means the machine's in an estimate, and
	// otherwise a processor's
	LogitsTokens int `json:"-"`

	Background bool `json:"-"` // checkpoint.background
	// files of a snapshot that a host has for each of its ranks: 0 without snapshots, 1 on a single
	// host, 2 with copies of another host's files
	SnapshotCopies int `json:"-"`

	Sources int `json:"-"` // of the plan; 0 means 1

	perHost int // ranks of a host, if exchanges have two levels; 0: one host
}

func shape(dp, ep, pp int) comm.Shape {
	return comm.NewShape(map[comm.Axes]int{comm.ExpertDP: dp, comm.EP: ep, comm.PP: pp})
}

// MarshalJSON writes the sizes of the axes before the other fields.
func (l Layout) MarshalJSON() ([]byte, error) {
	type fields Layout // without methods
	return json.Marshal(struct {
		DP int `json:"dp"`
		EP int `json:"ep"`
		PP int `json:"pp"`
		TP int `json:"tp"`
		fields
	}{l.Size(comm.ExpertDP), l.Size(comm.EP), l.Size(comm.PP), l.Size(comm.TP), fields(l)})
}

// DataRanks is the number of ranks that have the same replicated weights. Without context and
// tensor parallelism it is the data-parallel size, as in Megatron.
func (l Layout) DataRanks() int { return l.Size(comm.Data) }

// countsFirst reports whether mula counts the choices of experts in forward passes of all
// micro-batches before their other passes; see [moe.AuxGlobal].
func (l Layout) countsFirst(t Trainer) bool {
	return l.GlobalBalance && t.Own && (l.MicroBatches() > 1 || l.virtualStages() > 1)
}

func (l Layout) virtualStages() int { return max(1, l.VirtualStages) }

func (l Layout) sequenceRanks() int { return max(1, l.SequenceRanks) }

// readers is the number of blocks of sequences in a step.
func (l Layout) readers() int { return l.DataRanks() / l.rowRanks() }

// rowRanks is the number of ranks that share the tokens of each sequence.
func (l Layout) rowRanks() int { return l.sequenceRanks() * l.Size(comm.TP) }

// Sequences is the number of sequences of a data rank per step. It computes all their tokens, or an
// equal part of each sequence.
func (l Layout) Sequences() int { return l.BatchSize / l.readers() }

// rowTokens is the number of tokens of a sequence that a rank computes.
func (l Layout) rowTokens() int { return l.SequenceLength / l.rowRanks() }

// tokens is the number of tokens of a data rank per step.
func (l Layout) tokens() int64 { return int64(l.Sequences()) * int64(l.rowTokens()) }

// MicroBatches is the number of micro-batches of a data rank per step.
func (l Layout) MicroBatches() int { return (l.Sequences() + l.microBatch() - 1) / l.microBatch() }

// microBatch is the number of sequences in a micro-batch, at most [Layout.Sequences].
func (l Layout) microBatch() int { return min(l.MicroBatchSize, l.Sequences()) }

// check returns an error that names the first invalid value of the layout for a model, and the
// allowed values.
func (l Layout) check(c moe.Config) error {
	for _, f := range []struct {
		name     string
		v, limit int
	}{
		{"expert_dp", l.Size(comm.ExpertDP), 1 << 24}, {"ep", l.Size(comm.EP), 1 << 12},
		{"pp", l.Size(comm.PP), 1 << 10}, {"tp", l.Size(comm.TP), 1 << 12}, {"batch size", l.BatchSize, 1 << 30},
		{"micro-batch size", l.MicroBatchSize, 1 << 20}, {"sequence length", l.SequenceLength, 1 << 28},
	} {
		if f.v < 1 || f.v > f.limit {
			return fmt.Errorf("%s is %d; must be from 1 to %d", f.name, f.v, f.limit)
		}
	}
	if tokens := int64(l.BatchSize) * int64(l.SequenceLength); tokens > 1<<36 {
		return fmt.Errorf("a step of %d sequences of %d tokens has %d tokens; it must have at most %d", l.BatchSize,
			l.SequenceLength, tokens, int64(1)<<36)
	}
	for _, misfit := range c.Misfits(l.Shape) {
		return misfit
	}
	if err := c.CheckVirtualStages(l.Size(comm.PP), l.VirtualStages); err != nil {
		return fmt.Errorf("virtual_stages is %d, but %w", l.VirtualStages, err)
	}
	if n := l.SumReplicas; n > 0 && l.Size(comm.ExpertDP)%n != 0 {
		return fmt.Errorf("sum_replicas is %d; it must divide expert_dp, which is %d", n, l.Size(comm.ExpertDP))
	}
	if tp := l.Size(comm.TP); tp > 1 {
		if n := l.rowRanks(); l.SequenceLength%n != 0 {
			return fmt.Errorf("tp is %d; tp·cp = %d must divide the sequence length, which is %d", tp, n,
				l.SequenceLength)
		}
	}
	ranks := l.Size(comm.Slices)
	if n := l.sequenceRanks(); n > 1 {
		switch {
		case ranks%n != 0:
			return fmt.Errorf("cp is %d; it must divide the %d data ranks (expert_dp·ep)", n, ranks)
		case l.SequenceLength%n != 0:
			return fmt.Errorf("cp is %d; it must divide the sequence length, which is %d", n, l.SequenceLength)
		case l.BatchSize%l.readers() != 0:
			return fmt.Errorf("the batch has %d sequences, which is not a multiple of the %d data ranks "+
				"(expert_dp·ep) divided by cp, which is %d", l.BatchSize, ranks, n)
		}
	} else if l.BatchSize%ranks != 0 {
		return fmt.Errorf("the batch has %d sequences, which is not a multiple of the %d data ranks (expert_dp·ep); "+
			"make it a multiple of %d", l.BatchSize, ranks, ranks)
	}
	for _, f := range []struct {
		name, v string
		known   []string
	}{
		{"optimizer", string(l.Optimizer), Schemes()},
		{"dispatch", string(l.Dispatch), moe.Dispatches()},
		{"recompute", string(l.Recompute), moe.Recomputes()},
	} {
		if !slices.Contains(f.known, f.v) {
			return fmt.Errorf("%s is %q; allowed: %s", f.name, f.v, strings.Join(f.known, ", "))
		}
	}
	return nil
}

// Trainer has the sizes of the numbers that a program stores and sends.
type Trainer struct {
	Name        string `json:"name"`
	Weights     int    `json:"weight_bytes"`     // of a weight, stored or sent
	Gradients   int    `json:"gradient_bytes"`   // of a gradient, sent, and stored unless Accumulated is set
	Accumulated int    `json:"-"`                // of a gradient, stored; 0 means Gradients
	State       int    `json:"state_bytes"`      // of the optimizer state, per weight that a rank owns
	MomentBytes int    `json:"-"`                // of an element of TensorState; 0 means 4
	Master      bool   `json:"master"`           // the state has a float32 copy of the weight
	Activations int    `json:"activation_bytes"` // of an element of a hidden state, stored or sent
	Whole       bool   `json:"-"`                // one rank updates the complete tensor: Muon, LAMB
	// mula: buffers, and traffic in addition to hidden states, are counted exactly
	Own bool `json:"-"`

	// TensorState returns the bytes of the optimizer's state per weight of a tensor, without a
	// master. Nil means State bytes.
	TensorState func(name string, shape []int) int `json:"-"`

	// the model of a checkpoint has averages of the weights, and the state has the weights
	Averages bool `json:"-"`

	Scratch     int64 `json:"-"` // bytes of device memory for intermediate results of the update
	HostScratch int64 `json:"-"` // bytes of host memory for the same

	SliceUpdate SliceUpdate `json:"-"`
}

// A SliceUpdate describes the exchange of ranks that share matrices ([comm.TP]) for the update of a
// slice. The zero value is no exchange.
type SliceUpdate struct {
	Operation comm.Operation
	// Bytes returns the bytes that all ranks together send for a tensor of the complete shape.
	Bytes func(name string, shape []int, ranks int) int64
}

// The known trainers.
var (
	// Mula is this program: weights, gradients and moments are float32, in memory and in traffic.
	// There is no separate master copy.
	Mula = Trainer{Name: "mula", Weights: 4, Gradients: 4, State: 8, Activations: 4, Own: true}

	// Optimus trained the Mula models: bf16 weights and gradients. The owner of a weight has a
	// float32 master copy and two moments (https://github.com/IntelLabs/Optimus-LM).
	Optimus = Trainer{Name: "optimus", Weights: 2, Gradients: 2, State: 12, Master: true, Activations: 2}
)

// Mixed returns a trainer like Mula with a precision of bfloat16 weights instead, whose ranks send
// gradients of the given type.
func (t Trainer) Mixed(p xpu.Precision, sent xpu.DType) Trainer {
	t.Weights, t.Gradients, t.Accumulated = p.Weights().Bytes(), sent.Bytes(), p.Gradients().Bytes()
	t.State, t.Master = t.State+masterBytes, true
	return t
}

// masterBytes is the size of the float32 copy of a weight.
const masterBytes = 4

// accumulated returns the bytes of a stored gradient.
func (t Trainer) accumulated() int {
	if t.Accumulated > 0 {
		return t.Accumulated
	}
	return t.Gradients
}

var trainers = []Trainer{Mula, Optimus}

// Trainers lists the names of the trainers.
func Trainers() []string {
	var names []string
	for _, t := range trainers {
		names = append(names, t.Name)
	}
	return names
}

// TrainerByName returns the trainer with the name.
func TrainerByName(name string) (Trainer, error) {
	for _, t := range trainers {
		if t.Name == name {
			return t, nil
		}
	}
	return Trainer{}, fmt.Errorf("unknown trainer %q; allowed: %s", name, strings.Join(Trainers(), ", "))
}

// A Stage is a stage of the pipeline, with the weights of one of its ranks.
type Stage struct {
	Layers       int   `json:"layers"`
	ExpertLayers int   `json:"expert_layers"` // of these, layers with experts
	PerLayer     int64 `json:"per_layer"`     // replicated weights of a layer, the most of a layer
	Head         bool  `json:"head"`          // the stage computes the logits
	// weights that every rank of the stage has: attention, norms, router, embedding and head, but
	// not Sliced
	Replicated int64 `json:"replicated"`
	Divided    int64 `json:"divided"` // weights of the rank's own experts
	Sliced     int64 `json:"sliced"`  // weights of the rank's slices of matrices, with tp

	inLayers int64 // the part of Replicated that is in layers
	slices   int64 // the part of Sliced that is in a layer, the most of a layer
}

// Elements is the number of weights on the rank.
func (s Stage) Elements() int64 { return s.Replicated + s.Divided + s.Sliced }

// Stages divides a model into the stages of a layout; see [moe.Config.StageGroups]. The
// first stage also has the embedding, and the last stage the final norm and the head. With tied
// embeddings both have the shared matrix.
func Stages(c moe.Config, l Layout) ([]Stage, error) {
	if err := l.check(c); err != nil {
		return nil, err
	}
	return stages(c, l), nil
}

// stages is Stages for a valid layout.
func stages(c moe.Config, l Layout) []Stage {
	embedding, norm := int64(c.VocabSize)*int64(c.HiddenSize), int64(c.NormWeights())
	stages := make([]Stage, l.Size(comm.PP))
	for i := range stages {
		numbers := c.StageLayers(i, l.Size(comm.PP), l.VirtualStages)
		s := Stage{Layers: len(numbers)}
		for _, layer := range numbers {
			replicated, expert := c.LayerParameters(layer)
			sliced, _ := c.SlicedWeights(layer, l.Size(comm.TP))
			replicated -= sliced
			sliced /= int64(l.Size(comm.TP))
			s.Sliced, s.slices = s.Sliced+sliced, max(s.slices, sliced)
			s.PerLayer = max(s.PerLayer, replicated)
			s.Replicated += replicated
			s.inLayers += replicated
			if expert > 0 {
				s.ExpertLayers++
				s.Divided += int64(c.Experts) * expert / int64(l.Size(comm.EP))
			}
		}
		stages[i] = s
	}
	stages[0].Replicated += embedding
	last := &stages[l.Size(comm.PP)-1]
	last.Head = true
	last.Replicated += norm
	if l.Size(comm.PP) > 1 || !c.TieEmbeddings {
		last.Replicated += embedding
	}
	return stages
}
