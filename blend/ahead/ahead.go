// Package ahead decides which samples a stream fetches together from object stores, and how far
// ahead of its consumer. Package [mula/blend/simulate] counts requests with the same decisions.
package ahead

import "mula/blend"

// A store answers a request after tens of milliseconds, so the requests of many samples must be in
// progress at the same time.
const (
	bytesAhead = 256 << 20 // tokens of the samples that are fetched ahead
	groupBytes = 8 << 20   // tokens of the samples whose requests are combined
	Groups     = 8         // groups that are fetched at the same time

	// A machine that reads every n-th sample uses an n-th of the bytes of a block. Up to this
	// number it fetches complete blocks: alone, a window of 8 KiB needs two blocks of 16 KiB with
	// their sums, and a request.
	mostHosts = 3
)

// Blocks is [blend.FetchOptions.Blocks] for the reads ahead of a run on a number of machines with
// caches of cacheBytes bytes. Blocks that the cache cannot keep until their last window is read
// would be fetched again and again.
func Blocks(p *blend.Plan, hosts int, cacheBytes int64) bool {
	return p.Traits().Locality.Block > 0 && hosts <= mostHosts && GroupBytes(p) <= cacheBytes/2
}

// GroupBytes returns the number of bytes of one group of blocks of each source: the blocks that are
// read at a time.
func GroupBytes(p *blend.Plan) (bytes int64) {
	l := p.Traits().Locality
	for _, s := range p.Sources {
		windows := min(l.Block*l.Group, s.Windows())
		bytes += windows * int64(p.SequenceLength*p.TokenBytes())
	}
	return bytes
}

// A Queue divides the records of a stream, except the first, into groups that are fetched together.
// The first record is fetched alone, because its consumer waits for it.
type Queue struct {
	sample   int64 // bytes of the tokens of a sample
	distance int64 // records that are fetched ahead
	full     int64 // bytes of a group that is fetched at once
	next     int64 // number of the next record
	group    []blend.Sample
}

// NewQueue returns the queue of a stream whose records have a number of rows. The ranks of a
// machine share a cache of cacheBytes bytes, and each fetches ahead at most an eighth of its part:
// samples may need several times their bytes.
func NewQueue(p *blend.Plan, rows, ranksOfMachine int, cacheBytes int64) *Queue {
	sample := int64(p.TokenBytes() * p.SampleTokens())
	bytes := min(bytesAhead, cacheBytes/int64(8*ranksOfMachine))
	return &Queue{sample: sample, distance: max(1, bytes/(sample*int64(rows))), full: min(groupBytes, bytes/Groups),
		next: 1}
}

// Due reports whether the next record may be fetched after the consumer has taken a number of
// records.
func (q *Queue) Due(taken int64) bool { return q.next-taken <= q.distance }

// Add adds the samples of the next record. It returns the samples of the group that the record
// completes, or nil. last is set for the last record.
func (q *Queue) Add(samples []blend.Sample, last bool) []blend.Sample {
	q.group = append(q.group, samples...)
	// The first groups are small, so that the first records do not wait for others.
	complete := int64(len(q.group))*q.sample >= min(q.full, q.next*q.sample)
	q.next++
	if !complete && !last {
		return nil
	}
	group := q.group
	q.group = nil
	return group
}
