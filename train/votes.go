package train

import (
	"context"
	"errors"
	"slices"
	"time"

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
	b, own, n := &r.batch, r.ranks.Rank(), int64(len(r.batch.origins))
	if err != nil {
		n = -1
	}
	counts, lost := r.ranks.All(ctx, n)
	if lost != nil {
		return errors.Join(err, lost)
	}
	if slices.Min(counts) < 0 {
		return collective.Agree(ctx, r.ranks.World(), err)
	}
	if r.ranks.Size(comm.EP) > 1 { // a rank without rows still computes with its experts
		n = slices.Max(counts)
	}
	b.passes = (int(n) + r.config.MicroBatchSize - 1) / r.config.MicroBatchSize
	b.samples, b.before = 0, 0
	stage := r.ranks.Shape.Group(own, comm.Data) // other stages have the same rows
	for _, rank := range stage {
		if rank < own {
			b.before += counts[rank]
		}
		b.samples += int(counts[rank])
	}
	if b.targets = int64(b.samples) * int64(r.data.SequenceLength); !b.rows.Counted {
		return nil
	}
	n = 0
	for _, row := range b.origins {
		n += row.Targets
	}
	if counts, lost = r.ranks.All(ctx, n); lost != nil {
		return lost
	}
	b.targets = 0
	for _, rank := range stage {
		b.targets += counts[rank]
	}
	return nil
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
		if shared.Failures == nil && kind == record.FailureDiverged && r.votes.Diverged() {
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
