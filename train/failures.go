package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"mula/moe"
	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/record"
	"mula/train/spikes"
	"mula/train/votes"
	"mula/xpu"
	"mula/xpu/comm"
)

// A notFiniteError reports a loss or gradient that is not finite. The field what is as in
// [spikes.Spike].
type notFiniteError struct {
	what string
	error
}

func (e *notFiniteError) Unwrap() error { return e.error }

// notFinite completes the error about a value that is not finite. The error ends the run unless the
// run handles spikes. The weights are unchanged. rows may be the cause. rank computed the value, -1
// if unknown.
func (r *run) notFinite(what string, err error, rows []votes.Row, rank int) error {
	var sources []string
	for _, row := range rows {
		if name := r.data.Sources[row.Source].Name; !slices.Contains(sources, name) {
			sources = append(sources, name)
		}
	}
	from, to := rows[0].Position, rows[len(rows)-1].Position+1
	saved := "there is no checkpoint yet"
	if r.history.saved >= 0 {
		saved = "the newest checkpoint is " + checkpoint.Name(r.history.saved)
	}
	leave := fmt.Sprintf("amend the plan with mula blend --amend %s --skip %d:%d --output NEW.json and train with "+
		"the new plan", r.config.Plan, from, to)
	if !r.data.Traits().Amendable {
		leave = fmt.Sprintf("add {from: %d, to: %d} to skips in blend.yaml, build the plan again and set "+
			"plan_change: accept", from, to)
	}
	err = fmt.Errorf("step %d: %w, at positions %d to %d, of %s; the weights are unchanged since the step before, "+
		"and %s. If the losses before this step rose, the learning rate is too high. Otherwise, look at the text "+
		"with mula peek --position. To skip it, %s", r.state.Step, err, from, to-1,
		strings.Join(sources, ", "), saved, leave)
	if r.votes.Diverged() {
		rank = -1
	}
	return &notFiniteError{what, r.blame(rank, record.FailureNotFinite, err)}
}

// badLoss returns the error about a loss of a row or of a router that is not finite.
func (r *run) badLoss(ctx context.Context, m *record.StepMetrics) error {
	if err := r.votes.Gather(ctx); err != nil {
		return fmt.Errorf("step %d: %w", m.Step, err)
	}
	for i, row := range r.votes.Rows {
		if !finite(row.Loss) {
			return r.notFinite(spikes.Loss, fmt.Errorf("the loss is %w", moe.ErrNotFinite), r.votes.Rows[i:i+1],
				r.votes.BadLoss(row.Position))
		}
	}
	if finite(m.AuxLoss) && finite(m.ZLoss) { // only the sum of the rows' losses is not finite
		return nil
	}
	return r.notFinite(spikes.AuxLoss, fmt.Errorf("the auxiliary loss is %w", moe.ErrNotFinite), r.votes.Rows,
		r.votes.BadRouterLoss())
}

// badGradient returns the error about a gradient that is not finite.
func (r *run) badGradient(ctx context.Context) error {
	if err := r.votes.Gather(ctx); err != nil {
		return fmt.Errorf("step %d: %w", r.state.Step, err)
	}
	rank, tensor, rows := -1, "", r.votes.Rows
	if r.ranks.Ranks() > 1 {
		var number int
		if rank, number = r.votes.BadGradient(); rank >= 0 {
			tensor, rows = r.tensors[number].Name, r.votes.RowsOf(rank)
		}
	} else { // the gradients are still the result of the backward pass
		var buffer []float32
		for _, p := range r.model.Parameters() {
			grad, err := xpu.Numbers(ctx, r.device, p.Grad, &buffer)
			if err != nil {
				return fmt.Errorf("step %d: %w", r.state.Step, err)
			}
			if !moe.Finite(grad) {
				tensor = p.Name
				break
			}
		}
	}
	if tensor != "" {
		tensor = " in " + tensor
	}
	return r.notFinite(spikes.GradNorm, fmt.Errorf("the gradient is %w%s", moe.ErrNotFinite, tensor), rows, rank)
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
	err := record.AppendFailure(r.dir.FS, r.dir.Join(record.FailuresFile), record.Failure{
		Time: record.Timestamp(time.Now()), Host: host, Rank: rank, Step: r.state.Step, Kind: kind, Error: text})
	if err != nil {
		r.warn("a failure of rank %d on %s could not be recorded: %v", rank, host, err)
	}
}
