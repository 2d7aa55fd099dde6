package estimate

import (
	"fmt"
	"slices"
	"strings"

	"mula/moe"
)

// Scheme says how gradients are added up and which rank updates which weights;
// docs/reference/estimate.md has the formulas of each.
type Scheme string

// The schemes. All give the same weights.
const (
	Unsharded Scheme = "unsharded" // every rank updates all that it holds
	SO        Scheme = "so"        // the update is divided among the replicas of an expert only
	EPSO      Scheme = "epso"      // what all ranks hold is divided among all of them, experts among their replicas
)

// Schemes lists the schemes, the default first.
func Schemes() []string { return []string{string(EPSO), string(SO), string(Unsharded)} }

// Layout is how a step of training is divided among ranks. A rank's number is (dp·PP + pp)·EP + ep.
type Layout struct {
	DP int `json:"dp"` // replicas of each expert
	EP int `json:"ep"` // ranks among which the experts of a layer are divided
	PP int `json:"pp"` // stages of the pipeline (1F1B)

	Optimizer Scheme       `json:"optimizer"`
	Dispatch  moe.Dispatch `json:"dispatch"`

	BatchSize      int           `json:"batch_size"`       // sequences a step, of all ranks together
	MicroBatchSize int           `json:"micro_batch_size"` // sequences that a rank computes at once
	SequenceLength int           `json:"sequence_length"`
	Recompute      moe.Recompute `json:"recompute"` // experts is level 1 of Optimus, layers its level 7
}

// Ranks is the number of ranks of the run.
func (l Layout) Ranks() int { return l.DP * l.EP * l.PP }

// DataRanks is the number of ranks that read sequences of their own.
func (l Layout) DataRanks() int { return l.DP * l.EP }

// Sequences is how many sequences a data rank has in a step.
func (l Layout) Sequences() int { return l.BatchSize / l.DataRanks() }

// MicroBatches is in how many parts a data rank computes its sequences.
func (l Layout) MicroBatches() int { return (l.Sequences() + l.microBatch() - 1) / l.microBatch() }

// microBatch is the number of sequences in a micro-batch: no more than there are.
func (l Layout) microBatch() int { return min(l.MicroBatchSize, l.Sequences()) }

// check says what is wrong with a layout of a model, with the values that would be right, or
// returns nil.
func (l Layout) check(c moe.Config) error {
	for _, f := range []struct {
		name     string
		v, limit int
	}{
		{"expert_dp", l.DP, 1 << 24}, {"ep", l.EP, 1 << 12}, {"pp", l.PP, 1 << 10}, {"batch size", l.BatchSize, 1 << 30},
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
	if c.Experts == 0 && l.EP > 1 {
		return fmt.Errorf("ep is %d, but a dense model has no experts to divide; it must be 1", l.EP)
	}
	if c.Experts%l.EP != 0 {
		return fmt.Errorf("ep is %d, which does not divide the %d experts of a layer; possible are %s", l.EP, c.Experts,
			divisors(c.Experts))
	}
	if l.PP > c.Layers {
		return fmt.Errorf("pp is %d, but the model has %d layers for its stages; it must be at most that", l.PP,
			c.Layers)
	}
	if l.BatchSize%l.DataRanks() != 0 {
		return fmt.Errorf("the batch has %d sequences, which %d data ranks (expert_dp·ep) cannot share evenly; make it a "+
			"multiple of %d", l.BatchSize, l.DataRanks(), l.DataRanks())
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

// divisors lists the divisors of n.
func divisors(n int) string {
	var out []string
	for d := 1; d <= n; d++ {
		if n%d == 0 {
			out = append(out, fmt.Sprint(d))
		}
	}
	return strings.Join(out, ", ")
}

// Trainer says in how many bytes a program holds and sends numbers.
type Trainer struct {
	Name        string `json:"name"`
	Weights     int    `json:"weight_bytes"`     // of a weight that a rank keeps, and of one that it sends
	Gradients   int    `json:"gradient_bytes"`   // of a gradient, likewise
	State       int    `json:"state_bytes"`      // of the state of the optimizer, for each weight that a rank owns
	Master      bool   `json:"master"`           // the state has a float32 copy of the weight
	Activations int    `json:"activation_bytes"` // of an element of a hidden state, kept or sent
	Whole       bool   `json:"-"`                // a tensor is updated by one rank: Muon, LAMB
	// this program: its buffers, and what it sends beside hidden states, are known
	Own bool `json:"-"`
}

// The trainers of which the package knows.
var (
	// Mula is this program: weights, gradients and moments are float32, in memory and on the wire;
	// the weights are their own master copy.
	Mula = Trainer{Name: "mula", Weights: 4, Gradients: 4, State: 8, Activations: 4, Own: true}

	// Optimus is the program of the Mula runs: bf16 weights and gradients; float32 master copy and
	// two moments at the owner (https://github.com/IntelLabs/Optimus-LM).
	Optimus = Trainer{Name: "optimus", Weights: 2, Gradients: 2, State: 12, Master: true, Activations: 2}
)

// TrainerByName finds one of the trainers.
func TrainerByName(name string) (Trainer, error) {
	for _, t := range []Trainer{Mula, Optimus} {
		if t.Name == name {
			return t, nil
		}
	}
	return Trainer{}, fmt.Errorf("no trainer is named %q; known are %s, %s", name, Mula.Name, Optimus.Name)
}

// A Stage is what one rank of a stage of the pipeline holds.
type Stage struct {
	Layers   int   `json:"layers"`
	PerLayer int64 `json:"per_layer"` // weights of a layer that all ranks of the stage hold
	Head     bool  `json:"head"`      // it computes the logits
	// weights that all ranks of the stage hold: attention, norms, router; embedding and head
	Replicated int64 `json:"replicated"`
	Divided    int64 `json:"divided"` // weights of the rank's own experts
}

// Elements is the number of weights on the rank.
func (s Stage) Elements() int64 { return s.Replicated + s.Divided }

// Stages divides a model into the stages of a layout: stage s of n has the layers [s·L/n,
// (s+1)·L/n), the first also the embedding, the last the final norm and the head; with tied
// embeddings both have the one matrix.
func Stages(c moe.Config, l Layout) ([]Stage, error) {
	if err := l.check(c); err != nil {
		return nil, err
	}
	return stages(c, l), nil
}

// stages is Stages of a layout that is right.
func stages(c moe.Config, l Layout) []Stage {
	h, ffn := int64(c.HiddenSize), int64(c.IntermediateSize)
	embedding := int64(c.VocabSize) * h
	norm := int64(0)
	expert := 3 * h * ffn
	experts := int64(c.Experts) * expert
	if c.Architecture == moe.OLMoE {
		norm = h
	}
	ends := embedding + norm
	if !c.TieEmbeddings {
		ends += embedding
	}
	layers := int64(c.Layers)
	layer := (c.TotalParameters()-ends)/layers - experts // replicated weights of a layer
	stages := make([]Stage, l.PP)
	for i := range stages {
		n := int64((i+1)*c.Layers/l.PP - i*c.Layers/l.PP)
		stages[i] = Stage{Layers: int(n), PerLayer: layer, Replicated: n * layer, Divided: n * experts / int64(l.EP)}
	}
	stages[0].Replicated += embedding
	last := &stages[l.PP-1]
	last.Head = true
	last.Replicated += norm
	if l.PP > 1 || !c.TieEmbeddings {
		last.Replicated += embedding
	}
	return stages
}
