package stream

import (
	"slices"

	"golang.org/x/sync/errgroup"

	"mula/blend"
)

// How far a stream fetches ahead from object stores. A store answers a request after tens of
// milliseconds, so the requests of many samples must be in progress at the same time.
const (
	aheadBytes = 256 << 20 // tokens of the samples that are fetched ahead
	groupBytes = 8 << 20   // tokens of the samples whose requests are combined
	groups     = 8         // groups that are fetched at the same time
)

// fetchAhead fetches the tokens of the records from a place on into the cache of remote files,
// ahead of the records that are built. The order of the samples is known, so every byte is known in
// advance. Errors are ignored: build reads the same bytes and reports them.
func (s *Stream) fetchAhead(at place) error {
	sample := int64(s.width * s.d.SampleTokens())
	ahead := max(1, aheadBytes/(sample*int64(s.o.MicroBatch)))
	var fetches errgroup.Group
	fetches.SetLimit(groups)
	defer fetches.Wait()
	var group []blend.Sample
	for record := int64(0); at.first < s.o.To; record++ {
		for record-s.count.Load() > ahead {
			select {
			case <-s.taken:
			case <-s.ctx.Done():
				return nil
			}
		}
		samples, err := s.samplesAt(at)
		if err != nil {
			return nil
		}
		group = append(group, samples...)
		at = s.after(at)
		// The first record is fetched alone, so that it does not wait for others.
		if record > 0 && at.first < s.o.To && int64(len(group))*sample < groupBytes {
			continue
		}
		list := slices.Clone(group)
		group = group[:0]
		fetches.Go(func() error {
			_ = s.d.Fetch(s.ctx, list, s.wantsStarts())
			return nil
		})
		if s.ctx.Err() != nil {
			return nil
		}
	}
	return nil
}

// advance tells fetchAhead that a record was taken.
func (s *Stream) advance() {
	if s.taken == nil {
		return
	}
	s.count.Add(1)
	select {
	case s.taken <- struct{}{}:
	default:
	}
}

// wantsStarts reports whether the records have the column document_starts.
func (s *Stream) wantsStarts() bool { return slices.Contains(s.columns, columnDocumentStarts) }
