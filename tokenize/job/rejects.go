package job

import (
	"context"
	"fmt"

	"mula/internal/quantity"
	"mula/tokenize/documents"
)

// A RejectLimit is the number of documents that may be skipped: Documents, plus Share of all
// documents that were read.
type RejectLimit struct {
	Documents int64
	Share     float64 // from 0 to 1
}

// exceeded returns an error if the job has skipped more documents than [Options.MaxRejects] allows.
func (o *Options) exceeded(s *Summary) error {
	limit := o.MaxRejects
	if limit == nil {
		return nil
	}
	var skipped int64
	for _, n := range s.Skipped {
		skipped += n
	}
	// Bad documents are counted before the sample is drawn.
	all := float64(s.Documents)
	if o.Sample > 0 {
		all /= o.Sample
	}
	all += float64(skipped)
	const rounding = 1e-12 // so that 0.1 % of 1,000 is 1
	if float64(skipped) <= float64(limit.Documents)+limit.Share*all*(1+rounding) {
		return nil
	}
	allowed := quantity.Grouped(limit.Documents)
	if limit.Share > 0 {
		allowed = fmt.Sprintf("%.4g %%", 100*limit.Share)
	}
	listed := ""
	if s.Rejects != "" {
		listed = "; " + s.Rejects + " lists them"
	}
	about := ""
	if o.Sample > 0 {
		about = "about "
	}
	return fmt.Errorf("%s of %s%s documents (%.3g %%) were skipped, and at most %s may be%s; repair them, or allow "+
		"more with --max-rejects",
		quantity.Grouped(skipped), about, quantity.Grouped(int64(all)), 100*float64(skipped)/all, allowed, listed)
}

// checkRejects waits until all units are encoded, and fails if too many documents were skipped. It
// then publishes the list of them, because the user needs it.
func (p *process) checkRejects(ctx context.Context) error {
	if p.o.MaxRejects == nil {
		return nil
	}
	if err := p.unitQueue.waitComplete(ctx); err != nil {
		return err
	}
	done := &finished{Summary: Summary{Documents: p.unitQueue.documents(), Rejects: p.o.Rejects,
		Skipped: make(map[documents.Kind]int64)}}
	list, err := p.skipped(ctx, done)
	if err != nil {
		return err
	}
	if list != nil {
		defer list.Abort()
	}
	err = p.o.exceeded(&done.Summary)
	if err != nil && list != nil {
		if err := list.Publish(); err != nil {
			return err
		}
	}
	return err
}
