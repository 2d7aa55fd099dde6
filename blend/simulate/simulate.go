// Package simulate says before a run what its plan asks of storage, and what its order looks like.
//
// Two kinds of results must not be mixed up. What is said of the order is counted: which windows of
// which shards stand at which positions is computed from the plan, and compared with the plan's own
// bounds and with what draws by chance would give. What is said of seconds comes from a small model
// of storage whose figures are assumptions. docs/reference/simulate.md has every formula.
package simulate

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"

	"mula/blend"
	"mula/index"
)

// Options of [Run].
type Options struct {
	BatchSize    int // samples of a step, over all ranks; must divide among the ranks
	Nodes        int // that read, each its share of every step
	RanksPerNode int // 0 is 1
	// seconds that a step computes; 0 if it is not known: then nothing is said of whether storage
	// keeps up
	StepTime float64
	Storage  Storage
	From, To int64 // positions [From, To); From must be where a step begins; To 0 is the end of the plan
	Samples  int64 // positions that are looked at one by one, at most; 0 is DefaultSamples

	// Data, if not nil, is the plan with its shards, open: then something is said of documents.
	// Run's plan may be nil. Orders that are in files of their own need it.
	Data *blend.Data

	Progress func(what string, done, total int64) // may be nil; done and total count positions
}

// DefaultSamples is the number of positions that are looked at one by one. They take some 100 bytes
// of memory each.
const DefaultSamples = 1 << 20

// Limits of options.
const (
	maxRanks   = 1 << 24
	maxSamples = 1 << 26
	maxBatch   = 1 << 30
)

// A Report is what [Run] has found.
type Report struct {
	Plan           string    `json:"plan"` // fingerprint
	Order          string    `json:"order_version"`
	SequenceLength int       `json:"sequence_length"`
	BatchSize      int       `json:"batch_size"`
	From           int64     `json:"from"`
	To             int64     `json:"to"`
	Steps          int64     `json:"steps"`
	Reading        Reading   `json:"reading"`
	Mixture        Mixture   `json:"mixture"`
	Shuffle        Shuffle   `json:"shuffle"`
	Sources        []Source  `json:"sources"` // what of the plan's shards no sample has
	Findings       []Finding `json:"findings"`
}

// A Source is what a source has, how often the plan draws it, and what its shards have that is in
// no window.
type Source struct {
	Name    string  `json:"name"`
	Shards  int     `json:"shards"`
	Tokens  int64   `json:"tokens"`
	Windows int64   `json:"windows"` // held-out ones included
	Samples int64   `json:"samples"` // in the whole plan
	Epochs  float64 `json:"epochs"`  // Samples per training window
	Repeats int64   `json:"repeats"` // samples whose window the plan has drawn before
	// Tail is the tokens at the ends of shards that no window has: T − (w·L + 1) of a shard of T
	// tokens with w windows, T where w is 0. It is -1 for orders that do not cut shards into
	// windows.
	Tail    int64                 `json:"tail_tokens"`
	Packing *blend.PackingSummary `json:"packing,omitempty"` // of a source whose documents are packed: its padding
}

// A Level says how a finding is meant.
type Level string

// The levels of findings: Warning is something that a run would suffer from, Note something to
// know.
const (
	Warning Level = "warning"
	Note    Level = "note"
)

// A Finding is a sentence about the plan, its order or the storage.
type Finding struct {
	Level   Level  `json:"level"`
	Source  string `json:"source,omitempty"`
	Message string `json:"message"`
}

// An order says what stands at positions. A [blend.Plan] is one; tests have others.
type order interface {
	Locate(position int64) (blend.Sample, error)
	Positions(ctx context.Context, from, to int64) iter.Seq2[blend.Block, error]
}

// A simulation is what all parts of Run share.
type simulation struct {
	Options
	plan  *blend.Plan
	order order
	ctx   context.Context
}

// Run simulates a run of a plan.
func Run(ctx context.Context, p *blend.Plan, o Options) (*Report, error) {
	if o.Data != nil {
		p = o.Data.Plan
	}
	return run(ctx, p, p, o)
}

func run(ctx context.Context, p *blend.Plan, order order, o Options) (*Report, error) {
	if err := o.complete(p); err != nil {
		return nil, err
	}
	s := &simulation{Options: o, plan: p, order: order, ctx: ctx}
	if !s.plan.Windowed() && o.Data == nil {
		return nil, fmt.Errorf("the order %q is in files beside the plan, which must be open", p.OrderVersion())
	}
	r := &Report{Plan: p.Fingerprint(), Order: p.OrderVersion(), SequenceLength: p.SequenceLength,
		BatchSize: o.BatchSize, From: o.From, To: o.To,
		Steps: (o.To - o.From + int64(o.BatchSize) - 1) / int64(o.BatchSize)}
	var err error
	r.Sources = s.sources()
	if r.Mixture, err = s.mixture(); err != nil {
		return nil, err
	}
	if r.Shuffle, err = s.shuffle(); err != nil {
		return nil, err
	}
	if r.Reading, err = s.reading(); err != nil {
		return nil, err
	}
	r.Findings = r.findings()
	return r, nil
}

// complete fills in the defaults of the options and checks them.
func (o *Options) complete(p *blend.Plan) error {
	o.RanksPerNode = cmp.Or(o.RanksPerNode, 1)
	o.Samples = cmp.Or(o.Samples, DefaultSamples)
	o.To = cmp.Or(o.To, p.Length())
	if o.Progress == nil {
		o.Progress = func(string, int64, int64) {}
	}
	switch {
	case o.Nodes < 1 || o.RanksPerNode < 1 || o.Nodes > maxRanks/o.RanksPerNode:
		return fmt.Errorf("%d nodes of %d ranks: each must be at least 1, and the ranks at most %d", o.Nodes,
			o.RanksPerNode, maxRanks)
	case o.BatchSize < 1 || o.BatchSize > maxBatch:
		return fmt.Errorf("batch size %d is not between 1 and %d", o.BatchSize, maxBatch)
	case o.To == o.From:
		return fmt.Errorf("no position to read: the start and the end are both %d", o.From)
	case o.Samples < 1 || o.Samples > maxSamples:
		return fmt.Errorf("%d samples to look at; it must be from 1 to %d", o.Samples, maxSamples)
	case !(o.StepTime >= 0) || math.IsInf(o.StepTime, 0):
		return fmt.Errorf("a step of %g seconds", o.StepTime)
	}
	if _, err := blend.RecordRows(o.BatchSize, 0, o.Nodes*o.RanksPerNode, 0); err != nil {
		return err
	}
	grid, err := p.Grid(o.BatchSize)
	if err != nil {
		return err
	}
	if err := grid.Check(o.From, o.To); err != nil {
		return err
	}
	_, err = o.Storage.check()
	return err
}

// numbered says whether the numbers of a source's windows are places in it that an epoch draws all
// alike. Those of a source that has grown are drawn from the growth on, and Megatron's samples are
// numbered as they come after its shuffles.
func (s *simulation) numbered(source int) bool {
	return s.plan.Megatron == nil && len(s.plan.Sources[source].Growth) == 0
}

// locate is what stands at a position. It says so where an order needs its files.
func (s *simulation) locate(position int64) (blend.Sample, error) {
	if position&1023 == 0 {
		if err := context.Cause(s.ctx); err != nil {
			return blend.Sample{}, err
		}
	}
	return s.order.Locate(position)
}

func (s *simulation) sources() []Source {
	var list []Source
	for i, sum := range s.plan.Summary().Sources {
		out := Source{Name: sum.Name, Shards: sum.Shards, Tokens: sum.Tokens, Windows: sum.Windows,
			Samples: sum.Samples, Epochs: sum.Epochs, Repeats: sum.Repeats, Packing: sum.Packing}
		for _, sh := range s.plan.Sources[i].Shards {
			if out.Tail += sh.Tokens; sh.Tokens > int64(s.plan.SequenceLength) {
				out.Tail -= index.ShardWindows(s.plan.SequenceLength, sh.Tokens)*int64(s.plan.SequenceLength) + 1
			}
		}
		if !s.plan.Windowed() {
			out.Tail = -1
		}
		list = append(list, out)
	}
	return list
}
