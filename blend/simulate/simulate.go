// Package simulate estimates, before a run, the storage load of a plan, and computes statistics of
// its order.
//
// The results are of two kinds. Statistics of the order are counted: the package computes the
// windows and shards at each position from the plan, and compares them with the plan's own bounds
// and with random draws. Times are estimates: they come from a simple model of storage, whose
// figures are assumptions. docs/reference/simulate.md has every formula.
package simulate

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"

	"mula/blend"
	"mula/index"
	"mula/internal/blockcache"
)

// Options are the options of [Run].
type Options struct {
	BatchSize    int // samples of a step, over all ranks; must be divisible by the number of ranks
	Nodes        int // number of nodes; each reads an equal part of every step
	RanksPerNode int // 0: 1
	// compute time of a step in seconds; 0 if unknown, then Run does not report whether storage
	// keeps up
	StepTime float64
	Storage  Storage
	// limit of a node's cache of an object store in bytes; 0: the limit of this machine's cache
	StoreCache int64
	From, To   int64 // positions [From, To), see [blend.Grid.Check]; To 0: the end of the plan
	Samples    int64 // maximum number of positions to examine one by one; 0: DefaultSamples

	// Data, if not nil, is the open plan. Run then computes document statistics, and the plan
	// passed to Run may be nil. Orders that are read from index files need Data.
	Data *blend.Data

	// Order, if not nil, is examined instead of the plan's order. Another loader may have drawn it
	// from the plan's shards. It needs only the positions [From, To).
	Order Order

	Progress func(what string, done, total int64) // may be nil; done and total count positions
}

// DefaultSamples is the default of [Options.Samples]. Each position needs about 400 bytes of
// memory.
const DefaultSamples = 1 << 20

// Limits of options.
const (
	maxRanks   = 1 << 24
	maxSamples = 1 << 26
	maxBatch   = 1 << 30
)

// A Report is the result of [Run].
type Report struct {
	Plan           string    `json:"plan"` // fingerprint
	Order          string    `json:"order_version"`
	SequenceLength int       `json:"sequence_length"`
	BatchSize      int       `json:"batch_size"`
	From           int64     `json:"from"`
	To             int64     `json:"to"`
	Steps          int64     `json:"steps"`
	Reading        Reading   `json:"reading"`
	Store          Store     `json:"object_store"`
	Mixture        Mixture   `json:"mixture"`
	Shuffle        Shuffle   `json:"shuffle"`
	Sources        []Source  `json:"sources"`
	Findings       []Finding `json:"findings"`
}

// A Source describes a source: its size, how often the plan draws from it, and its tokens outside
// all windows.
type Source struct {
	Name    string  `json:"name"`
	Shards  int     `json:"shards"`
	Tokens  int64   `json:"tokens"`
	Windows int64   `json:"windows"` // including validation windows
	Samples int64   `json:"samples"` // number in the whole plan
	Epochs  float64 `json:"epochs"`  // Samples per training window
	Repeats int64   `json:"repeats"` // samples whose window an earlier position of the plan has drawn
	// Tail is the number of tokens at the ends of shards that are in no window: T − (w·L + 1) for a
	// shard of T tokens with w windows, T if w is 0. It is -1 for orders that do not cut shards
	// into windows.
	Tail    int64                 `json:"tail_tokens"`
	Packing *blend.PackingSummary `json:"packing,omitempty"` // of a packed source, with its padding
}

// A Level is the severity of a finding.
type Level string

// The levels of findings. A Warning is a problem for a run; a Note is information.
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

// An Order yields the samples at positions. A [blend.Plan] implements it.
type Order interface {
	Locate(position int64) (blend.Sample, error)
	Positions(ctx context.Context, from, to int64) iter.Seq2[blend.Block, error]
}

// A simulation holds the common inputs of all parts of Run.
type simulation struct {
	Options
	plan   *blend.Plan
	traits blend.Traits // of the plan
	ctx    context.Context
}

// Run simulates a run of a plan.
func Run(ctx context.Context, p *blend.Plan, o Options) (*Report, error) {
	if o.Data != nil {
		p = o.Data.Plan
	}
	if o.Order == nil {
		o.Order = p
	}
	if err := o.complete(p); err != nil {
		return nil, err
	}
	s := &simulation{Options: o, plan: p, traits: p.Traits(), ctx: ctx}
	if !s.traits.Windows && o.Data == nil {
		return nil, fmt.Errorf("the order %q is read from index files; set Options.Data to the open plan",
			p.OrderVersion())
	}
	r := &Report{Plan: p.Fingerprint(), Order: p.OrderVersion(), SequenceLength: p.SequenceLength,
		BatchSize: o.BatchSize, From: o.From, To: o.To, Steps: s.stepsOfRange()}
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
	if r.Store, err = s.store(); err != nil {
		return nil, err
	}
	r.Findings = r.findings(s.traits.Locality.Block > 0)
	return r, nil
}

// complete sets the defaults of the options and validates them.
func (o *Options) complete(p *blend.Plan) error {
	o.RanksPerNode = cmp.Or(o.RanksPerNode, 1)
	o.Samples = cmp.Or(o.Samples, DefaultSamples)
	o.To = cmp.Or(o.To, p.Length())
	if o.Progress == nil {
		o.Progress = func(string, int64, int64) {}
	}
	switch {
	case o.Nodes < 1 || o.RanksPerNode < 1 || o.Nodes > maxRanks/o.RanksPerNode:
		return fmt.Errorf("%d nodes with %d ranks each: use at least 1 of each, and at most %d ranks in total",
			o.Nodes, o.RanksPerNode, maxRanks)
	case o.BatchSize < 1 || o.BatchSize > maxBatch:
		return fmt.Errorf("batch size %d: must be between 1 and %d", o.BatchSize, maxBatch)
	case o.To == o.From:
		return fmt.Errorf("no position to read: the start and the end are both %d", o.From)
	case o.Samples < 1 || o.Samples > maxSamples:
		return fmt.Errorf("number of samples %d: must be between 1 and %d", o.Samples, maxSamples)
	case !(o.StepTime >= 0) || math.IsInf(o.StepTime, 0):
		return fmt.Errorf("step time %g s: must be a finite number of at least 0", o.StepTime)
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
	if _, err = o.Storage.check(); err == nil && o.StoreCache == 0 {
		o.StoreCache, err = blockcache.Limit()
	}
	return err
}

// numbered reports whether a source's window numbers are locations in the source that each epoch
// draws uniformly. A source that has grown draws its new windows only after the growth. Samples of
// Megatron are numbered after its shuffle.
func (s *simulation) numbered(source int) bool {
	return s.traits.Scheduled && len(s.plan.Sources[source].Growth) == 0
}

// locate returns the sample at a position. It fails if ctx is cancelled.
func (s *simulation) locate(position int64) (blend.Sample, error) {
	if position&1023 == 0 {
		if err := context.Cause(s.ctx); err != nil {
			return blend.Sample{}, err
		}
	}
	return s.Order.Locate(position)
}

// checks returns the samples that are compared when the plan is opened, in the plan's own order.
func (s *simulation) checks() (list []blend.Sample, err error) {
	for _, c := range s.plan.Checks {
		at, err := s.plan.Locate(c.Position)
		if err != nil {
			return nil, err
		}
		list = append(list, at)
	}
	return list, nil
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
		if !s.traits.Windows {
			out.Tail = -1
		}
		list = append(list, out)
	}
	return list
}
