package fingerprint

import (
	"errors"
	"fmt"
	"io"
)

// Steps yields step hashes in ascending order. A [Reader] implements it. [Combine] makes one
// from the logs of all ranks.
type Steps interface {
	Next() (StepHash, error) // io.EOF after the last
}

// A Range is the half-open range [From, To) of steps.
type Range struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

// A Comparison is the result of [Compare].
type Comparison struct {
	SamePlan bool  // both logs name the same plan
	First    int64 // the first step that both logs have
	Equal    int64 // number of equal steps
	Ordered  bool  // every compared step had an order hash in both logs, so the order was compared too

	// Steps that only one log has, before the first common step and, if no step differs, after the
	// last. They were not compared.
	OnlyA, OnlyB []Range

	// Kind is NoDifference if all common steps are equal. Otherwise Step is the first step that
	// differs, and A and B are its hashes in the two logs.
	Kind Kind
	Step int64
	A, B StepHash
}

// A Kind describes how two steps differ.
type Kind int

// The kinds of difference.
//   - SetDiffers: the steps hold different samples.
//   - OrderDiffers: the steps hold the same samples in another order.
//   - SamplesDiffer: the steps hold different numbers of samples.
//   - PositionDiffers: the steps hold the same samples but start at different positions.
//   - StepMissing: one log does not have the step.
const (
	NoDifference Kind = iota
	SetDiffers
	OrderDiffers
	SamplesDiffer
	PositionDiffers
	StepMissing
)

// String describes the kind.
func (k Kind) String() string {
	switch k {
	case NoDifference:
		return "no difference"
	case SetDiffers:
		return "the samples differ"
	case OrderDiffers:
		return "the same samples in another order"
	case SamplesDiffer:
		return "the number of samples differs"
	case PositionDiffers:
		return "the same samples, but the step starts at another position"
	case StepMissing:
		return "one log does not have the step"
	}
	return fmt.Sprintf("Kind(%d)", int(k))
}

// Compare compares two logs step by step and returns the first step that differs. The logs may
// start and end at different steps, as the logs of a resumed run do. Steps of only one log are not
// compared. Compare fails if sequence lengths, batch sizes or ranks differ, or if the logs have no
// common step.
func Compare(a, b Steps, headerA, headerB Header) (Comparison, error) {
	c := Comparison{SamePlan: headerA.Plan == headerB.Plan, Ordered: true}
	switch {
	case headerA.SequenceLength != headerB.SequenceLength:
		return c, fmt.Errorf("samples have %d tokens in one log and %d in the other; such logs cannot be compared",
			headerA.SequenceLength+1, headerB.SequenceLength+1)
	case headerA.BatchSize != headerB.BatchSize:
		return c, fmt.Errorf("steps have %d samples in one log and %d in the other; such logs cannot be compared",
			headerA.BatchSize, headerB.BatchSize)
	case headerA.Rank != headerB.Rank || max(1, headerA.World) != max(1, headerB.World):
		return c, fmt.Errorf("one log is from rank %d of %d, the other from rank %d of %d; combine the logs of all "+
			"ranks first",
			headerA.Rank, max(1, headerA.World), headerB.Rank, max(1, headerB.World))
	}
	x, errA := a.Next()
	y, errB := b.Next()
	// Skip the steps before the first step of the log that starts later.
	for errA == nil && errB == nil && x.Step < y.Step {
		c.OnlyA = addStep(c.OnlyA, x.Step)
		x, errA = a.Next()
	}
	for errA == nil && errB == nil && y.Step < x.Step {
		c.OnlyB = addStep(c.OnlyB, y.Step)
		y, errB = b.Next()
	}
	for c.First = max(x.Step, y.Step); errA == nil && errB == nil; c.Equal++ {
		c.Kind = difference(x, y)
		if c.Kind != NoDifference {
			c.Step, c.A, c.B = min(x.Step, y.Step), x, y
			return c, nil
		}
		c.Ordered = c.Ordered && x.Order != nil && y.Order != nil
		x, errA = a.Next()
		y, errB = b.Next()
	}
	for errA == nil && errors.Is(errB, io.EOF) {
		c.OnlyA = addStep(c.OnlyA, x.Step)
		x, errA = a.Next()
	}
	for errB == nil && errors.Is(errA, io.EOF) {
		c.OnlyB = addStep(c.OnlyB, y.Step)
		y, errB = b.Next()
	}
	for _, err := range []error{errA, errB} {
		if err != nil && !errors.Is(err, io.EOF) {
			return c, err
		}
	}
	if c.Equal == 0 {
		return c, errors.New("the logs have no step in common")
	}
	return c, nil
}

// addStep appends a step to a list of ranges.
func addStep(list []Range, step int64) []Range {
	if n := len(list); n > 0 && list[n-1].To == step {
		list[n-1].To++
		return list
	}
	return append(list, Range{step, step + 1})
}

func difference(x, y StepHash) Kind {
	switch {
	case x.Step != y.Step:
		return StepMissing
	case x.Samples != y.Samples:
		return SamplesDiffer
	case x.Set != y.Set:
		return SetDiffers
	case x.Order != nil && y.Order != nil && *x.Order != *y.Order:
		return OrderDiffers
	case x.First != y.First:
		return PositionDiffers
	}
	return NoDifference
}

// Combine merges the logs of all ranks of a run into one. It adds up their set hashes. Order hashes
// cannot be added, so the merged steps have none, unless there is a single log. The logs must have
// the same header except for the rank, include every rank exactly once, and have the same steps.
func Combine(ranks []*Reader) (Steps, Header, error) {
	if len(ranks) == 0 {
		return nil, Header{}, errors.New("no fingerprint log")
	}
	header := ranks[0].Header
	if len(ranks) == 1 && header.World <= 1 {
		return ranks[0], header, nil
	}
	seen := make(map[int]string, len(ranks))
	for _, r := range ranks {
		h := r.Header
		if other, ok := seen[h.Rank]; ok {
			return nil, header, fmt.Errorf("%s and %s are both from rank %d", other, r.name, h.Rank)
		}
		seen[h.Rank] = r.name
		if h.Rank = header.Rank; h != header {
			return nil, header, fmt.Errorf("%s and %s are not logs of the same run: their first lines differ",
				ranks[0].name, r.name)
		}
	}
	if len(ranks) != header.World {
		return nil, header,
			fmt.Errorf("%s is from a run of %d ranks, but there are %d logs; pass the log of every rank",
				ranks[0].name, header.World, len(ranks))
	}
	header.Rank, header.World = 0, 0
	return combined(ranks), header, nil
}

type combined []*Reader

// Next returns the sum of the next step of all ranks.
func (c combined) Next() (StepHash, error) {
	sum, end := c[0].Next()
	if end != nil && !errors.Is(end, io.EOF) {
		return StepHash{}, end
	}
	sum.Order = nil
	for _, r := range c[1:] {
		s, err := r.Next()
		switch {
		case err != nil && !errors.Is(err, io.EOF):
			return StepHash{}, err
		case (err == nil) != (end == nil):
			return StepHash{}, fmt.Errorf("%s and %s end at different steps", c[0].name, r.name)
		case err != nil:
			continue
		case s.Step != sum.Step || s.First != sum.First:
			return StepHash{}, fmt.Errorf("%s has step %d (from position %d) where %s has step %d (from position %d)",
				c[0].name, sum.Step, sum.First, r.name, s.Step, s.First)
		}
		sum.Samples += s.Samples
		sum.Set.Add(s.Set)
	}
	return sum, end
}

// A RunLog merges all logs of a run that has changed its plan. It implements [Steps].
//
// Each log belongs to one plan. If several logs have a step, the newest log's hash counts. Steps of
// older logs after the newest log's last step do not count, because the run discarded them. If the
// newest log has no step yet, all steps of the older logs count.
type RunLog struct {
	Spans []Span // the steps that Next has returned so far, by plan

	logs []*Reader  // newest first
	next []StepHash // of each log
	end  []bool     // the log has no more steps
	took bool       // Next has returned a step of the newest log
}

// A Span is a range of steps of a run under one plan.
type Span struct {
	Plan  string `json:"plan"` // fingerprint
	Steps Range  `json:"steps"`
}

// Join merges the logs of one run, given newest first. It returns the newest log's header. All
// logs must have the same batch size and sequence length, and must not be from one rank of several.
func Join(logs []*Reader) (*RunLog, Header, error) {
	if len(logs) == 0 {
		return nil, Header{}, errors.New("no fingerprint log")
	}
	header := logs[0].Header
	r := &RunLog{logs: logs, next: make([]StepHash, len(logs)), end: make([]bool, len(logs))}
	for i, log := range logs {
		h := log.Header
		if h.Plan = header.Plan; h != header || h.World > 1 {
			return nil, header, fmt.Errorf("%s and %s are not logs of the same run: their first lines differ in more "+
				"than the plan, or they are from one rank of several", logs[0].name, log.name)
		}
		if err := r.advance(i); err != nil {
			return nil, header, err
		}
	}
	return r, header, nil
}

func (r *RunLog) advance(log int) error {
	var err error
	if r.next[log], err = r.logs[log].Next(); errors.Is(err, io.EOF) {
		r.end[log], err = true, nil
	}
	return err
}

// Next returns the next step, or io.EOF after the last.
func (r *RunLog) Next() (StepHash, error) {
	if r.end[0] && r.took {
		return StepHash{}, io.EOF
	}
	from := -1
	for i := range r.logs {
		if !r.end[i] && (from < 0 || r.next[i].Step < r.next[from].Step) {
			from = i
		}
	}
	if from < 0 {
		return StepHash{}, io.EOF
	}
	step := r.next[from]
	for i, log := range r.logs {
		if r.end[i] || r.next[i].Step != step.Step {
			continue
		}
		if from > 0 && i > from {
			return StepHash{}, fmt.Errorf("%s and %s both have step %d, but the newest log does not; it is unknown "+
				"from which log the run resumed",
				r.logs[from].name, log.name, step.Step)
		}
		if err := r.advance(i); err != nil {
			return StepHash{}, err
		}
	}
	r.took = r.took || from == 0
	plan, n := r.logs[from].Header.Plan, len(r.Spans)
	if n > 0 && r.Spans[n-1].Plan == plan && r.Spans[n-1].Steps.To == step.Step {
		r.Spans[n-1].Steps.To++
	} else {
		r.Spans = append(r.Spans, Span{plan, Range{step.Step, step.Step + 1}})
	}
	return step, nil
}
