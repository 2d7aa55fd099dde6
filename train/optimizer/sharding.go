package optimizer

import (
	"context"
	"fmt"
	"slices"
	"unsafe"

	"mula/moe"
	"mula/train/estimate"
	"mula/xpu"
	"mula/xpu/comm"
)

// A Sharding divides the update of the parameters between ranks, and sends gradients and weights
// accordingly. It divides each bucket into one run of complete blocks for each rank that shares the
// update. The runs are as equal as blocks allow. A rank thus owns one range of each parameter,
// which may be empty. If an update needs complete tensors, runs consist of complete tensors.
//
//	unsharded   gradients: all-reduce over data (divided: replicas)
//	so          gradients: replicated all-reduce over ep and tp; then reduce-scatter over expert_dp
//	            (divided: reduce-scatter over replicas); weights: all-gather there
//	epso        gradients: reduce-scatter over data (divided: replicas); weights: all-gather there
//
// Slices of tensors are like replicated parameters, but without tp: epso divides them among the
// ranks with the same slices, and so first sums them over ep.
//
// Gradients and weights are sent from and to host memory: weights in their type, gradients as
// float32 or bfloat16. A rank rounds its gradients to bfloat16 once, and sums of bfloat16 are
// rounded as [comm.Comm] defines. All three schemes sum an element over ep and then over dp, so
// that the results have the same bits. A rank owns parameters that are in no bucket.
type Sharding struct {
	// If ReducesSums is true, [Optimizer.GradientNorm] and [Optimizer.UpdateRatios] add the sums of
	// blocks exactly, and round the result once. Ranks then exchange a few exact sums, instead of
	// the sums of all blocks, whose number grows with the model. All ranks set it before
	// [NewSharded].
	ReducesSums bool

	// Slices has for each tensor of the whole model the number of its slices, which ranks hold; see
	// [moe.Slice]. 0, or nil for all tensors, means a complete tensor. It is set before
	// [NewSharded].
	Slices []int

	scheme  estimate.Scheme
	mesh    *comm.Mesh
	device  xpu.Device
	host    []float32  // for values of a bucket, if the host does not share memory with the device
	halves  []uint16   // likewise, of bfloat16
	sent    xpu.DType  // of gradients
	half    xpu.Tensor // the float32 gradients of a bucket, to be sent as bfloat16
	buckets []bucketShard
	owned   []ownedRange // of each parameter of this rank

	// For exchanging the sums of all blocks of the whole model: see gatherSums.
	counted []int     // blocks of the optimizer whose sums this rank sends
	bounds  []int     // of the numbers that each rank sends
	place   []int     // number of each block in the model, in the order of the received sums
	given   []float64 // received sums

	// number of the tensor in which this rank's own gradient, before the sum over ranks, was not
	// finite; -1 for none
	bad int
}

type bucketShard struct {
	moe.Bucket
	within *comm.Comm // the ranks that sum gradients first; nil for none
	group  *comm.Comm // the ranks that share the update; nil if each rank does the full update
	bounds []int      // of each rank of the group

	begin, end int // the range that this rank updates
}

// An ownedRange is the range of a parameter that this rank updates. One of the ranks with the same
// range is the writer.
type ownedRange struct {
	begin, end int
	writer     bool
}

// NewSharding divides the update of a model. All ranks call it. whole means that the update of a
// tensor cannot be divided. sent is the type of gradients when they are sent. Only [estimate.SO]
// uses nested.
func NewSharding(mesh *comm.Mesh, nested comm.Nested, scheme estimate.Scheme, whole bool, sent xpu.DType,
	device xpu.Device, parameters []*moe.Parameter, buckets []moe.Bucket) *Sharding {
	s := &Sharding{scheme: scheme, mesh: mesh, device: device, sent: sent,
		owned: make([]ownedRange, len(parameters)), bad: -1}
	number := map[*moe.Parameter]int{}
	for i, p := range parameters {
		number[p] = i
		s.owned[i] = ownedRange{0, p.Weight.Elements(), true}
	}
	for _, b := range buckets {
		shard := bucketShard{Bucket: b}
		alike := s.holders(b) // the ranks that own the same range
		switch {
		case scheme == estimate.Unsharded:
		case scheme == estimate.SO && !b.Divided:
			shard.within, shard.group = nested.WithinTensor, nested.Across
			if b.Sliced {
				shard.within = nested.Within
			}
			alike = shard.within
		default:
			shard.group, alike = alike, nil
		}
		begin, end := 0, b.Weight.Elements()
		if shard.group != nil {
			shard.bounds = cutBucket(b, shard.group.Size(), whole)
			begin, end = shard.bounds[shard.group.Rank()], shard.bounds[shard.group.Rank()+1]
		}
		shard.begin, shard.end = begin, end
		at := 0
		for _, p := range b.Parameters {
			n := p.Weight.Elements()
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

// newSingleSharding returns the sharding of one rank, which owns all parameters.
func newSingleSharding(device xpu.Device, parameters []*moe.Parameter) *Sharding {
	mesh := comm.NewSingleMesh()
	return NewSharding(mesh, comm.Nested{}, estimate.Unsharded, false, xpu.Float32, device, parameters, nil)
}

// cutBucket returns the bounds of n runs of complete blocks, or complete tensors, of a bucket. A
// bound is the start of the block nearest to an even division, the lower of two equally near ones.
func cutBucket(b moe.Bucket, n int, whole bool) []int {
	bounds := make([]int, n+1)
	total, r := b.Weight.Elements(), 1
	last := 0 // start of a block
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
			for begin := blockSize; begin < p.Weight.Elements(); begin += blockSize {
				pass(at + begin)
			}
		}
		at += p.Weight.Elements()
		pass(at)
	}
	bounds[n] = total
	return bounds
}

// slicesOf returns the number of slices of a tensor of the whole model, 0 if it is complete.
func (s *Sharding) slicesOf(tensor int) int {
	if s.Slices == nil {
		return 0
	}
	return s.Slices[tensor]
}

// blocksOf returns the number of blocks of a tensor, or of a slice.
func blocksOf(elements int) int { return (elements + blockSize - 1) / blockSize }

// countBlocks prepares gatherSums. blocks are the optimizer's blocks, and first has the number of
// the first block of each tensor of the model. All ranks call it.
func (s *Sharding) countBlocks(ctx context.Context, blocks []block, parameters []*moe.Parameter, first []int) error {
	var own []int64
	for i, b := range blocks {
		if p := parameters[b.tensor]; s.owned[b.tensor].writer {
			s.counted = append(s.counted, i)
			own = append(own, int64(first[p.Index]+p.Slice.Rank*blocksOf(p.Weight.Elements())+b.begin/blockSize))
		}
	}
	world := s.mesh.World()
	counts, ones := make([]int64, world.Size()), make([]int, world.Size()+1)
	for r := range ones {
		ones[r] = r
	}
	counts[world.Rank()] = int64(len(own))
	if err := comm.AllGather(ctx, world, counts, ones); err != nil {
		return err
	}
	s.bounds = make([]int, world.Size()+1)
	for r, n := range counts {
		s.bounds[r+1] = s.bounds[r] + int(n)
	}
	all := make([]int64, s.bounds[world.Size()])
	copy(all[s.bounds[world.Rank()]:], own)
	if err := comm.AllGather(ctx, world, all, s.bounds); err != nil {
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

// gatherSums gathers a number for each block of the whole model into all, in the order of the
// tensors. own has the numbers of this rank's blocks.
func (s *Sharding) gatherSums(ctx context.Context, own, all []float64) error {
	given := s.given[s.bounds[s.mesh.World().Rank()]:]
	for i, b := range s.counted {
		given[i] = own[b]
	}
	if err := comm.AllGather(ctx, s.mesh.World(), s.given, s.bounds); err != nil {
		return err
	}
	for i, place := range s.place {
		all[place] = s.given[i]
	}
	return nil
}

// Reduce sums the gradients of a bucket over ranks. transfers starts after the commands that
// compute the gradients. On the device, the sums are complete in the range that this rank owns,
// after the Join of transfers; the rest of the bucket is undefined.
func (s *Sharding) Reduce(ctx context.Context, bucket int, transfers xpu.Transfers) error {
	b := &s.buckets[bucket]
	if s.sent == xpu.BFloat16 && s.holders(b.Bucket).Size() > 1 {
		return s.reduceHalves(ctx, b, transfers)
	}
	grad, err := xpu.Numbers(ctx, transfers, b.Grad, &s.host)
	if err != nil {
		return err
	}
	if err := sum(ctx, s, b, grad, moe.Finite); err != nil {
		return err
	}
	xpu.SetNumbers(transfers, b.Grad.Rows(b.begin, b.end), grad[b.begin:b.end])
	return nil
}

// reduceHalves is Reduce with gradients sent as bfloat16.
func (s *Sharding) reduceHalves(ctx context.Context, b *bucketShard, transfers xpu.Transfers) error {
	half := b.Grad
	if half.DType() == xpu.Float32 {
		half = s.half.Rows(0, b.Grad.Elements())
		transfers.Copy(half, b.Grad)
	}
	bits := xpu.HostHalves(half, &s.halves)
	if err := transfers.ReadHalves(ctx, bits, half); err != nil {
		return err
	}
	grad := unsafe.Slice((*comm.BF16)(unsafe.SliceData(bits)), len(bits))
	if err := sum(ctx, s, b, grad, finiteHalves); err != nil {
		return err
	}
	half = half.Rows(b.begin, b.end)
	transfers.WriteHalves(half, bits[b.begin:b.end])
	if b.Grad.DType() == xpu.Float32 {
		transfers.Copy(b.Grad.Rows(b.begin, b.end), half)
	}
	return nil
}

// holders returns the ranks that hold the weights of a bucket.
func (s *Sharding) holders(b moe.Bucket) *comm.Comm { return s.mesh.Group(b.Holders()) }

// finiteHalves is [Finite] for bfloat16.
func finiteHalves(x []comm.BF16) bool {
	return !slices.ContainsFunc(x, func(v comm.BF16) bool { return v&0x7f80 == 0x7f80 })
}

// allocate allocates the memory for float32 gradients to be sent as bfloat16, if there is any need.
func (s *Sharding) allocate() (err error) {
	n := 0
	for _, b := range s.buckets {
		if s.holders(b.Bucket).Size() > 1 && b.Grad.DType() == xpu.Float32 {
			n = max(n, b.Grad.Elements())
		}
	}
	if s.sent == xpu.BFloat16 && n > 0 {
		s.half, err = s.device.New(xpu.BFloat16, n)
	}
	return err
}

// sum sums the gradients of a bucket on the host.
func sum[N comm.Number](ctx context.Context, s *Sharding, b *bucketShard, grad []N, finite func([]N) bool) error {
	if s.bad < 0 && !finite(grad) {
		at := 0
		for _, p := range b.Parameters {
			n := p.Grad.Elements()
			if !finite(grad[at : at+n]) {
				s.bad = p.Index
				break
			}
			at += n
		}
	}
	switch {
	case b.group == nil:
		return comm.AllReduce(ctx, s.holders(b.Bucket), grad)
	case b.within != nil:
		if err := comm.AllReduce(ctx, b.within, grad); err != nil {
			return err
		}
	}
	return comm.ReduceScatter(ctx, b.group, grad, b.bounds)
}

// TakeBad returns the number of a tensor in which this rank's own gradient was not finite since the
// last call, or -1.
func (s *Sharding) TakeBad() int {
	bad := s.bad
	s.bad = -1
	return bad
}

// gatherWeights sends updated weights from their owners to all ranks.
func (s *Sharding) gatherWeights(ctx context.Context) error {
	for i := range s.buckets {
		b := &s.buckets[i]
		if b.group == nil || b.group.Size() == 1 {
			continue
		}
		if b.Weight.DType() == xpu.BFloat16 {
			weights := xpu.HostHalves(b.Weight, &s.halves)
			err := s.device.ReadHalves(ctx, weights[b.begin:b.end], b.Weight.Rows(b.begin, b.end))
			if err == nil {
				err = comm.AllGather(ctx, b.group, weights, b.bounds)
			}
			if err != nil {
				return err
			}
			s.device.WriteHalves(b.Weight, weights)
			continue
		}
		weights := xpu.HostBuffer(b.Weight, &s.host)
		if err := s.device.Read(ctx, weights[b.begin:b.end], b.Weight.Rows(b.begin, b.end)); err != nil {
			return err
		}
		if err := comm.AllGather(ctx, b.group, weights, b.bounds); err != nil {
			return err
		}
		xpu.SetNumbers(s.device, b.Weight, weights)
	}
	return nil
}
