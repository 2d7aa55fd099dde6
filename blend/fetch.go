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

// A stretch is a token range [from, to) of a shard.
type stretch struct {
	source, shard int
	from, to      int64
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
// request, and requests are made in parallel. Fetch does nothing for local shards.
func (d *Data) Fetch(ctx context.Context, samples []Sample, o FetchOptions) error {
	block := int64(0)
	if o.Blocks {
		block = d.Traits().Locality.Block
	}
	var list []stretch
	var segments []segment
	for i := range samples {
		s := &samples[i]
		if block > 0 && objects.IsURL(d.ShardPath(s.Source, s.Shard)) {
			list = d.appendBlock(list, s, block)
			continue
		}
		var err error
		if segments, err = d.order.segments(segments[:0], *s); err != nil {
			return err
		}
		for _, g := range segments {
			if objects.IsURL(d.ShardPath(s.Source, g.shard)) {
				list = append(list, stretch{s.Source, g.shard, g.token, g.token + g.length})
			}
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(blockcache.Parallel)
	for _, r := range joined(list) {
		g.Go(func() error {
			return d.pool.Read(d.firsts[r.source]+r.shard, func(s *shards.Shard) error {
				if err := s.Fetch(ctx, r.from, r.to, o.Starts); err != nil {
					return fmt.Errorf("source %q: %w", d.Sources[r.source].Name, err)
				}
				return nil
			})
		})
	}
	return g.Wait()
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
func (d *Data) appendBlock(list []stretch, s *Sample, block int64) []stretch {
	length, sh := int64(d.SequenceLength), d.Sources[s.Source].Shards[s.Shard]
	before := s.Window % block                            // windows of the block before the sample
	from := max(0, s.Token-before*length)                 // both may be in another shard
	to := min(sh.Tokens, s.Token+(block-before)*length+1) // a window has one more token
	if n := len(list); n > 0 && list[n-1] == (stretch{s.Source, s.Shard, from, to}) {
		return list
	}
	return append(list, stretch{s.Source, s.Shard, from, to})
}

// joined sorts stretches and joins stretches that are close to each other.
func joined(list []stretch) []stretch {
	slices.SortFunc(list, func(a, b stretch) int {
		return cmp.Or(cmp.Compare(a.source, b.source), cmp.Compare(a.shard, b.shard), cmp.Compare(a.from, b.from))
	})
	var out []stretch
	for _, r := range list {
		if n := len(out); n > 0 && out[n-1].source == r.source && out[n-1].shard == r.shard &&
			r.from-out[n-1].to <= nearby/4 && r.to-out[n-1].from <= blockcache.Longest/4 { // 4 bytes a token, or 2
			out[n-1].to = max(out[n-1].to, r.to)
			continue
		}
		out = append(out, r)
	}
	return out
}
