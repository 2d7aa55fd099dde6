package simulate

import (
	"mula/blend"
	"mula/blend/ahead"
	"mula/internal/blockcache"
	"mula/internal/objects"
	"mula/shards"
)

// Store describes the requests of one node, the first, to an object store with the shards of the
// plan. They are counted by the rules of the reader of object stores, which fetches joined ranges
// ahead of the samples into a cache that the node's ranks share. If the plan has URLs, the shards
// with URLs are counted, else all shards.
type Store struct {
	CacheLimit     int64 `json:"cache_limit"`     // bytes of the node's cache
	GroupBytes     int64 `json:"group_bytes"`     // of a group of blocks of `shuffle` of each source; 0 without it
	CompleteBlocks bool  `json:"complete_blocks"` // these blocks are fetched completely
	Steps          int64 `json:"steps"`           // number of simulated steps, from the start of the range

	// Totals of the simulated steps.
	TokenBytes int64 `json:"token_bytes"` // of the samples
	Requests   int64 `json:"requests"`    // for tokens
	Bytes      int64 `json:"bytes"`       // of the responses to Requests
	// part of Bytes that had been fetched before, and removed from the cache
	Again        int64 `json:"bytes_fetched_again"`
	OpenRequests int64 `json:"open_requests"` // for opening shards, and for their .sums and .idx
	OpenBytes    int64 `json:"open_bytes"`    // of .sums and .idx
}

// amplification returns the number of bytes that are fetched per byte of tokens.
func (s *Store) amplification() float64 { return float64(s.Bytes) / float64(max(1, s.TokenBytes)) }

// shardRequests is the number of requests that open a shard: two for the sizes and versions of .bin
// and .idx, one for the manifest.
const shardRequests = 3

// A storeReader counts the requests of the ranks of a node.
type storeReader struct {
	*simulation
	layout *layout
	cache  *blockcache.Model
	files  []storeFile
	out    Store
}

// A storeFile is a shard.
type storeFile struct {
	path      string // "" if it is not in the store
	sums, idx int64  // bytes of .sums and .idx
}

// A storeRank is the state of one rank.
type storeRank struct {
	number  int
	queue   *ahead.Queue
	fetched [][]blend.Sample // by record: fetched ahead, not yet built
	next    int64            // the record after them
	opened  map[int32]bool   // files
}

// store simulates the first node in the first steps.
func (s *simulation) store() (Store, error) {
	share := int64(s.BatchSize / s.Nodes)
	r := &storeReader{simulation: s, layout: newLayout(s.plan, sumBlock), cache: blockcache.NewModel(s.StoreCache),
		out: Store{CacheLimit: s.StoreCache, GroupBytes: ahead.GroupBytes(s.plan),
			CompleteBlocks: ahead.Blocks(s.plan, s.Nodes, s.StoreCache),
			Steps:          s.examined(share)}}
	remote := s.plan.Remote()
	for i := range s.plan.Sources {
		for k, sh := range s.plan.Sources[i].Shards {
			path := s.plan.ShardPath(i, k)
			if remote && !objects.IsURL(path) {
				path = ""
			}
			sums, idx := shards.FetchedWhole(sh.DType, sh.Tokens, sh.Documents)
			r.files = append(r.files, storeFile{path, sums, idx})
		}
	}
	checks, err := s.checks()
	if err != nil {
		return r.out, err
	}
	var ranks []*storeRank
	for number := range s.RanksPerNode {
		ranks = append(ranks, &storeRank{number: number, opened: map[int32]bool{}, next: 1,
			queue: ahead.NewQueue(s.plan, int(share)/s.RanksPerNode, s.RanksPerNode, s.StoreCache)})
	}
	if err := r.build(ranks[0], checks, false); err != nil {
		return r.out, err
	}
	r.out.TokenBytes = 0
	for _, rank := range ranks {
		first, err := r.samples(rank, 0)
		if err == nil {
			err = r.build(rank, first, false)
		}
		if err != nil {
			return r.out, err
		}
	}
	for step := int64(1); step < r.out.Steps; step++ {
		for more := true; more; { // the ranks fetch at the same time
			more = false
			for _, rank := range ranks {
				fetched, err := r.ahead(rank, step-1)
				if err != nil {
					return r.out, err
				}
				more = more || fetched
			}
		}
		for _, rank := range ranks {
			samples := rank.fetched[0]
			rank.fetched = rank.fetched[1:]
			if err := r.build(rank, samples, r.out.CompleteBlocks); err != nil {
				return r.out, err
			}
		}
		if step&15 == 0 || step == r.out.Steps-1 {
			s.Progress("simulating an object store", (step+1)*share, r.out.Steps*share)
		}
	}
	return r.out, nil
}

// ahead fetches the next group of a rank, if it is due after the rank has taken a number of
// records.
func (r *storeReader) ahead(rank *storeRank, taken int64) (fetched bool, err error) {
	for rank.next < r.out.Steps && rank.queue.Due(taken) {
		samples, err := r.samples(rank, rank.next)
		if err != nil {
			return false, err
		}
		rank.next++
		rank.fetched = append(rank.fetched, samples)
		if group := rank.queue.Add(samples, rank.next == r.out.Steps); group != nil {
			return true, r.fetch(rank, group, r.out.CompleteBlocks)
		}
	}
	return false, nil
}

// samples returns the samples of a rank in a step.
func (r *storeReader) samples(rank *storeRank, step int64) ([]blend.Sample, error) {
	rows := int64(r.BatchSize / r.Nodes / r.RanksPerNode)
	first := min(r.From+step*int64(r.BatchSize)+int64(rank.number)*rows, r.To)
	list := make([]blend.Sample, 0, rows)
	for p := first; p < min(first+rows, r.To); p++ {
		at, err := r.locate(p)
		if err != nil {
			return nil, err
		}
		if !at.Skipped {
			list = append(list, at)
		}
	}
	return list, nil
}

// fetch counts the requests of [blend.Data.Fetch].
func (r *storeReader) fetch(rank *storeRank, samples []blend.Sample, blocks bool) error {
	return r.ranges(samples, blocks, func(file int32, from, to int64) {
		r.open(rank, file)
		r.count(func() { r.cache.Fetch(r.files[file].path, r.layout.size[file], from, to) })
	})
}

// build counts the requests for building a record.
func (r *storeReader) build(rank *storeRank, samples []blend.Sample, blocks bool) error {
	if err := r.fetch(rank, samples, blocks); err != nil {
		return err
	}
	for i := range samples {
		err := r.ranges(samples[i:i+1], false, func(file int32, from, to int64) {
			r.out.TokenBytes += to - from
			r.count(func() { r.cache.Read(r.files[file].path, r.layout.size[file], from, to) })
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// ranges calls f with the ranges of bytes of samples.
func (r *storeReader) ranges(samples []blend.Sample, blocks bool, f func(file int32, from, to int64)) error {
	list, err := r.plan.Ranges(samples, blocks, func(source, shard int) bool {
		return r.files[int(r.layout.first[source])+shard].path != ""
	})
	for _, t := range list {
		file := r.layout.first[t.Source] + int32(t.Shard)
		f(file, t.From*r.layout.width[file], t.To*r.layout.width[file])
	}
	return err
}

// count adds the requests of a use of the cache to the requests for tokens.
func (r *storeReader) count(use func()) {
	before := *r.cache
	use()
	r.out.Requests += r.cache.Requests - before.Requests
	r.out.Bytes += r.cache.Bytes - before.Bytes
	r.out.Again += r.cache.Again - before.Again
}

// open counts the requests that open a shard in a rank.
func (r *storeReader) open(rank *storeRank, file int32) {
	if rank.opened[file] {
		return
	}
	rank.opened[file] = true
	before := *r.cache
	f := &r.files[file]
	r.cache.Whole(f.path+".sums", f.sums)
	r.cache.Whole(f.path+".idx", f.idx)
	r.out.OpenRequests += shardRequests + r.cache.Requests - before.Requests
	r.out.OpenBytes += r.cache.Bytes - before.Bytes
}
