package train

import (
	"context"
	"fmt"
	"strings"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/cpu"
)

// A sharding says which part of the parameters this rank updates, and moves gradients and weights
// accordingly. It works bucket by bucket: a bucket is cut into as many runs of whole blocks as
// ranks share its update, as equal as that allows. So a rank owns one range of each parameter,
// which may be empty. Where an update needs whole tensors, the runs are of whole tensors.
//
//	unsharded   gradients: all-reduce over data (divided: replicas)
//	so          gradients: replicated all-reduce over the ranks that share experts; then reduce-scatter over replicas; weights: all-gather there
//	epso        gradients: reduce-scatter over data (divided: replicas); weights: all-gather there
//
// Gradients and weights travel as float32, from and to the host's side of the device's memory. The
// sum of an element over ranks is formed over ep and then over dp in all three, so that they give
// the same bits. A nil sharding is that of one rank, which owns everything.
type sharding struct {
	scheme  Scheme
	ranks   *ranks
	device  xpu.Memory
	buckets []bucketShard
	owned   []ownedRange // of each parameter of this rank

	// The sums of the blocks of all parameters of the whole model, which ranks give each other: see
	// gatherSums.
	counted []int     // blocks of the optimizer whose sums this rank gives
	bounds  []int     // of what each rank gives
	place   []int     // canonical number of each block, in the order in which they are given
	given   []float64 // in that order

	// number of the tensor in which this rank's own gradient, before it was added to those of
	// others, was not finite; -1 for none
	bad int
}

type bucketShard struct {
	moe.Bucket
	group  *xpu.Comm // whose ranks share the update; nil if each does all of it
	bounds []int     // of each rank of the group

	own        int         // where what this rank updates begins
	grad       [][]float32 // all of Grad
	ownWeights [][]float32 // what this rank updates of Weight
}

// ownGrad is what this rank updates of Grad.
func (b *bucketShard) ownGrad() []float32 { return b.Grad[b.own:][:len(b.ownWeights[0])] }

// An ownedRange is the part of a parameter that this rank updates. Of the ranks that own the same
// one, one is its writer.
type ownedRange struct {
	begin, end int
	writer     bool
}

// newSharding divides the update of a model, whose ranks all call it. whole says that the update of
// a tensor cannot be divided.
func newSharding(r *ranks, scheme Scheme, whole bool, device xpu.Memory, parameters []*moe.Parameter,
	buckets []moe.Bucket) *sharding {
	s := &sharding{scheme: scheme, ranks: r, device: device, owned: make([]ownedRange, len(parameters)), bad: -1}
	number := map[*moe.Parameter]int{}
	for i, p := range parameters {
		number[p] = i
	}
	for _, b := range buckets {
		shard := bucketShard{Bucket: b}
		alike := r.replicas // the ranks that own the same
		switch {
		case scheme == Unsharded && !b.Divided:
			alike = r.data
		case scheme == Unsharded:
		case scheme == SO && !b.Divided:
			shard.group, alike = r.replicas, r.within
		case scheme == EPSO && !b.Divided:
			shard.group, alike = r.data, nil
		default:
			shard.group, alike = r.replicas, nil
		}
		begin, end := 0, len(b.Weight)
		if shard.group != nil {
			shard.bounds = cutBucket(b, shard.group.Size(), whole)
			begin, end = shard.bounds[shard.group.Rank()], shard.bounds[shard.group.Rank()+1]
		}
		shard.own, shard.grad, shard.ownWeights = begin, [][]float32{b.Grad}, [][]float32{b.Weight[begin:end]}
		at := 0
		for _, p := range b.Parameters {
			n := len(p.Weight)
			o := ownedRange{begin: min(max(begin-at, 0), n), end: min(max(end-at, 0), n)}
			if o.begin == o.end {
				o.begin, o.end = 0, 0
			}
			o.writer = o.end > 0 && (alike == nil || p.Index%alike.Size() == alike.Rank())
			s.owned[number[p]] = o
			at += n
		}
		s.buckets = append(s.buckets, shard)
	}
	return s
}

// cutBucket returns the bounds of n runs of whole blocks, or whole tensors, of a bucket. The bound
// between two runs is where a block begins, that which is nearest to an even cut; of two the lower.
func cutBucket(b moe.Bucket, n int, whole bool) []int {
	bounds := make([]int, n+1)
	total, r := len(b.Weight), 1
	last := 0 // place at which a block begins
	pass := func(next int) {
		for r < n {
			even := total / n * r
			even += total % n * r / n
			if next < even {
				break
			}
			bounds[r] = last
			if next-even < even-last {
				bounds[r] = next
			}
			r++
		}
		last = next
	}
	at := 0
	for _, p := range b.Parameters {
		if !whole {
			for begin := blockSize; begin < len(p.Weight); begin += blockSize {
				pass(at + begin)
			}
		}
		at += len(p.Weight)
		pass(at)
	}
	bounds[n] = total
	return bounds
}

// countBlocks makes ready for gatherSums, of the blocks that the optimizer has and the whole
// model's number of them, by tensor. All ranks call it.
func (s *sharding) countBlocks(ctx context.Context, blocks []block, parameters []*moe.Parameter, first []int) error {
	var own []int64
	for i, b := range blocks {
		if s.owned[b.tensor].writer {
			s.counted = append(s.counted, i)
			own = append(own, int64(first[parameters[b.tensor].Index]+b.begin/blockSize))
		}
	}
	world := s.ranks.world
	counts, ones := make([]int64, world.Size()), make([]int, world.Size()+1)
	for r := range ones {
		ones[r] = r
	}
	counts[world.Rank()] = int64(len(own))
	if err := xpu.AllGather(ctx, world, counts, ones); err != nil {
		return err
	}
	s.bounds = make([]int, world.Size()+1)
	for r, n := range counts {
		s.bounds[r+1] = s.bounds[r] + int(n)
	}
	all := make([]int64, s.bounds[world.Size()])
	copy(all[s.bounds[world.Rank()]:], own)
	if err := xpu.AllGather(ctx, world, all, s.bounds); err != nil {
		return err
	}
	seen := make([]bool, first[len(first)-1])
	for _, place := range all {
		if place < 0 || place >= int64(len(seen)) || seen[place] {
			return fmt.Errorf("block %d of %d is assigned twice: the ranks have divided the model differently; use "+
				"the same train.yaml and version of mula on all ranks", place, len(seen))
		}
		seen[place] = true
		s.place = append(s.place, int(place))
	}
	if len(s.place) != len(seen) {
		return fmt.Errorf("%d of the model's %d blocks are assigned: the ranks have divided the model differently; "+
			"use the same train.yaml and version of mula on all ranks", len(s.place), len(seen))
	}
	s.given = make([]float64, len(s.place))
	return nil
}

// gatherSums fills all, which has a number for each block of the whole model in the order of its
// tensors, from the numbers of the blocks that ranks own; own has those of this one.
func (s *sharding) gatherSums(ctx context.Context, own, all []float64) error {
	given := s.given[s.bounds[s.ranks.world.Rank()]:]
	for i, b := range s.counted {
		given[i] = own[b]
	}
	if err := xpu.AllGather(ctx, s.ranks.world, s.given, s.bounds); err != nil {
		return err
	}
	for i, place := range s.place {
		all[place] = s.given[i]
	}
	return nil
}

// reduce adds up the gradients of a bucket over ranks. The sums are complete where this rank owns
// the bucket, on the device; what else it holds is not defined.
func (s *sharding) reduce(ctx context.Context, bucket int) error {
	b := &s.buckets[bucket]
	if err := s.device.ToHost(ctx, b.grad...); err != nil {
		return err
	}
	if err := s.sum(ctx, b); err != nil {
		return err
	}
	s.device.ToDevice(b.ownGrad())
	return nil
}

// sum is reduce on the host.
func (s *sharding) sum(ctx context.Context, b *bucketShard) error {
	if s.bad < 0 && !finite(sumOfSquares(b.Grad)) {
		for _, p := range b.Parameters {
			if !finite(sumOfSquares(p.Grad)) {
				s.bad = p.Index
				break
			}
		}
	}
	switch {
	case b.group == nil && b.Divided:
		return xpu.AllReduce(ctx, s.ranks.replicas, b.Grad)
	case b.group == nil:
		return xpu.AllReduce(ctx, s.ranks.data, b.Grad)
	case s.scheme == SO && !b.Divided:
		if err := xpu.AllReduce(ctx, s.ranks.within, b.Grad); err != nil {
			return err
		}
	}
	return xpu.ReduceScatter(ctx, b.group, b.Grad, b.bounds)
}

// sumOfSquares is finite exactly if all of x is.
func sumOfSquares(x []float32) float64 {
	var sum float64
	for begin := 0; begin < len(x); begin += blockSize {
		sum += cpu.SumSquares(x[begin:min(begin+blockSize, len(x))])
	}
	return sum
}

// takeBad is the number of the tensor in which this rank's own gradient was not finite in the sums
// since the last call; -1 for none.
func (s *sharding) takeBad() int {
	bad := s.bad
	s.bad = -1
	return bad
}

// gatherWeights gives all ranks the weights that their owners have updated.
func (s *sharding) gatherWeights(ctx context.Context) error {
	for i := range s.buckets {
		b := &s.buckets[i]
		if b.group == nil {
			continue
		}
		if err := s.device.ToHost(ctx, b.ownWeights...); err != nil {
			return err
		}
		if err := xpu.AllGather(ctx, b.group, b.Weight, b.bounds); err != nil {
			return err
		}
		s.device.ToDevice(b.Weight)
	}
	return nil
}

// divided reports whether a tensor of the whole model belongs to an expert.
func divided(name string) bool { return strings.Contains(name, ".mlp.experts.") }
