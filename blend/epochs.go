package blend

import (
	"fmt"
	"math"
	"math/big"
	"strings"
	"text/tabwriter"
)

// An EpochsError reports that a plan would repeat sources more often than their max_epochs allow.
type EpochsError struct {
	Rows []EpochsRow
	Fits int64 // the largest length, with the same stages and weights, that meets every limit
}

// An EpochsRow compares the samples that a plan draws from one source with the source's limit.
type EpochsRow struct {
	Source  string
	Windows int64   // training windows: samples of an epoch
	Samples int64   // that the plan draws, including skipped positions
	Epochs  float64 // Samples / Windows; if the source has grown, epochs plus the fraction of the last epoch
	Limit   string  // max_epochs as written
	Excess  int64   // samples beyond the limit; 0 if the limit is met
}

// Error returns a message with a table of all sources that have a limit.
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
			"a plan of %d samples would fit; or lower the weights of these sources, raise max_epochs, or add data",
			e.Fits)
	} else {
		b.WriteString("no plan with these weights would fit; lower the weights of these sources, raise max_epochs, " +
			"or add data")
	}
	return b.String()
}

// checkEpochs compares the samples drawn from each source with its limit. With an error it returns
// the first source that exceeds its limit. The plan must be compiled.
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
			// The position of the first excess sample is the length of the longest plan without it.
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

// epochs returns the number of epochs that the first n samples of the source span.
func (s *Source) epochs(n int64) float64 {
	epoch := s.order.EpochOf(n)
	first, length := s.order.Span(epoch)
	return float64(epoch) + float64(n-first)/float64(length)
}

// within returns the number of the source's samples within a limit of epochs; ok is false if the
// number overflows.
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

// distinct returns the number of different windows among the source's first n samples. If the last
// epoch contains a growth and is incomplete, distinct assumes that the new windows are evenly
// spread.
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
