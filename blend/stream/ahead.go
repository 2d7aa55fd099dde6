package stream

import (
	"cmp"
	"context"
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

	// A machine that reads every n-th sample uses an n-th of the bytes of a block. Up to this
	// number it fetches complete blocks: alone, a window of 8 KiB needs two blocks of 16 KiB with
	// their sums, and a request.
	mostHosts = 3
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
	if at.first >= s.o.To || !s.afterFirst(s.ctx) {
		return nil
	}
	at = s.after(at) // build has fetched the first record
	var group []blend.Sample
	for record := int64(1); at.first < s.o.To; record++ {
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
		after := s.after(at)
		// The first groups are small, so that the first records do not wait for others.
		if after.first < s.o.To && int64(len(group))*sample < min(groupBytes, record*sample) {
			at = after
			continue
		}
		list := slices.Clone(group)
		group = group[:0]
		o := s.fetchOptions(at)
		at = after
		fetches.Go(func() error {
			_ = s.d.Fetch(s.ctx, list, o)
			return nil
		})
		if s.ctx.Err() != nil {
			return nil
		}
	}
	return nil
}

// afterFirst waits until the first record is built. Its consumer waits for it, so nothing else uses
// the link meanwhile. It returns false if ctx is done.
func (s *Stream) afterFirst(ctx context.Context) bool {
	select {
	case <-s.begun:
		return true
	case <-ctx.Done():
		return false
	}
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

// fetchOptions returns the options for fetching the samples of the record at place p. The samples
// of the first record are fetched alone, because they are waited for.
func (s *Stream) fetchOptions(p place) blend.FetchOptions {
	return blend.FetchOptions{Starts: s.wantsStarts(),
		Blocks: p != (place{first: s.o.From}) && cmp.Or(s.o.Hosts, s.o.World) <= mostHosts}
}

// wantsStarts reports whether the records have the column document_starts.
func (s *Stream) wantsStarts() bool { return slices.Contains(s.columns, columnDocumentStarts) }
