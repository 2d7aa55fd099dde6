package train

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sort"

	"mula/train/collective"
	"mula/train/record"
	"mula/xpu"
	"mula/xpu/comm"
)

// A replicaCheck finds weights that differ between replicas. All replicas round in the same way, so
// a difference is a fault of a machine or of mula.
//
// With so and epso, the owner of a weight overwrites all copies at the end of each step. This
// removes a wrong copy, but its gradients have changed every weight. Each rank therefore adds the
// weights of a step to a digest before the update. The ranks compare their digests at intervals and
// before each checkpoint. They find a copy that was wrong in a single step at the next comparison.
type replicaCheck struct {
	weights [replicaKinds][]xpu.Tensor // of the buckets of a kind; nil without replicas
	sums    [replicaKinds][]uint64     // of the blocks of weights

	first   int64 // step of the first digest
	digests []replicaDigests
}

// The kinds of weights with replicas.
const (
	replicatedWeights = iota // by all ranks of a stage
	expertWeights            // by the ranks that hold the same experts
	replicaKinds
)

// replicaDigests has for each kind the digest of the weights of all steps since the last
// comparison.
type replicaDigests [replicaKinds][16]byte

// newReplicaCheck returns the check of a rank, or nil without replicas.
func (r *run) newReplicaCheck() *replicaCheck {
	if r.ranks.Size(comm.Data) == 1 || r.config.Layout.CheckReplicasEvery == 0 {
		return nil
	}
	c := new(replicaCheck)
	for _, b := range r.model.Buckets() {
		kind, alike := replicatedWeights, r.ranks.Group(comm.Data)
		if b.Divided {
			kind, alike = expertWeights, r.ranks.Group(comm.Replicas)
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

// begin resets the digests. The receiver may be nil.
func (c *replicaCheck) begin() {
	if c != nil {
		c.digests = c.digests[:0]
	}
}

// add adds the digests of this rank's weights on the device.
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

// checkReplicas adds the digests of this rank's weights, which the step has used or a checkpoint
// will contain. If compare is true, it compares the digests since the last comparison with the
// digests of the replicas. All ranks call it with the same compare.
func (r *run) checkReplicas(ctx context.Context, compare bool) error {
	if r.replicas == nil {
		return nil
	}
	err := r.replicas.add(ctx, r.device, r.state.Step)
	if err == nil && compare {
		err = r.compareReplicas(ctx)
	}
	if err != nil && !collective.Shared(err) {
		err = fmt.Errorf("step %d: comparing replicas: %w", r.state.Step, err)
	}
	return err
}

// compareReplicas compares the digests and resets them. If ranks differ, it reports the first step
// with a difference, because a wrong weight spreads.
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
	return r.blame(found.rank, record.FailureReplica, fmt.Errorf("step %d: its %s differ from the other replicas: "+
		"%s; a machine has computed, stored or sent a weight wrongly; restart the run from its newest checkpoint "+
		"without that host", c.first+int64(last), what, agree))
}

// A replicaDifference is a rank whose weights differ from its replicas.
type replicaDifference struct {
	rank, kind int
	agree      int // size of the majority that agrees on other weights, 0 without a majority
	ranks      int // number of replicas, including this rank
}

// replicaDifference returns a rank whose digests differ from its replicas, or nil. All ranks get
// the same result.
func (r *run) replicaDifference(ctx context.Context, own replicaDigests) (*replicaDifference, error) {
	const size = replicaKinds * len(own[0])
	all, bounds := make([]byte, r.ranks.Ranks()*size), make([]int, r.ranks.Ranks()+1)
	for rank := range bounds {
		bounds[rank] = rank * size
	}
	digest := func(rank, kind int) []byte { return all[bounds[rank]+kind*len(own[kind]):][:len(own[kind])] }
	for kind := range own {
		copy(digest(r.ranks.Rank(), kind), own[kind][:])
	}
	if err := comm.AllGather(ctx, r.ranks.World(), all, bounds); err != nil {
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
	shape := r.ranks.Shape
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
	}
	return nil, nil
}
