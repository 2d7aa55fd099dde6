package blend

import (
	"errors"
	"fmt"
	"io"
)

// Steps is a source of step hashes in rising order: a [LogReader], or the logs of the ranks of a
// run put together by [Combine].
type Steps interface {
	Next() (StepHash, error) // io.EOF after the last
}

// A Comparison is what [Compare] found.
type Comparison struct {
	SamePlan bool  // both logs name the same plan
	First    int64 // the first step that both logs have reached
	Equal    int64 // steps that were compared and are equal
	Ordered  bool  // every compared step had an order hash in both logs, so that the order was compared too

	// Steps that only one of the logs reaches, before the first that both have and, if no step
	// differs, after the last. They were not compared.
	OnlyA, OnlyB []Range

	// Kind is NoDifference if all steps that both logs cover are equal. Else Step is the first that
	// is not, and A and B what the logs say of it.
	Kind DifferenceKind
	Step int64
	A, B StepHash
}

// A DifferenceKind is how two steps differ.
type DifferenceKind int

// The kinds of difference. With SetDiffers the steps hold different samples; with OrderDiffers the
// same in another order; with SamplesDiffer not even the same number of them; with PositionDiffers
// the step begins elsewhere in the plan, although it holds the same samples; with StepMissing one
// of the logs passes the step over.
const (
	NoDifference DifferenceKind = iota
	SetDiffers
	OrderDiffers
	SamplesDiffer
	PositionDiffers
	StepMissing
)

// String is the kind in words.
func (k DifferenceKind) String() string {
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
	return fmt.Sprintf("DifferenceKind(%d)", int(k))
}

// Compare compares two logs step by step and finds the first step that differs. The logs may begin
// and end at different steps, as those of a resumed run do; what only one of them covers is not
// compared. Logs of different sequence lengths or batch sizes cannot be compared, and logs without
// a common step neither.
func Compare(a, b Steps, headerA, headerB LogHeader) (Comparison, error) {
	c := Comparison{SamePlan: headerA.Plan == headerB.Plan, Ordered: true}
	switch {
	case headerA.SequenceLength != headerB.SequenceLength:
		return c, fmt.Errorf("the logs are of samples of %d and of %d tokens: they cannot be compared",
			headerA.SequenceLength+1, headerB.SequenceLength+1)
	case headerA.BatchSize != headerB.BatchSize:
		return c, fmt.Errorf("the logs are of steps of %d and of %d samples: they cannot be compared",
			headerA.BatchSize, headerB.BatchSize)
	case headerA.Rank != headerB.Rank || max(1, headerA.World) != max(1, headerB.World):
		return c, fmt.Errorf("the logs are of rank %d of %d and of rank %d of %d: put the logs of all ranks "+
			"together first",
			headerA.Rank, max(1, headerA.World), headerB.Rank, max(1, headerB.World))
	}
	x, errA := a.Next()
	y, errB := b.Next()
	// Where one log begins later than the other, the beginning of the other is passed over.
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

// addStep adds a step behind those of a list.
func addStep(list []Range, step int64) []Range {
	if n := len(list); n > 0 && list[n-1].To == step {
		list[n-1].To++
		return list
	}
	return append(list, Range{step, step + 1})
}

func difference(x, y StepHash) DifferenceKind {
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

// Combine puts the logs of all ranks of a run together: their set hashes are added up. Order hashes
// cannot be, so the steps have none, unless there is a single log. The logs must have the same
// header but for the rank, be of every rank once, and have the same steps.
func Combine(ranks []*LogReader) (Steps, LogHeader, error) {
	if len(ranks) == 0 {
		return nil, LogHeader{}, errors.New("no fingerprint log")
	}
	header := ranks[0].Header
	if len(ranks) == 1 && header.World <= 1 {
		return ranks[0], header, nil
	}
	seen := make(map[int]string, len(ranks))
	for _, r := range ranks {
		h := r.Header
		if other, ok := seen[h.Rank]; ok {
			return nil, header, fmt.Errorf("%s and %s are both of rank %d", other, r.name, h.Rank)
		}
		seen[h.Rank] = r.name
		if h.Rank = header.Rank; h != header {
			return nil, header, fmt.Errorf("%s and %s are not logs of the same run: their first lines differ",
				ranks[0].name, r.name)
		}
	}
	if len(ranks) != header.World {
		return nil, header, fmt.Errorf("%s is of a run of %d ranks, but %d logs were given", ranks[0].name,
			header.World, len(ranks))
	}
	header.Rank, header.World = 0, 0
	return combined(ranks), header, nil
}

type combined []*LogReader

// Next adds up the next step of all ranks.
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

// A RunLog is all logs of a run that has changed its plan, as one. It is a [Steps].
//
// A log is about one plan. A step that several of the logs have counts as the newest has it, and
// behind the newest log's last step the others count no more: what they have there, the run went
// back from. Where the newest has no step yet, the others count as far as they go.
type RunLog struct {
	Spans []Span // what Next has given so far, by plans

	logs []*LogReader // the newest first
	next []StepHash   // of each log
	end  []bool       // no more in the log
	took bool         // a step of the newest log
}

// A Span is steps of a run that follow each other under one plan.
type Span struct {
	Plan  string `json:"plan"`  // fingerprint
	Steps Range  `json:"steps"` // the first, and the one after the last
}

// JoinLogs makes one log of those of a run, the newest first, which gives the header. They must be
// of whole steps of one batch size and sequence length.
func JoinLogs(logs []*LogReader) (*RunLog, LogHeader, error) {
	if len(logs) == 0 {
		return nil, LogHeader{}, errors.New("no fingerprint log")
	}
	header := logs[0].Header
	r := &RunLog{logs: logs, next: make([]StepHash, len(logs)), end: make([]bool, len(logs))}
	for i, log := range logs {
		h := log.Header
		if h.Plan = header.Plan; h != header || h.World > 1 {
			return nil, header, fmt.Errorf("%s and %s are not logs of the same run: their first lines differ in "+
				"more than the plan, or they are of one rank", logs[0].name, log.name)
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

// Next gives the next step, or io.EOF after the last.
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
			return StepHash{}, fmt.Errorf("%s and %s both have step %d, and the newest log of the run has not: "+
				"which of them the run went on from is not known",
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
