package blend

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"

	"mula/internal/blockcache"
	"mula/internal/objects"
	"mula/shards"
)

// nearby is the number of bytes between two ranges of a shard up to which one request reads both.
const nearby = 64 << 10

// Remote reports whether a shard of the plan is in an object store.
func (p *Plan) Remote() bool {
	for i := range p.Sources {
		for k := range p.Sources[i].Shards {
			if objects.IsURL(p.ShardPath(i, k)) {
				return true
			}
		}
	}
	return false
}

// A TokenRange has the tokens [From, To) of a shard.
type TokenRange struct {
	Source, Shard int
	From, To      int64
}

// FetchOptions are the options of [Data.Fetch].
type FetchOptions struct {
	Starts bool // also fetch the index files that [Data.DocumentStarts] needs
	// Blocks fetches the complete block of each sample, if the plan has a [Traits.Locality]. The
	// other windows of the block are samples of the next positions.
	Blocks bool
}

// Fetch reads the tokens of samples that are in object stores into the cache of remote files, so
// that [ReadSample] does not wait for them. Ranges that are close to each other are read by one
// request, and requests are made in parallel. Fetch does not wait for tokens that another call is
// reading. It does nothing for local shards.
func (d *Data) Fetch(ctx context.Context, samples []Sample, o FetchOptions) error {
	ranges, err := d.Ranges(samples, o.Blocks, func(source, shard int) bool {
		return objects.IsURL(d.ShardPath(source, shard))
	})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(blockcache.Parallel)
	for _, r := range ranges {
		g.Go(func() error {
			return d.pool.Read(d.firsts[r.Source]+r.Shard, func(s *shards.Shard) error {
				if err := s.Fetch(ctx, r.From, r.To, o.Starts); err != nil {
					return fmt.Errorf("source %q: %w", d.Sources[r.Source].Name, err)
				}
				return nil
			})
		})
	}
	return g.Wait()
}

// Ranges returns the ranges that [Data.Fetch] reads for samples, each by one request or, if the
// cache has a part of it, by several. blocks is [FetchOptions.Blocks]. Only shards for which
// included returns true are read.
func (p *Plan) Ranges(samples []Sample, blocks bool, included func(source, shard int) bool) ([]TokenRange, error) {
	block := int64(0)
	if blocks {
		block = p.Traits().Locality.Block
	}
	var list []TokenRange
	var segments []segment
	for i := range samples {
		s := &samples[i]
		if block > 0 && included(s.Source, s.Shard) {
			list = p.appendBlock(list, s, block)
			continue
		}
		var err error
		if segments, err = p.order.segments(segments[:0], *s); err != nil {
			return nil, err
		}
		for _, g := range segments {
			if included(s.Source, g.shard) {
				list = append(list, TokenRange{s.Source, g.shard, g.token, g.token + g.length})
			}
		}
	}
	return p.joined(list), nil
}

// fetchChecks fetches the samples of the check values.
func (d *Data) fetchChecks(ctx context.Context) error {
	if !d.Remote() {
		return nil
	}
	var samples []Sample
	for _, position := range checkPositions(d.length) {
		s, err := d.Locate(position)
		if err != nil {
			return err
		}
		samples = append(samples, s)
	}
	return d.Fetch(ctx, samples, FetchOptions{})
}

// appendBlock appends the tokens of the block of a sample that are in the sample's shard. block is
// the number of windows of a block.
func (p *Plan) appendBlock(list []TokenRange, s *Sample, block int64) []TokenRange {
	length, sh := int64(p.SequenceLength), p.Sources[s.Source].Shards[s.Shard]
	before := s.Window % block                            // windows of the block before the sample
	from := max(0, s.Token-before*length)                 // both may be in another shard
	to := min(sh.Tokens, s.Token+(block-before)*length+1) // a window has one more token
	if n := len(list); n > 0 && list[n-1] == (TokenRange{s.Source, s.Shard, from, to}) {
		return list
	}
	return append(list, TokenRange{s.Source, s.Shard, from, to})
}

// joined sorts ranges and joins ranges that are close to each other.
func (p *Plan) joined(list []TokenRange) []TokenRange {
	slices.SortFunc(list, func(a, b TokenRange) int {
		return cmp.Or(cmp.Compare(a.Source, b.Source), cmp.Compare(a.Shard, b.Shard), cmp.Compare(a.From, b.From))
	})
	var out []TokenRange
	for _, r := range list {
		width := int64(p.Sources[r.Source].Shards[r.Shard].DType.Size())
		if n := len(out); n > 0 && out[n-1].Source == r.Source && out[n-1].Shard == r.Shard &&
			width*(r.From-out[n-1].To) <= nearby && width*(r.To-out[n-1].From) <= blockcache.Longest {
			out[n-1].To = max(out[n-1].To, r.To)
			continue
		}
		out = append(out, r)
	}
	return out
}
