package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/internal/atomicfile"
	"mula/moe"
	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/record"
	"mula/train/rundir"
	"mula/train/spikes"
)

// positions returns the positions of a step.
func (r *run) positions(step int64) blend.Range {
	b := int64(r.config.BatchSize)
	return blend.Range{From: step * b, To: (step + 1) * b}
}

// skip skips the current step, which then counts as a step without samples, as if the plan skipped
// it.
func (r *run) skip(spike *spikes.Spike) error {
	s, most := r.state.Spikes, r.config.Spikes.MaxSkips
	if s.SkippedInARow >= most {
		return r.endOfSpikes(spike, fmt.Sprintf("spikes.max_skips (%d) consecutive steps were skipped", most))
	}
	s.SkippedInARow++
	s.Exclude(r.positions(r.state.Step))
	r.batch.hasher = fingerprint.Hasher{}
	r.warn("step %d skipped: %s", r.state.Step, spike)
	if !r.leads() {
		return nil
	}
	return r.writeSkips()
}

// rollBack skips the data of the last spikes.skip_steps steps, including the current step, and
// returns to the newest checkpoint before that data. The steps from the checkpoint to the data are
// repeated with the same results. The skipped steps become steps without samples. The run is thus
// equal to a run on a plan with these skips, for any checkpoint. A run that is killed during the
// rollback has the same spike again and does the same rollback.
func (r *run) rollBack(ctx context.Context, spike *spikes.Spike) error {
	r.history.heartbeat.Beat(record.SectionCheckpoint, r.state.Step)
	if _, err := r.advanceSave(ctx, true); err != nil {
		return err
	}
	s, c := r.state.Spikes, r.config.Spikes
	if len(s.Rollbacks) >= c.MaxRollbacks {
		return r.endOfSpikes(spike, fmt.Sprintf("spikes.max_rollbacks (%d) rollbacks were made",
			c.MaxRollbacks))
	}
	if err := r.renameSnapshots(ctx); err != nil {
		return err
	}
	first := max(r.state.Step+1-c.LeaveOut, s.PlanFrom)
	back := spikes.Rollback{Step: r.state.Step, Spike: *spike, LeftOut: blend.Range{From: r.positions(first).From,
		To: r.positions(r.state.Step).To}}
	saved, newer, err := r.returnTo(ctx, first, func(saved *checkpoint.Checkpoint) error {
		state := r.newState()
		r.history.saved = -1
		if saved != nil {
			state, r.history.saved = saved.State, saved.State.Step
		}
		state.Spikes.Skips, state.Spikes.Rollbacks = s.Skips, append(slices.Clone(s.Rollbacks), back)
		state.Spikes.Exclude(back.LeftOut)
		r.state = state
		r.batch.hasher = fingerprint.Hasher{}
		return r.restore(ctx, saved)
	})
	if err != nil {
		return fmt.Errorf("step %d: %s; rollback failed: %w", back.Step, spike, err)
	}
	where := "step 0"
	if saved != nil {
		where = saved.Name()
	}
	r.warn("step %d: %s; the run returns to %s and skips positions %d to %d, of steps %d to %d: rollback %d of at "+
		"most %d", back.Step, spike, where, back.LeftOut.From, back.LeftOut.To-1, first, back.Step,
		len(r.state.Spikes.Rollbacks), c.MaxRollbacks)
	if r.leads() {
		for _, path := range newer {
			if err == nil {
				err = checkpoint.Discard(r.dir.FS, path)
			}
		}
	}
	if err := collective.Agree(ctx, r.ranks.World(), err); err != nil {
		return err
	}
	return r.restored(ctx, saved, true, nil)
}

// findInitial checks that the run can restart with its initial weights: initialize_from, or the
// weights there, may have changed.
func (r *run) findInitial(ctx context.Context) error {
	began := r.state.Spikes.Began
	if began == spikes.BeganBySeed {
		r.start.initial = checkpoint.ModelDir{}
		return nil
	}
	if r.config.InitializeFrom == "" {
		return errors.New("the run started with the weights of initialize_from, but train.yaml no longer names the " +
			"model; set initialize_from again")
	}
	var err error
	if r.start.initial.Dir == "" {
		if r.start.initial, err = checkpoint.FindInitial(ctx, r.config.InitializeFrom, r.config.Model.Config,
			r.data.Plan, r.warn); err != nil {
			return err
		}
	}
	same, now, err := r.start.initial.HasWeights(ctx, began)
	if err != nil {
		return fmt.Errorf("initialize_from: %w", err)
	}
	if !same {
		return fmt.Errorf("initialize_from: %s has weights with SHA-256 %.16s…, but the run started with %.16s…; "+
			"restore those weights", r.start.initial.Dir, now, began)
	}
	return nil
}

// returnTo restores the newest complete checkpoint of at most step steps on the current plan. It
// returns the checkpoint and the paths of newer ones, newest first, which the caller removes,
// because their records will be removed. Without a checkpoint it restores nil, which means step 0.
// It returns an error if the run started with another plan.
func (r *run) returnTo(ctx context.Context, step int64, restore func(*checkpoint.Checkpoint) error) (
	found *checkpoint.Checkpoint, newer []string, err error) {
	dir, world, from := r.dir.Join(checkpoint.DirName), r.ranks.World(), r.state.Spikes.PlanFrom
	for {
		if found, newer, err = checkpoint.NewestUntil(ctx, world, r.options.files, dir, step, r.warn); err != nil {
			return nil, nil, err
		}
		at := int64(0)
		if found != nil {
			at = found.State.Step
		}
		if at < from {
			return nil, nil, collective.OfAll(world,
				fmt.Errorf("there is no complete checkpoint at or after step %d, from which the "+
					"run follows its current plan", from))
		}
		if r.leads() && found == nil {
			err = r.findInitial(ctx)
		}
		if err := collective.Agree(ctx, world, err); err != nil {
			return nil, nil, err
		}
		if err := collective.Broadcast(ctx, world, &r.start.initial.Dir); err != nil {
			return nil, nil, err
		}
		err = restore(found)
		if !checkpoint.IsDamage(err) {
			return found, newer, err
		}
		r.warn("checkpoint %s is damaged; using an older one: %v", found.Name(), err)
		step = at - 1
	}
}

// backTo returns the earliest step to which the next rollback may return. The newest checkpoint up
// to that step must be kept. backTo is negative if none is needed.
func (r *run) backTo() int64 {
	if r.config.Spikes.Action != spikes.RollBack {
		return -1
	}
	return max(r.state.Step+1-r.config.Spikes.LeaveOut, r.state.Spikes.PlanFrom)
}

// endOfSpikes returns the error that ends a run after too many spikes.
func (r *run) endOfSpikes(spike *spikes.Spike, why string) error {
	saved := "there is no checkpoint"
	if r.history.saved >= 0 {
		saved = "the newest checkpoint is " + checkpoint.Name(r.history.saved)
	}
	err := fmt.Errorf("step %d: %s, and %s; the weights are unchanged since the step before, and %s. If losses have "+
		"risen and stay high, the learning rate is too high, or the data has changed permanently (mula peek "+
		"--position %d shows it). Otherwise, raise the limit and start the run again. Skipped positions are "+
		"listed in %s", r.state.Step, spike, why, saved, r.positions(r.state.Step).From, r.dir.Join(rundir.SkipsFile))
	if spike.NotFinite {
		err = fmt.Errorf("%w: %w", moe.ErrNotFinite, err)
	}
	return collective.OfAll(r.ranks.World(), err)
}

// writeSkips writes the positions skipped because of spikes in the format of blend.yaml. Without
// any, it removes an old file.
func (r *run) writeSkips() error {
	path := r.dir.Join(rundir.SkipsFile)
	if r.state.Spikes == nil || len(r.state.Spikes.Skips) == 0 {
		return atomicfile.On(r.dir.FS).Remove(path)
	}
	var text strings.Builder
	text.WriteString("# Positions that this run skipped because of spikes, written by mula train. A plan that is " +
		"built with these skips has the batches that the run was trained on.\nskips:\n")
	for _, s := range r.state.Spikes.Skips {
		fmt.Fprintf(&text, "- {from: %d, to: %d}\n", s.From, s.To)
	}
	return atomicfile.On(r.dir.FS).WriteFile(path, []byte(text.String()))
}
