// Package replicas finds weights that differ between ranks that hold the same weights.
package replicas

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sort"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/comm"
)

// A Check finds weights that differ between replicas. All replicas round in the same way, so
// a difference is a fault of a machine or of mula.
//
// With so and epso, the owner of a weight overwrites all copies at the end of each step. This
// removes a wrong copy, but its gradients have changed every weight. Each rank therefore adds the
// weights of a step to a digest before the update. The ranks compare their digests at intervals and
// before each checkpoint. They find a copy that was wrong in a single step at the next comparison.
type Check struct {
	mesh    *comm.Mesh
	weights [kinds][]xpu.Tensor // of the buckets of a kind; nil without replicas
	sums    [kinds][]uint64     // of the blocks of weights

	first   int64 // step of the first digest
	digests []stepDigests
}

// The kinds of weights with replicas.
const (
	replicatedWeights = iota // by all ranks of a stage
	expertWeights            // by the ranks that hold the same experts
	sliceWeights             // by the ranks that hold the same slices of matrices
	kinds
)

// stepDigests has for each kind the digest of the weights of all steps since the last
// comparison.
type stepDigests [kinds][16]byte

// New returns the check of a rank that holds the weights of the given buckets, or nil without
// replicas.
func New(mesh *comm.Mesh, buckets []moe.Bucket) *Check {
	if mesh.Size(comm.Data) == 1 {
		return nil
	}
	c := &Check{mesh: mesh}
	for _, b := range buckets {
		kind := replicatedWeights
		switch {
		case b.Divided:
			kind = expertWeights
		case b.Sliced:
			kind = sliceWeights
		}
		if mesh.Group(b.Holders()).Size() > 1 {
			c.weights[kind] = append(c.weights[kind], b.Weight)
		}
	}
	for kind, weights := range c.weights {
		c.sums[kind] = make([]uint64, xpu.Blocks(weights))
	}
	return c
}

// Begin resets the digests. The receiver may be nil.
func (c *Check) Begin() {
	if c != nil {
		c.digests = c.digests[:0]
	}
}

// Add adds the digests of this rank's weights on the device, which a step has used or a checkpoint
// will contain.
func (c *Check) Add(ctx context.Context, device xpu.Device, step int64) error {
	for kind, weights := range c.weights {
		device.Checksums(weights, c.sums[kind])
	}
	if err := device.Wait(ctx); err != nil {
		return err
	}
	var digests stepDigests
	if n := len(c.digests); n > 0 {
		digests = c.digests[n-1]
	} else {
		c.first = step
	}
	for kind, sums := range c.sums {
		hash := sha256.New()
		hash.Write(digests[kind][:])
		var word [8]byte
		for _, sum := range sums {
			binary.LittleEndian.PutUint64(word[:], sum)
			hash.Write(word[:])
		}
		var all [sha256.Size]byte
		copy(digests[kind][:], hash.Sum(all[:0]))
	}
	c.digests = append(c.digests, digests)
	return nil
}

// Compare compares the digests since the last comparison with the digests of the replicas, and
// resets them. If ranks differ, it returns the first step with a difference, because a wrong weight
// spreads. All ranks call it and get the same result.
func (c *Check) Compare(ctx context.Context) (found *Difference, err error) {
	differs := func(i int) (found *Difference) {
		if err == nil {
			found, err = c.difference(ctx, c.digests[i])
		}
		return found
	}
	last := len(c.digests) - 1
	same, err := c.same(ctx, c.digests[last])
	if same || err != nil {
		c.Begin()
		return nil, err
	}
	if found = differs(last); found != nil && err == nil {
		last = sort.Search(last, func(i int) bool { return differs(i) != nil })
		found = differs(last)
	}
	c.Begin()
	if err != nil || found == nil {
		return nil, err
	}
	found.step = c.first + int64(last)
	return found, nil
}

// A Difference is a rank whose weights differ from its replicas.
type Difference struct {
	Rank int

	kind  int
	step  int64 // the first step with the difference
	agree int   // size of the majority that agrees on other weights, 0 without a majority
	ranks int   // number of replicas, including this rank
}

func (d *Difference) Error() string {
	agree := "no majority agrees, so another rank may be wrong"
	if d.agree > 0 {
		agree = fmt.Sprintf("%d of %d ranks agree on different weights", d.agree, d.ranks)
	}
	what := [kinds]string{replicatedWeights: "replicated weights", expertWeights: "experts",
		sliceWeights: "slices of matrices"}[d.kind]
	return fmt.Sprintf("step %d: its %s differ from the other replicas: %s; a machine has computed, stored or sent "+
		"a weight wrongly; restart the run from its newest checkpoint without that host", d.step, what, agree)
}

// same reports whether the digests of all replicas are the same. A rank receives the digests of the
// first rank of each of its groups. All ranks get the same result.
func (c *Check) same(ctx context.Context, own stepDigests) (bool, error) {
	differ := []int64{0} // ranks with another digest
	for kind, group := range [kinds]comm.Axes{replicatedWeights: comm.Data, expertWeights: comm.Replicas,
		sliceWeights: comm.Slices} {
		if len(c.weights[kind]) == 0 { // so it is on all ranks of the group
			continue
		}
		first := own[kind]
		if err := c.broadcast(ctx, group, first[:]); err != nil {
			return false, err
		}
		if first != own[kind] {
			differ[0] = 1
		}
	}
	err := comm.AllReduce(ctx, c.mesh.World(), differ)
	return differ[0] == 0, err
}

// broadcast copies x of the first rank of a group to its other ranks. It uses messages of the
// world, so that the groups of gradients and weights carry nothing else.
func (c *Check) broadcast(ctx context.Context, group comm.Axes, x []byte) (err error) {
	own, n := c.mesh.OwnIndex(group), c.mesh.Size(group)
	rank := func(index int) int { return c.mesh.At(c.mesh.Rank(), group, index) }
	for have := 1; have < n && err == nil; have *= 2 { // the first ranks that have x
		switch {
		case own < have && own+have < n:
			err = comm.Send(ctx, c.mesh.World(), rank(own+have), x)
		case own >= have && own < 2*have:
			err = comm.Recv(ctx, c.mesh.World(), rank(own-have), x)
		}
	}
	return err
}

// difference returns a rank whose digests differ from its replicas, or nil. All ranks get the same
// result.
func (c *Check) difference(ctx context.Context, own stepDigests) (*Difference, error) {
	const size = kinds * len(own[0])
	all, bounds := make([]byte, c.mesh.Ranks()*size), make([]int, c.mesh.Ranks()+1)
	for rank := range bounds {
		bounds[rank] = rank * size
	}
	digest := func(rank, kind int) []byte { return all[bounds[rank]+kind*len(own[kind]):][:len(own[kind])] }
	for kind := range own {
		copy(digest(c.mesh.Rank(), kind), own[kind][:])
	}
	if err := comm.AllGather(ctx, c.mesh.World(), all, bounds); err != nil {
		return nil, err
	}
	differs := func(kind int, alike []int) *Difference {
		votes, most := map[string]int{}, 0
		for _, rank := range alike {
			key := string(digest(rank, kind))
			votes[key]++
			most = max(most, votes[key])
		}
		if most == len(alike) {
			return nil
		}
		if 2*most <= len(alike) {
			most = 0
		}
		for _, rank := range alike {
			if votes[string(digest(rank, kind))] != most {
				return &Difference{Rank: rank, kind: kind, agree: most, ranks: len(alike)}
			}
		}
		return nil
	}
	shape := c.mesh.Shape
	for stage := range shape.Size(comm.PP) {
		first := shape.At(0, comm.PP, stage)
		if found := differs(replicatedWeights, shape.Group(first, comm.Data)); found != nil {
			return found, nil
		}
		for expert := range shape.Size(comm.EP) {
			alike := shape.Group(shape.At(first, comm.EP, expert), comm.Replicas)
			if found := differs(expertWeights, alike); found != nil {
				return found, nil
			}
		}
		for slice := range shape.Size(comm.TP) {
			alike := shape.Group(shape.At(first, comm.TP, slice), comm.Slices)
			if found := differs(sliceWeights, alike); found != nil {
				return found, nil
			}
		}
	}
	return nil, nil
}
