package blend

import (
	"fmt"
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
	Epochs  float64 // Samples / Windows
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
		fmt.Fprintf(&b, "a plan of %d samples would fit; else lower the weights of these sources, raise max_epochs, or add data", e.Fits)
	} else {
		b.WriteString("no plan with these weights would fit: lower the weights of these sources, raise max_epochs, or add data")
	}
	return b.String()
}

// checkEpochs compares what each source has to give with its limit. With an error it gives the first source whose limit is broken. The
// plan must be compiled.
func (p *Plan) checkEpochs(limits []Number) (source int, err error) {
	e := &EpochsError{Fits: p.length}
	source = -1
	for i, limit := range limits {
		if !limit.IsSet() {
			continue
		}
		s := &p.Sources[i]
		row := EpochsRow{Source: s.Name, Windows: s.Training(), Samples: p.totals[i], Limit: limit.String()}
		row.Epochs = float64(row.Samples) / float64(row.Windows)
		if allowed, ok := limit.floorTimes(row.Windows); ok && allowed < row.Samples {
			if source < 0 {
				source = i
			}
			row.Excess = row.Samples - allowed
			// The position of the first sample too many is the length of the longest plan without it.
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
