package blend

import (
	"fmt"
	"math"
	"math/big"
	"strings"
	"text/tabwriter"
)

// An EpochsError says that a plan would repeat sources more often than their max_epochs allow.
type EpochsError struct {
	Rows []EpochsRow
	Fits int64 // the largest number of samples, with the same stages and weights, that keeps every limit
}

// An EpochsRow is what a plan asks of one source with a limit.
type EpochsRow struct {
	Source  string
	Windows int64   // training windows: samples of an epoch
	Samples int64   // that the plan draws, skipped ones included
	Epochs  float64 // Samples / Windows; of a source that has grown, epochs and the part of the last one
	Limit   string  // max_epochs as written
	Excess  int64   // samples beyond the limit; 0 if it is kept
}

// Error is a message with a table of all sources that have a limit.
func (e *EpochsError) Error() string {
	var b strings.Builder
	b.WriteString("the plan repeats sources more often than max_epochs allows:\n")
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "source\twindows\tsamples\tepochs\tmax_epochs\texcess samples\t\n")
	for _, r := range e.Rows {
		fmt.Fprintf(t, "%s\t%d\t%d\t%.3f\t%s\t%d\t\n", r.Source, r.Windows, r.Samples, r.Epochs, r.Limit, r.Excess)
	}
	t.Flush()
	if e.Fits > 0 {
		fmt.Fprintf(&b,
			"a plan of %d samples would fit; else lower the weights of these sources, raise max_epochs, or add data",
			e.Fits)
	} else {
		b.WriteString("no plan with these weights would fit: lower the weights of these sources, raise max_epochs, " +
			"or add data")
	}
	return b.String()
}

// checkEpochs compares what each source has to give with its limit. With an error it gives the
// first source whose limit is broken. The plan must be compiled.
func (p *Plan) checkEpochs(limits []Number) (source int, err error) {
	e := &EpochsError{Fits: p.length}
	source = -1
	for i, limit := range limits {
		if !limit.IsSet() {
			continue
		}
		s := &p.Sources[i]
		row := EpochsRow{Source: s.Name, Windows: s.Training(), Samples: p.totals[i], Limit: limit.String()}
		row.Epochs = s.epochs(row.Samples)
		if allowed, ok := s.within(limit); ok && allowed < row.Samples {
			if source < 0 {
				source = i
			}
			row.Excess = row.Samples - allowed
			// The position of the first sample too many is the length of the longest plan without
			// it.
			if position, ok := p.position(i, allowed); ok {
				e.Fits = min(e.Fits, position)
			}
		}
		e.Rows = append(e.Rows, row)
	}
	if source < 0 {
		return source, nil
	}
	return source, e
}

// epochs is how many epochs the first n samples of the source are.
func (s *Source) epochs(n int64) float64 {
	epoch := s.order.EpochOf(n)
	first, length := s.order.Span(epoch)
	return float64(epoch) + float64(n-first)/float64(length)
}

// within is the number of the source's samples that keep to a limit of epochs; ok is false for more
// than there are numbers.
func (s *Source) within(limit Number) (samples int64, ok bool) {
	whole, ok := limit.floorTimes(1)
	if !ok {
		return 0, false
	}
	first, length := s.order.Span(whole)
	part := new(big.Rat).Sub(limit.rat, new(big.Rat).SetInt64(whole))
	rest, _ := Number{rat: part}.floorTimes(length) // below length
	return first + rest, first <= math.MaxInt64-rest && first < math.MaxInt64
}

// distinct is how many windows of the source its first n samples have. In an epoch that a growth
// fell into, and that is not over, its new windows are counted as if they came evenly.
func (s *Source) distinct(n int64) int64 {
	epoch := s.order.EpochOf(n)
	first, length := s.order.Span(epoch)
	if epoch == 0 {
		return n
	}
	_, known := s.order.Span(epoch - 1)
	fresh := float64(0)
	for i, g := range s.Growth {
		if g.Sample >= first && g.Sample < n {
			fresh += float64(s.parts[i+1].count) * float64(n-g.Sample) / float64(first+length-g.Sample)
		}
	}
	return known + int64(fresh)
}
