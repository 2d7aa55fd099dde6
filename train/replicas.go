package train

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sort"

	"mula/xpu"
)

// A replicaCheck finds weights that differ between ranks which hold the same ones. Weights are
// never rounded in different ways, so a difference is a fault of a machine or of this program.
//
// With so and epso the owner of a weight overwrites all copies at the end of each step. A wrong
// copy is then gone, but the gradients that were computed with it are in every weight. So each rank
// adds the weights that a step has used to a digest before they are updated, and the ranks compare
// their digests every so many steps and before each checkpoint. A copy that was wrong in a single
// step is found at the next comparison.
type replicaCheck struct {
	weights [replicaKinds][][]float32 // of the buckets of a kind; nil if no other rank holds them
	sums    [replicaKinds][]uint64    // of their blocks

	first   int64 // step that the first of the digests is of
	digests []replicaDigests
}

// The kinds of weights that ranks hold alike.
const (
	replicatedWeights = iota // by all ranks of a stage
	expertWeights            // by the ranks that hold the same experts
	replicaKinds
)

// replicaDigests have, for each kind, the digest of the weights of all steps since the last
// comparison, up to one of them.
type replicaDigests [replicaKinds][16]byte

// newReplicaCheck is the check of a rank, nil if it compares nothing.
func (r *run) newReplicaCheck() *replicaCheck {
	if r.ranks == nil || r.config.Layout.CheckReplicasEvery == 0 {
		return nil
	}
	c := new(replicaCheck)
	for _, b := range r.model.Buckets() {
		kind, alike := replicatedWeights, r.ranks.data
		if b.Divided {
			kind, alike = expertWeights, r.ranks.replicas
		}
		if alike.Size() > 1 {
			c.weights[kind] = append(c.weights[kind], b.Weight)
		}
	}
	for kind, weights := range c.weights {
		c.sums[kind] = make([]uint64, xpu.Blocks(weights))
	}
	return c
}

// begin forgets what was seen. The receiver may be nil.
func (c *replicaCheck) begin() {
	if c != nil {
		c.digests = c.digests[:0]
	}
}

// add notes the weights of this rank, as the device has them.
func (c *replicaCheck) add(ctx context.Context, device xpu.Device, step int64) error {
	for kind, weights := range c.weights {
		device.Checksums(weights, c.sums[kind])
	}
	if err := device.Wait(ctx); err != nil {
		return err
	}
	var digests replicaDigests
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

// checkReplicas notes the weights of this rank, which the step has used or a checkpoint is to hold.
// With compare, which is the same on all ranks, it compares them, and those of all steps since the
// last comparison, with those of the ranks that hold the same ones. All ranks call it.
func (r *run) checkReplicas(ctx context.Context, compare bool) error {
	if r.replicas == nil {
		return nil
	}
	err := r.replicas.add(ctx, r.device, r.state.Step)
	if err == nil && compare {
		err = r.compareReplicas(ctx)
	}
	if err != nil && !Shared(err) {
		err = fmt.Errorf("step %d: comparing replicas: %w", r.state.Step, err)
	}
	return err
}

// compareReplicas compares the weights that were noted, and forgets them. Where ranks differ it
// looks for the first step in which they did, because a wrong weight spreads.
func (r *run) compareReplicas(ctx context.Context) error {
	c := r.replicas
	var failed error
	differs := func(i int) (found *replicaDifference) {
		if failed == nil {
			found, failed = r.replicaDifference(ctx, c.digests[i])
		}
		return found
	}
	last := len(c.digests) - 1
	found := differs(last)
	if found != nil && failed == nil {
		last = sort.Search(last, func(i int) bool { return differs(i) != nil })
		found = differs(last)
	}
	c.begin()
	if failed != nil || found == nil {
		return failed
	}
	agree := "no majority agrees, so another rank may be wrong"
	if found.agree > 0 {
		agree = fmt.Sprintf("%d of %d ranks agree on different weights", found.agree, found.ranks)
	}
	what := [replicaKinds]string{replicatedWeights: "replicated weights", expertWeights: "experts"}[found.kind]
	return r.blame(found.rank, failureReplica, fmt.Errorf("step %d: its %s differ from those on the ranks with the "+
		"same weights: %s; a machine has computed, stored or sent a weight wrongly; restart the run from its newest checkpoint without that host", c.first+int64(last), what, agree))
}

// A replicaDifference is about a rank whose weights differ from those of the ranks that hold the
// same.
type replicaDifference struct {
	rank, kind int
	agree      int // of how many ranks more than half agree on others, 0 if there is no such majority
	ranks      int // that hold the same, this one included
}

// replicaDifference finds a rank whose digests are not those of the ranks that hold the same
// weights, nil if there is none. All ranks get the same.
func (r *run) replicaDifference(ctx context.Context, own replicaDigests) (*replicaDifference, error) {
	const size = replicaKinds * len(own[0])
	all, bounds := make([]byte, r.ranks.size()*size), make([]int, r.ranks.size()+1)
	for rank := range bounds {
		bounds[rank] = rank * size
	}
	digest := func(rank, kind int) []byte { return all[bounds[rank]+kind*len(own[kind]):][:len(own[kind])] }
	for kind := range own {
		copy(digest(r.ranks.rank(), kind), own[kind][:])
	}
	if err := xpu.AllGather(ctx, r.ranks.world, all, bounds); err != nil {
		return nil, err
	}
	differs := func(kind int, alike []int) *replicaDifference {
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
				return &replicaDifference{rank, kind, most, len(alike)}
			}
		}
		return nil
	}
	for pp := range r.ranks.PP {
		var data []int
		replicas := make([][]int, r.ranks.EP)
		for dp := range r.ranks.DP {
			for ep := range r.ranks.EP {
				rank := r.ranks.rankAt(dp, pp, ep)
				data, replicas[ep] = append(data, rank), append(replicas[ep], rank)
			}
		}
		if found := differs(replicatedWeights, data); found != nil {
			return found, nil
		}
		for _, alike := range replicas {
			if found := differs(expertWeights, alike); found != nil {
				return found, nil
			}
		}
	}
	return nil, nil
}
