package blend

import (
	"errors"
	"fmt"
	"io"
)

// Steps is a source of step hashes in rising order: a [LogReader], or the logs of the ranks of a run put together by [Combine].
type Steps interface {
	Next() (StepHash, error) // io.EOF after the last
}

// A Comparison is what [Compare] found.
type Comparison struct {
	SamePlan bool  // both logs name the same plan
	First    int64 // the first step that both logs have reached
	Equal    int64 // steps that were compared and are equal
	Ordered  bool  // every compared step had an order hash in both logs, so that the order was compared too

	// Kind is NoDifference if all steps that both logs cover are equal. Else Step is the first that is not, and A and B what the logs say
	// of it.
	Kind DifferenceKind
	Step int64
	A, B StepHash
}

// A DifferenceKind is how two steps differ.
type DifferenceKind int

// The kinds of difference. With SetDiffers the steps hold different samples; with OrderDiffers the same in another order; with
// SamplesDiffer not even the same number of them; with PositionDiffers the step begins elsewhere in the plan, although it holds the same
// samples; with StepMissing one of the logs passes the step over.
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
		return "the same samples, but the step begins at another position"
	case StepMissing:
		return "one log does not have the step"
	}
	return fmt.Sprintf("DifferenceKind(%d)", int(k))
}

// Compare compares two logs step by step and finds the first step that differs. The logs may begin and end at different steps, as those of
// a resumed run do; what only one of them covers is not compared. Logs of different sequence lengths or batch sizes cannot be compared,
// and logs without a common step neither.
func Compare(a, b Steps, headerA, headerB LogHeader) (Comparison, error) {
	c := Comparison{SamePlan: headerA.Plan == headerB.Plan, Ordered: true}
	switch {
	case headerA.SequenceLength != headerB.SequenceLength:
		return c, fmt.Errorf("the logs are of samples of %d and of %d tokens: they cannot be compared", headerA.SequenceLength+1, headerB.SequenceLength+1)
	case headerA.BatchSize != headerB.BatchSize:
		return c, fmt.Errorf("the logs are of steps of %d and of %d samples: they cannot be compared", headerA.BatchSize, headerB.BatchSize)
	case headerA.Rank != headerB.Rank || max(1, headerA.World) != max(1, headerB.World):
		return c, fmt.Errorf("the logs are of rank %d of %d and of rank %d of %d: put the logs of all ranks together first",
			headerA.Rank, max(1, headerA.World), headerB.Rank, max(1, headerB.World))
	}
	x, errA := a.Next()
	y, errB := b.Next()
	// Where one log begins later than the other, the beginning of the other is passed over.
	for errA == nil && errB == nil && x.Step < y.Step {
		x, errA = a.Next()
	}
	for errA == nil && errB == nil && y.Step < x.Step {
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

// Combine puts the logs of all ranks of a run together: their set hashes are added up. Order hashes cannot be, so the steps have none,
// unless there is a single log. The logs must have the same header but for the rank, be of every rank once, and have the same steps.
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
			return nil, header, fmt.Errorf("%s and %s are not logs of the same run: their first lines differ", ranks[0].name, r.name)
		}
	}
	if len(ranks) != header.World {
		return nil, header, fmt.Errorf("%s is of a run of %d ranks, but %d logs were given", ranks[0].name, header.World, len(ranks))
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
			return StepHash{}, fmt.Errorf("%s has step %d (from position %d) where %s has step %d (from position %d)", c[0].name, sum.Step, sum.First, r.name, s.Step, s.First)
		}
		sum.Samples += s.Samples
		sum.Set.Add(s.Set)
	}
	return sum, end
}
