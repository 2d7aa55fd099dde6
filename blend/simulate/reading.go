package simulate

import (
	"cmp"
	"math"
	"slices"

	"mula/blend"
	"mula/index"
	"mula/shards"
)

// Reading describes the reads of one node, the first, and the time they take in the model.
type Reading struct {
	Storage      Storage `json:"storage"`
	Nodes        int     `json:"nodes"`
	RanksPerNode int     `json:"ranks_per_node"`
	StepTime     float64 `json:"step_time"` // seconds; 0: not known
	Steps        int64   `json:"steps"`     // number of simulated steps, from the start of the range

	// Means per simulated step. Tokens are the tokens of the samples, Wanted the requests to the
	// cache, Read the reads from storage.
	TokenBytes  float64 `json:"token_bytes"`
	WantedBytes float64 `json:"wanted_bytes"`
	Wanted      float64 `json:"wanted_requests"`
	Bytes       float64 `json:"read_bytes"`
	Requests    float64 `json:"read_requests"`
	ReadTime    float64 `json:"read_time"` // seconds
	// of all nodes over all steps of the range, if these are like the simulated steps
	AllRequests float64 `json:"requests_of_the_range"`

	Bandwidth float64 `json:"node_bandwidth"`   // bytes/s that storage can give a node if all nodes read
	Busy      Busy    `json:"busy"`             // the slowest steps
	Needed    float64 `json:"needed_bandwidth"` // bytes/s that a node needs in the slowest steps; 0 without a step time
	Got       float64 `json:"got_bandwidth"`    // bytes/s that a node gets in the slowest steps
	// reading the slowest steps takes at most the step time; false without a step time
	KeepsUp bool `json:"keeps_up"`
	// mean wait for data per step, in seconds, with four steps read ahead
	Waited float64 `json:"waited"`
	// the largest number of nodes that storage keeps up with; -1: any number, 0: none
	NodesKept int64 `json:"nodes_kept"`
	// seconds to the first batch, if the facts of shards are in the user's cache folder
	FirstWarm float64 `json:"first_batch_warm"`
	FirstCold float64 `json:"first_batch_cold"` // seconds to the first batch with an empty cache folder
	// bytes of the blocks with training windows, of the sources that the plan draws from
	DrawnBytes int64 `json:"drawn_bytes"`
	// bytes of the blocks of the sources that the plan repeats: a cache of this size makes all
	// later epochs local
	RepeatSize int64 `json:"cache_for_next_epochs"`

	Scaling []ScalingPoint `json:"scaling"` // available bandwidth of a node, by number of nodes
	// hit rate of a node's cache in the simulated steps, by size
	Cache []CachePoint `json:"cache"`

	sampleBytes float64 // mean bytes of the tokens of a simulated sample
}

// Busy is the mean of the slowest tenth of the steps by read time. These include the steps before
// the cache is warm.
type Busy struct {
	Steps    int64   `json:"steps"`
	Bytes    float64 `json:"read_bytes"`
	Requests float64 `json:"read_requests"`
	ReadTime float64 `json:"read_time"` // seconds
}

// A ScalingPoint is the bandwidth of each of Nodes nodes, if each reads as much as the first.
type ScalingPoint struct {
	Nodes int64   `json:"nodes"`
	Got   float64 `json:"got_bandwidth"` // bytes/s
}

// A CachePoint is the hit rate of a least-recently-used cache of one size.
type CachePoint struct {
	Size int64   `json:"size"`  // bytes
	Hits float64 `json:"share"` // fraction of the requests that it answers
}

const (
	// bytes of a .bin file with a common sum, which are always read together
	// (docs/formats/shard.md)
	sumBlock      = 16 << 10
	stepsAhead    = 4 // records that a stream reads ahead
	openRequests  = 4 // per shard: both ends of .idx, the manifest, the header of the sums
	cachePoints   = 40
	samplesOfPlan = 16 // that are compared in sequence when a plan is opened
)

// A stretch is a range of consecutive tokens of a shard.
type stretch struct {
	source, shard int
	token, count  int64
}

// stretches appends the token ranges of a sample. For an order without windows, it uses the open
// shards: the first range starts where the sample starts, the others where their document starts.
// This is wrong for a later part of a document that is longer than a sample.
func (s *simulation) stretches(dst []stretch, at blend.Sample) ([]stretch, error) {
	whole := int64(s.plan.SequenceLength) + 1
	if s.traits.Windows {
		return append(dst, stretch{at.Source, at.Shard, at.Token, whole}), nil
	}
	parts, err := s.Data.Parts(s.ctx, at)
	if err != nil {
		return dst, err
	}
	for i, p := range parts {
		token := p.First
		if i == 0 {
			token = at.Token
		}
		dst = append(dst, stretch{p.Source, p.Shard, token, int64(p.To - p.From)})
	}
	return dst, nil
}

// A blockKey identifies a block of a file, which one request reads.
type blockKey struct {
	file  int32
	block int64
}

// A layout divides the .bin files into blocks.
type layout struct {
	request int64
	first   []int32 // by source: number of its first shard among all shards
	size    []int64 // bytes of each file
	width   []int64 // bytes of a token
}

func newLayout(p *blend.Plan, request int64) *layout {
	l := &layout{request: request}
	for _, s := range p.Sources {
		l.first = append(l.first, int32(len(l.size)))
		for _, sh := range s.Shards {
			width := int64(4)
			if sh.DType == shards.UInt16 {
				width = 2
			}
			l.size, l.width = append(l.size, sh.Tokens*width), append(l.width, width)
		}
	}
	return l
}

// blocks returns the first block that reading a stretch touches, and the block after the last. The
// stretch is extended to complete blocks with a sum.
func (l *layout) blocks(t stretch) (file int32, from, to int64) {
	file = l.first[t.source] + int32(t.shard)
	a, b := t.token*l.width[file], (t.token+t.count)*l.width[file]
	a, b = a/sumBlock*sumBlock, min((b+sumBlock-1)/sumBlock*sumBlock, l.size[file])
	return file, a / l.request, (b + l.request - 1) / l.request
}

// bytes returns the size of a block. The last block of a file may be shorter.
func (l *layout) bytes(k blockKey) int64 { return min(l.request, l.size[k.file]-k.block*l.request) }

// stepsOfRange returns the number of steps of the range.
func (s *simulation) stepsOfRange() int64 {
	return (s.To - s.From + int64(s.BatchSize) - 1) / int64(s.BatchSize)
}

// examined returns the number of steps in which a node that reads share samples of each is
// simulated.
func (s *simulation) examined(share int64) int64 {
	return min(s.stepsOfRange(), max(1, s.Samples/share))
}

// reading simulates the first node in the first steps.
func (s *simulation) reading() (Reading, error) {
	st := &s.Storage
	r := Reading{Storage: *st, Nodes: s.Nodes, RanksPerNode: s.RanksPerNode, StepTime: s.StepTime,
		Bandwidth: st.bandwidth(s.Nodes)}
	l := newLayout(s.plan, st.RequestSize)
	share := int64(s.BatchSize / s.Nodes)
	r.Steps = s.examined(share)
	stack := newStack()
	opened := make(map[int32]bool) // files of the first step
	var reads []float64            // seconds of each step
	var each []Busy
	var list []stretch
	k := readersOfARank * s.RanksPerNode
	var samples int64
	for step := range r.Steps {
		var n, bytes int64
		var alone struct{ n, bytes int64 } // requests without a cache
		start := s.From + step*int64(s.BatchSize)
		for p := start; p < min(start+share, s.To); p++ {
			at, err := s.locate(p)
			if err != nil {
				return r, err
			}
			if at.Skipped {
				continue
			}
			samples++
			if list, err = s.stretches(list[:0], at); err != nil {
				return r, err
			}
			for _, t := range list {
				file, from, to := l.blocks(t)
				if step == 0 {
					opened[file] = true
				}
				r.TokenBytes += float64(t.count * l.width[file])
				for b := from; b < to; b++ {
					key := blockKey{file, b}
					size := l.bytes(key)
					alone.n++
					alone.bytes += size
					if stack.use(key, size) > st.Cache { // also true for a block's first use
						n++
						bytes += size
					}
				}
			}
		}
		r.Wanted, r.WantedBytes = r.Wanted+float64(alone.n), r.WantedBytes+float64(alone.bytes)
		r.Requests, r.Bytes = r.Requests+float64(n), r.Bytes+float64(bytes)
		t := st.seconds(float64(n), float64(bytes), k, r.Bandwidth)
		reads = append(reads, t)
		each = append(each, Busy{Bytes: float64(bytes), Requests: float64(n), ReadTime: t})
		r.ReadTime += t
		if step&15 == 0 || step == r.Steps-1 {
			s.Progress("simulating reads", (step+1)*share, r.Steps*share)
		}
	}
	r.sampleBytes = r.TokenBytes / float64(max(1, samples))
	for _, sum := range []*float64{&r.TokenBytes, &r.WantedBytes, &r.Wanted, &r.Bytes, &r.Requests, &r.ReadTime} {
		*sum /= float64(r.Steps)
	}
	r.AllRequests = r.Requests * float64(s.Nodes) * float64(s.stepsOfRange())
	r.Busy = busiest(each)
	busy := &r.Busy
	if busy.ReadTime > 0 {
		r.Got = busy.Bytes / busy.ReadTime
	}
	if s.StepTime > 0 {
		r.Needed = busy.Bytes / s.StepTime
		r.KeepsUp = busy.ReadTime <= s.StepTime
		r.NodesKept = st.nodesKept(busy.Requests, busy.Bytes, k, s.StepTime)
		switch { // mean requests do not round up as the requests of each step do
		case r.KeepsUp && r.NodesKept >= 0:
			r.NodesKept = max(r.NodesKept, int64(s.Nodes))
		case !r.KeepsUp:
			r.NodesKept = max(0, min(r.NodesKept, int64(s.Nodes)-1))
		}
		r.Waited = waits(reads, s.StepTime, stepsAhead) / float64(r.Steps)
	}
	for nodes := int64(1); nodes <= max(4*int64(s.Nodes), min(2*r.NodesKept, 64*int64(s.Nodes)), 64) &&
		busy.Requests > 0; nodes *= 2 {
		r.Scaling = append(r.Scaling, ScalingPoint{nodes, busy.Bytes / st.seconds(busy.Requests, busy.Bytes, k,
			st.bandwidth(int(nodes)))})
	}
	if err := s.firstBatch(&r, l, opened, reads[0], samples); err != nil {
		return r, err
	}
	s.cacheSizes(&r, l)
	r.Cache = stack.curve()
	return r, nil
}

// busiest returns the mean of the slowest tenth of the steps, at least one.
func busiest(steps []Busy) Busy {
	slices.SortStableFunc(steps, func(a, b Busy) int { return cmp.Compare(b.ReadTime, a.ReadTime) })
	var sum Busy
	tenth := steps[:max(1, len(steps)/10)]
	for _, s := range tenth {
		sum.Bytes, sum.Requests, sum.ReadTime = sum.Bytes+s.Bytes, sum.Requests+s.Requests, sum.ReadTime+s.ReadTime
	}
	n := float64(len(tenth))
	return Busy{int64(len(tenth)), sum.Bytes / n, sum.Requests / n, sum.ReadTime / n}
}

// firstBatch computes the time from program start to the data of the first step: the shards are
// opened, several at a time, the plan's check samples are compared in sequence, and the first step
// is read.
func (s *simulation) firstBatch(r *Reading, l *layout, opened map[int32]bool, first float64, samples int64) error {
	st := &s.Storage
	k := float64(readersOfARank * s.RanksPerNode)
	checks, err := s.checks()
	if err != nil {
		return err
	}
	for _, at := range checks {
		opened[l.first[at.Source]+int32(at.Shard)] = true
	}
	opening := func(shards int) float64 { return math.Ceil(float64(openRequests*shards)/k) * st.Latency }
	if samples == 0 {
		samples = 1
	}
	perSample := float64(r.Steps) / float64(samples)
	n, bytes := r.Wanted*perSample, r.WantedBytes*perSample
	compare := float64(min(samplesOfPlan, len(s.plan.Checks))) * (n*st.Latency + bytes/r.Bandwidth)
	r.FirstWarm = opening(len(opened)) + compare + first
	r.FirstCold = opening(len(l.size)) + compare + first
	return nil
}

// cacheSizes adds up the blocks of complete sources.
func (s *simulation) cacheSizes(r *Reading, l *layout) {
	for i, sum := range s.plan.Summary().Sources {
		if sum.Samples == 0 {
			continue
		}
		src := &s.plan.Sources[i]
		left := src.Training() // validation windows are the last, unless the source has grown
		if len(src.Growth) > 0 {
			left = src.Windows()
		}
		var bytes int64
		for k, sh := range src.Shards {
			tokens := sh.Tokens
			if s.traits.Windows {
				w := min(left, index.ShardWindows(s.plan.SequenceLength, sh.Tokens))
				if left -= w; w == 0 {
					continue
				}
				tokens = w*int64(s.plan.SequenceLength) + 1
			}
			file, from, to := l.blocks(stretch{i, k, 0, tokens})
			if to > from {
				bytes += (to-from-1)*l.request + l.bytes(blockKey{file, to - 1})
			}
		}
		r.DrawnBytes += bytes
		if sum.Repeats > 0 {
			r.RepeatSize += bytes
		}
	}
}

// A stack computes, for each use of a block, how many bytes of different blocks were used since its
// last use, including its own bytes. This is the smallest size of a least-recently-used cache that
// would still hold it (R. L. Mattson and others, "Evaluation techniques for storage hierarchies",
// 1970).
type stack struct {
	last  map[blockKey]int // number of the last use
	tree  []int64          // Fenwick tree over the uses: bytes of the block, at its last use only
	found []int64          // results of use, without never
	total int64            // bytes of different blocks
}

// never is larger than any cache.
const never = math.MaxInt64

func newStack() *stack { return &stack{last: make(map[blockKey]int)} }

// use records the use of a block and returns the size of a cache that would hold it.
func (s *stack) use(key blockKey, size int64) int64 {
	i := len(s.tree)
	distance := int64(never)
	if j, ok := s.last[key]; ok {
		distance = s.total - s.sum(j) + size // blocks used after it, and its own size
		s.add(j, -size)
		s.total -= size
		s.found = append(s.found, distance)
	}
	s.grow()
	s.add(i, size)
	s.total += size
	s.last[key] = i
	return distance
}

// grow appends the tree's node of the newest use: the sum of the uses that the node covers.
func (s *stack) grow() {
	n := len(s.tree) + 1 // counted from 1
	var sum int64
	for j, low := n-1, n-n&-n; j > low; j -= j & -j {
		sum += s.tree[j-1]
	}
	s.tree = append(s.tree, sum)
}

// add adds bytes to a use.
func (s *stack) add(i int, bytes int64) {
	for j := i + 1; j <= len(s.tree); j += j & -j {
		s.tree[j-1] += bytes
	}
}

// sum returns the bytes of the uses up to i.
func (s *stack) sum(i int) (sum int64) {
	for j := i + 1; j > 0; j -= j & -j {
		sum += s.tree[j-1]
	}
	return sum
}

// curve returns the hit rates of caches of sizes from 0 to all bytes.
func (s *stack) curve() []CachePoint {
	if len(s.tree) == 0 {
		return nil
	}
	slices.Sort(s.found)
	var points []CachePoint
	for i := range cachePoints + 1 {
		size := int64(float64(s.total)*float64(i)/cachePoints + 0.5)
		n, _ := slices.BinarySearch(s.found, size+1)
		points = append(points, CachePoint{size, float64(n) / float64(len(s.tree))})
	}
	return points
}
