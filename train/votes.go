package train

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"mula/blend/fingerprint"
	"mula/moe"
	"mula/train/collective"
	"mula/train/record"
	"mula/xpu/comm"
)

// Messages between the ranks in a step, so that all ranks have the same state and act in the same
// way: the number of rows, their results, and errors.

// countRows exchanges the numbers of rows and of unmasked targets of the current step. err is this
// rank's error in reading its rows.
func (r *run) countRows(ctx context.Context, err error) error {
	own := len(r.batch.origins)
	r.batch.samples, r.batch.before, r.batch.targets = own, 0, 0
	for _, row := range r.batch.origins {
		r.batch.targets += row.targets
	}
	r.batch.passes = (own + r.config.MicroBatchSize - 1) / r.config.MicroBatchSize
	n := int64(own)
	if err != nil {
		n = -1
	}
	counts, lost := r.ranks.All(ctx, n)
	if lost != nil {
		return errors.Join(err, lost)
	}
	r.batch.samples = 0
	stage := r.ranks.OwnIndex(comm.PP)
	for rank, n := range counts {
		if n < 0 {
			return collective.Agree(ctx, r.ranks.World(), err)
		}
		if r.ranks.Size(comm.EP) > 1 { // a rank without rows still computes with its experts
			r.batch.passes = max(r.batch.passes, (int(n)+r.config.MicroBatchSize-1)/r.config.MicroBatchSize)
		}
		if r.ranks.Index(rank, comm.PP) != stage {
			continue // the same rows again
		}
		if rank < r.ranks.Rank() {
			r.batch.before += n
		}
		r.batch.samples += int(n)
	}
	if !r.batch.rows.Counted {
		r.batch.targets = int64(r.batch.samples) * int64(r.data.SequenceLength)
		return nil
	}
	if counts, lost = r.ranks.All(ctx, r.batch.targets); lost != nil {
		return lost
	}
	r.batch.targets = 0
	for rank, n := range counts {
		if r.ranks.Index(rank, comm.PP) == stage {
			r.batch.targets += n
		}
	}
	return nil
}

// The vote of a rank about a step, in 64-bit words: voteHead, the entropy of each layer's router,
// and voteRow for each of its positions.
const (
	voteFailed = iota // 1 if the rank could not compute the step
	voteTensor        // 1 + number of the first tensor in which its gradient is not finite, 0 if there is none
	voteAux           // its part of the router's losses
	voteZ
	voteNonFinite // 1 if a pipeline stage has computed non-finite values from finite input
	voteHead

	// 1 + number of the source, 0 if the position is skipped; the upper half has the number of
	// unmasked targets
	voteSource = iota - voteHead - 1
	voteLoss
	voteHash // of the sample, two words
	_
	voteRow
)

// exchange combines the losses, the counts and r.batch.results of the step over all ranks. failed
// is the error of a rank that could not compute its part.
func (r *run) exchange(ctx context.Context, m *record.StepMetrics, failed error) error {
	c := r.config.Model
	layers := 0
	if c.Experts > 0 {
		layers = c.Layers
	}
	size, own := r.ranks.Ranks(), r.ranks.Rank()
	slots := r.config.BatchSize / r.ranks.Size(comm.Data)
	words := voteHead + layers + slots*voteRow
	if r.batch.votes == nil {
		r.batch.votes, r.batch.voteBounds = make([]uint64, size*words), make([]int, size+1)
		for rank := range r.batch.voteBounds {
			r.batch.voteBounds[rank] = rank * words
		}
		r.batch.counts = make([]int64, layers*c.Experts)
	}
	vote := r.batch.votes[own*words : (own+1)*words]
	clear(vote)
	if failed != nil {
		vote[voteFailed] = 1
	}
	vote[voteTensor] = uint64(r.sharding.TakeBad() + 1)
	if r.pipeline.TakeNonFinite() {
		vote[voteNonFinite] = 1
	}
	from := r.pipeline.FirstLayer()
	vote[voteAux], vote[voteZ] = math.Float64bits(m.AuxLoss), math.Float64bits(m.ZLoss)
	for layer, entropy := range m.RouterEntropy {
		vote[voteHead+from+layer] = math.Float64bits(entropy)
	}
	first := m.First + int64(r.ranks.OwnIndex(comm.Data)*slots)
	for i, row := range r.batch.results {
		slot := vote[voteHead+layers+int(row.position-first)*voteRow:][:voteRow]
		hash := fingerprint.SampleHash(r.batch.rows.Row(i))
		slot[voteSource], slot[voteLoss] = uint64(row.targets)<<32|uint64(row.source+1), math.Float64bits(row.loss)
		slot[voteHash], slot[voteHash+1] = binary.LittleEndian.Uint64(hash[:8]), binary.LittleEndian.Uint64(hash[8:])
	}
	if err := comm.AllGather(ctx, r.ranks.World(), r.batch.votes, r.batch.voteBounds); err != nil {
		return &collective.BrokenError{Err: errors.Join(failed, fmt.Errorf("step %d: %w", m.Step, err))}
	}
	clear(r.batch.counts)
	for layer, counts := range m.ExpertTokens {
		copy(r.batch.counts[(from+layer)*c.Experts:], counts)
	}
	if err := comm.AllReduce(ctx, r.ranks.World(), r.batch.counts); err != nil {
		return &collective.BrokenError{Err: errors.Join(failed, fmt.Errorf("step %d: %w", m.Step, err))}
	}

	m.AuxLoss, m.ZLoss, m.RouterEntropy, m.ExpertTokens = 0, 0, nil, nil
	if layers > 0 {
		m.RouterEntropy = make([]float64, layers)
	}
	r.batch.results = r.batch.results[:0]
	for rank := range size { // the last stages have the losses, in the order of their rows
		vote := r.batch.votes[rank*words : (rank+1)*words]
		if vote[voteFailed] != 0 {
			return collective.Agree(ctx, r.ranks.World(), failed)
		}
		m.AuxLoss += math.Float64frombits(vote[voteAux])
		m.ZLoss += math.Float64frombits(vote[voteZ])
		for layer := range m.RouterEntropy {
			m.RouterEntropy[layer] += math.Float64frombits(vote[voteHead+layer])
		}
		for i := range slots {
			slot := vote[voteHead+layers+i*voteRow:][:voteRow]
			if slot[voteSource] == 0 {
				continue
			}
			at := row{m.First + int64(r.ranks.Index(rank, comm.Data)*slots+i), int(uint32(slot[voteSource]) - 1),
				int64(slot[voteSource] >> 32)}
			r.batch.results = append(r.batch.results, result{at, math.Float64frombits(slot[voteLoss])})
			var hash [16]byte
			binary.LittleEndian.PutUint64(hash[:8], slot[voteHash])
			binary.LittleEndian.PutUint64(hash[8:], slot[voteHash+1])
			r.batch.hasher.AddHash(hash)
		}
	}
	for layer := range layers {
		m.ExpertTokens = append(m.ExpertTokens,
			append([]int64{}, r.batch.counts[layer*c.Experts:(layer+1)*c.Experts]...))
	}
	return nil
}

// readerOf returns the number of the reader of a position, among the ranks that read rows.
func (r *run) readerOf(position int64) int {
	return int(position % int64(r.config.BatchSize) / int64(r.config.BatchSize/r.ranks.Size(comm.Data)))
}

// rankOf returns the rank that has the loss of a position.
func (r *run) rankOf(position int64) int {
	last := r.ranks.At(0, comm.PP, r.ranks.Size(comm.PP)-1)
	return r.ranks.At(last, comm.Data, r.readerOf(position))
}

// firstBadStage returns the rank that first computed the non-finite values of rank in the current
// step: the first such stage of its pipeline, or rank. Non-finite values spread from stage to
// stage.
func (r *run) firstBadStage(rank int) int {
	for _, other := range r.ranks.Shape.Group(rank, comm.PP) {
		if r.batch.votes[r.batch.voteBounds[other]+voteNonFinite] != 0 {
			return other
		}
	}
	return rank
}

// badRank returns the rank that caused the first non-finite gradient of the current step, and the
// tensor. It returns -1 if all gradients are finite.
func (r *run) badRank() (int, string) {
	for rank := range r.ranks.Ranks() {
		if tensor := r.batch.votes[r.batch.voteBounds[rank]+voteTensor]; tensor > 0 {
			first := r.firstBadStage(rank)
			if own := r.batch.votes[r.batch.voteBounds[first]+voteTensor]; own > 0 {
				tensor = own
			}
			return first, r.tensors[tensor-1].Name
		}
	}
	return -1, ""
}

// badLosses returns the first rank with non-finite losses of the router, or -1.
func (r *run) badLosses() int {
	for rank := range r.ranks.Ranks() {
		vote := r.batch.votes[r.batch.voteBounds[rank]:]
		if !finite(math.Float64frombits(vote[voteAux])) || !finite(math.Float64frombits(vote[voteZ])) {
			return r.firstBadStage(rank)
		}
	}
	return -1
}

// diverged reports whether no single host is the source of non-finite values in this step: the rows
// of all readers have such values, ranks on several hosts have computed them from finite values, or
// only the sum over ranks is not finite. In a run of one pipeline, the first bad stage is the
// source.
func (r *run) diverged() bool {
	if r.batch.votes == nil {
		return true
	}
	hosts, readers := map[string]bool{}, map[int]bool{}
	for rank := range r.ranks.Ranks() {
		if !r.votedFinite(rank) {
			readers[r.ranks.Index(rank, comm.Data)] = true
			hosts[r.ranks.Hosts[r.firstBadStage(rank)]] = true
		}
	}
	return len(hosts) != 1 || len(readers) == r.ranks.Size(comm.Data) && len(readers) > 1
}

// votedFinite reports whether all values in the vote of a rank are finite: its losses, and its own
// gradient.
func (r *run) votedFinite(rank int) bool {
	vote := r.batch.votes[r.batch.voteBounds[rank]:r.batch.voteBounds[rank+1]]
	if vote[voteTensor] != 0 || vote[voteNonFinite] != 0 || !finite(math.Float64frombits(vote[voteAux])) ||
		!finite(math.Float64frombits(vote[voteZ])) {
		return false
	}
	slots := r.config.BatchSize / r.ranks.Size(comm.Data)
	for slot := range slices.Chunk(vote[len(vote)-slots*voteRow:], voteRow) {
		if slot[voteSource] != 0 && !finite(math.Float64frombits(slot[voteLoss])) {
			return false
		}
	}
	return true
}

// blame returns an error that all ranks have, about one rank, or about no rank if rank is negative.
// It records the error in a run of several ranks.
func (r *run) blame(rank int, kind string, err error) error {
	if r.ranks.Ranks() == 1 {
		return err
	}
	if rank < 0 {
		return collective.OfAll(r.ranks.World(), err)
	}
	r.recordFailure(rank, kind, err.Error())
	shared := collective.OfRank(r.ranks.Hosts, rank, err)
	shared.Recorded = true
	return shared
}

// recordFailures records the error that ended a run, unless the error is already recorded or the
// run was stopped.
func (r *run) recordFailures(err error) {
	var shared *collective.GroupError
	kind := record.FailureError
	if errors.Is(err, moe.ErrNotFinite) {
		kind = record.FailureDiverged
	}
	switch {
	case errors.Is(err, context.Canceled):
	case errors.As(err, &shared):
		if shared.Failures == nil && kind == record.FailureDiverged && r.diverged() {
			r.recordFailure(-1, kind, err.Error())
		}
		if !shared.Recorded {
			for rank, f := range shared.Failures {
				if f.Error != "" {
					r.recordFailure(rank, record.FailureError, f.Error)
				}
			}
		}
	case !errors.Is(err, comm.ErrPeerLost): // the other ranks do not have this error
		r.appendFailure(r.ranks.Rank(), kind, err.Error())
	}
}

// recordFailure records a failure that all ranks have; the first rank writes it. rank is -1 for a
// failure of the whole run.
func (r *run) recordFailure(rank int, kind, text string) {
	if r.leads() {
		r.appendFailure(rank, kind, text)
	}
}

func (r *run) appendFailure(rank int, kind, text string) {
	host := ""
	if rank >= 0 {
		host = r.ranks.Hosts[rank]
	}
	err := record.AppendFailure(r.dir.Join(record.FailuresFile), record.Failure{Time: record.Timestamp(time.Now()),
		Host: host, Rank: rank, Step: r.state.Step, Kind: kind, Error: text})
	if err != nil {
		r.warn("a failure of rank %d on %s could not be recorded: %v", rank, host, err)
	}
}
