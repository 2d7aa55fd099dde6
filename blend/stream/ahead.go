package stream

import (
	"cmp"
	"context"
	"slices"

	"golang.org/x/sync/errgroup"

	"mula/blend"
	"mula/blend/ahead"
)

// fetchAhead fetches the tokens of the records from a place on into the cache of remote files,
// ahead of the records that are built. The order of the samples is known, so every byte is known in
// advance. Errors are ignored: build reads the same bytes and reports them.
func (s *Stream) fetchAhead(at place) error {
	hosts := s.hosts()
	queue := ahead.NewQueue(s.d.Plan, s.o.MicroBatch, (s.o.World+hosts-1)/hosts, s.cache)
	var fetches errgroup.Group
	fetches.SetLimit(ahead.Groups)
	defer fetches.Wait()
	if at.first >= s.o.To || !s.afterFirst(s.ctx) {
		return nil
	}
	for at = s.after(at); at.first < s.o.To && s.ctx.Err() == nil; { // build has fetched the first record
		for !queue.Due(s.count.Load()) {
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
		o := s.fetchOptions(at)
		at = s.after(at)
		if group := queue.Add(samples, at.first >= s.o.To); group != nil {
			fetches.Go(func() error {
				_ = s.d.Fetch(s.ctx, group, o)
				return nil
			})
		}
	}
	return nil
}

// hosts returns the number of machines of the ranks.
func (s *Stream) hosts() int { return cmp.Or(s.o.Hosts, s.o.World) }

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
		Blocks: p != (place{first: s.o.From}) && s.blocks}
}

// wantsStarts reports whether the records have the column document_starts.
func (s *Stream) wantsStarts() bool { return slices.Contains(s.columns, columnDocumentStarts) }
