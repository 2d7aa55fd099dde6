package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"mula/blend"
	"mula/internal/atomicfile"
	"mula/train/collective"
)

// A Spike is a loss or gradient norm far above the previous updates' values, or NaN or Inf.
//
// The loss of a step (cross entropy only), or the norm of its gradient before clipping, is a spike
// if it is greater than mean + spikes.sigma · deviation of the last spikes.window updates. The
// deviation is the root of the sum of squared differences from the mean, divided by window − 1.
// Until that many updates exist, only NaN and Inf are spikes. A spike is never part of the mean.
type Spike struct {
	What      string  `json:"what"`                 // "loss", "aux_loss" or "grad_norm"
	NotFinite bool    `json:"not_finite,omitempty"` // the numbers are then omitted, because JSON has no NaN or Inf
	Value     float64 `json:"value,omitempty"`
	Mean      float64 `json:"mean,omitempty"`
	Deviation float64 `json:"deviation,omitempty"`
	Limit     float64 `json:"limit,omitempty"` // mean + sigma · deviation
}

// The values of [Spike.What].
const (
	lossSpike     = "loss"
	auxLossSpike  = "aux_loss"
	gradNormSpike = "grad_norm"
)

var spikeWords = map[string]string{lossSpike: "loss", auxLossSpike: "auxiliary loss", gradNormSpike: "gradient norm"}

// String describes the spike, as in "loss 9.12 is above 2.61 (mean 2.31, deviation 0.05)".
func (s Spike) String() string {
	if s.NotFinite {
		return spikeWords[s.What] + " is NaN or Inf"
	}
	return fmt.Sprintf("%s %.5g is above %.5g (mean %.5g, deviation %.3g)", spikeWords[s.What], s.Value, s.Limit,
		s.Mean, s.Deviation)
}

// A Rollback is one return of a run to a step before a spike.
type Rollback struct {
	Step    int64       `json:"step"`     // the step with the spike
	Spike   Spike       `json:"spike"`    // value at that step
	LeftOut blend.Range `json:"left_out"` // skipped positions: complete steps, the last with the spike
}

// SpikeState is the state of spike handling between steps. Checkpoints contain it.
type SpikeState struct {
	Losses        []float64 `json:"losses"` // values of the last updates, at most spikes.window, oldest first
	GradNorms     []float64 `json:"grad_norms"`
	SkippedInARow int       `json:"skipped_in_a_row"` // consecutive skipped steps before the next step
	// positions skipped because of spikes, in order and disjoint
	Skips     []blend.Range `json:"skips"`
	Rollbacks []Rollback    `json:"rollbacks"` // in order of time
	// step from which the run follows its current plan; rollbacks do not go back further
	PlanFrom int64 `json:"plan_from,omitempty"`
	// initial weights: beganBySeed, or the WeightsHash of initialize_from
	Began string `json:"began"`
}

const beganBySeed = "seed"

// newSpikeState returns the state at the start of a run, or nil if spikes.action is "none".
func newSpikeState(c SpikesConfig) *SpikeState {
	if c.Action == SpikeNone {
		return nil
	}
	return &SpikeState{Losses: []float64{}, GradNorms: []float64{}, Skips: []blend.Range{}, Rollbacks: []Rollback{}}
}

// check returns the spike of a step, or nil. The receiver may be nil.
func (s *SpikeState) check(c SpikesConfig, loss, gradNorm float64) *Spike {
	if s == nil || len(s.Losses) < c.Window {
		return nil
	}
	if spike := beyond(s.Losses, c.Sigma, lossSpike, loss); spike != nil {
		return spike
	}
	return beyond(s.GradNorms, c.Sigma, gradNormSpike, gradNorm)
}

// beyond compares a value with the values before it.
func beyond(before []float64, sigma float64, what string, value float64) *Spike {
	var mean, squares float64
	for _, v := range before {
		mean += v
	}
	mean /= float64(len(before))
	for _, v := range before {
		squares += (v - mean) * (v - mean)
	}
	deviation := math.Sqrt(squares / float64(len(before)-1))
	if limit := mean + sigma*deviation; value > limit {
		return &Spike{What: what, Value: value, Mean: mean, Deviation: deviation, Limit: limit}
	}
	return nil
}

// updated records an update that was made. The receiver may be nil.
func (s *SpikeState) updated(window int, loss, gradNorm float64) {
	if s == nil {
		return
	}
	s.Losses, s.GradNorms = appendLast(s.Losses, window, loss), appendLast(s.GradNorms, window, gradNorm)
	s.SkippedInARow = 0
}

// appendLast appends a value and keeps the last most values.
func appendLast(values []float64, most int, v float64) []float64 {
	if drop := len(values) + 1 - most; drop > 0 {
		values = values[:copy(values, values[drop:])]
	}
	return append(values, v)
}

// leaveOut adds skipped positions.
func (s *SpikeState) leaveOut(r blend.Range) {
	skips := append(slices.Clone(s.Skips), r)
	slices.SortFunc(skips, func(a, b blend.Range) int { return cmp.Compare(a.From, b.From) })
	s.Skips = skips[:1]
	for _, r := range skips[1:] {
		if last := &s.Skips[len(s.Skips)-1]; r.From <= last.To {
			last.To = max(last.To, r.To)
		} else {
			s.Skips = append(s.Skips, r)
		}
	}
}

// leavesOut reports whether a position is skipped. The receiver may be nil.
func (s *SpikeState) leavesOut(position int64) bool {
	if s == nil {
		return false
	}
	i := sort.Search(len(s.Skips), func(i int) bool { return s.Skips[i].To > position })
	return i < len(s.Skips) && s.Skips[i].From <= position
}

// positions returns the positions of a step.
func (r *run) positions(step int64) blend.Range {
	b := int64(r.config.BatchSize)
	return blend.Range{From: step * b, To: (step + 1) * b}
}

// leftOut returns the number of skipped positions. The receiver may be nil.
func (s *SpikeState) leftOut() int64 {
	if s == nil {
		return 0
	}
	var n int64
	for _, r := range s.Skips {
		n += r.To - r.From
	}
	return n
}

// skip skips the current step, which then counts as a step without samples, as if the plan skipped
// it.
func (r *run) skip(spike *Spike) error {
	s, most := r.state.Spikes, r.config.Spikes.MaxSkips
	if s.SkippedInARow >= most {
		return r.endOfSpikes(spike, fmt.Sprintf("spikes.max_skips (%d) consecutive steps were skipped", most))
	}
	s.SkippedInARow++
	s.leaveOut(r.positions(r.state.Step))
	r.hasher = blend.StepHasher{}
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
func (r *run) rollBack(ctx context.Context, spike *Spike) error {
	r.heartbeat.beat(SectionCheckpoint, r.state.Step)
	s, c := r.state.Spikes, r.config.Spikes
	if len(s.Rollbacks) >= c.MaxRollbacks {
		return r.endOfSpikes(spike, fmt.Sprintf("spikes.max_rollbacks (%d) rollbacks were made",
			c.MaxRollbacks))
	}
	first := max(r.state.Step+1-c.LeaveOut, s.PlanFrom)
	back := Rollback{Step: r.state.Step, Spike: *spike, LeftOut: blend.Range{From: r.positions(first).From,
		To: r.positions(r.state.Step).To}}
	checkpoint, err := r.goBackTo(ctx, first)
	if err != nil {
		return fmt.Errorf("step %d: %s; rollback failed: %w", back.Step, spike, err)
	}
	state, where := r.newState(), "step 0"
	r.lastSaved = -1
	if checkpoint != nil {
		state, where = checkpoint.State, checkpoint.Name()
		r.lastSaved = checkpoint.State.Step
	}
	state.Spikes.Skips, state.Spikes.Rollbacks = s.Skips, append(slices.Clone(s.Rollbacks), back)
	state.Spikes.leaveOut(back.LeftOut)
	r.state = state
	r.hasher = blend.StepHasher{}
	r.warn("step %d: %s; the run returns to %s and skips positions %d to %d, of steps %d to %d: rollback %d of at "+
		"most %d", back.Step, spike, where,
		back.LeftOut.From, back.LeftOut.To-1, first, back.Step, len(state.Spikes.Rollbacks), c.MaxRollbacks)
	if err := r.restore(ctx, checkpoint); err != nil {
		return err
	}
	if r.leads() {
		r.closeRecords()
		err = r.openRecords(checkpoint, true)
	}
	r.takePlan()
	return collective.Agree(ctx, r.ranks.World(), err)
}

// findInitial checks that the run can restart with its initial weights: initialize_from, or the
// weights there, may have changed.
func (r *run) findInitial(ctx context.Context) error {
	began := r.state.Spikes.Began
	if began == beganBySeed {
		r.initial = ModelDir{}
		return nil
	}
	if r.config.InitializeFrom == "" {
		return errors.New("the run started with the weights of initialize_from, but train.yaml no longer names the " +
			"model; set initialize_from again")
	}
	var err error
	if r.initial.Dir == "" {
		if r.initial, err = r.config.initialModel(ctx, r.data.Plan, r.warn); err != nil {
			return err
		}
	}
	now, err := r.initial.Inspect(ctx, nil)
	if err != nil {
		return fmt.Errorf("initialize_from: %w", err)
	}
	same := now.Weights == began
	if !same { // a run that started with checkpoints of format 1
		before, err := r.initial.weightsOfFormat1(ctx)
		if err != nil {
			return fmt.Errorf("initialize_from: %w", err)
		}
		same = before == began
	}
	if !same {
		return fmt.Errorf("initialize_from: %s has weights with SHA-256 %.16s…, but the run started with %.16s…; "+
			"restore those weights", r.initial.Dir, now.Weights, began)
	}
	return nil
}

// goBackTo finds the newest complete checkpoint of at most step steps on the current plan. It
// removes newer checkpoints, newest first, because their records will be removed. Without a
// checkpoint it returns nil, which means step 0. It returns an error if the run started with
// another plan.
func (r *run) goBackTo(ctx context.Context, step int64) (*Checkpoint, error) {
	dir, world := r.dir.join(checkpointsDir), r.ranks.World()
	names, err := listCheckpoints(dir)
	if err := collective.Agree(ctx, world, err); err != nil {
		return nil, err
	}
	lists, err := collective.Gather(ctx, world, names)
	if err != nil {
		return nil, err
	}
	names = lists[0] // other ranks may see an older state of the directory
	var found *Checkpoint
	var newer []string
	for _, name := range names {
		path := filepath.Join(dir, name)
		if at, _ := checkpointStep(name); at <= step {
			state, err := verifyCheckpoint(ctx, world, path)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err == nil && state.Spikes == nil {
				err = errors.New("its state.json has no spikes")
			}
			if err == nil {
				found = &Checkpoint{path, state}
				break
			}
			if !damaged(err) {
				return nil, fmt.Errorf("checkpoint %s cannot be read, and may be complete: %w", name, err)
			}
			r.warn("checkpoint %s is damaged; using an older one: %v", name, err)
		}
		newer = append(newer, path)
	}
	at := int64(0)
	if found != nil {
		at = found.State.Step
	}
	if from := r.state.Spikes.PlanFrom; at < from {
		return nil, collective.OfAll(world,
			fmt.Errorf("there is no complete checkpoint at or after step %d, from which the "+
				"run follows its current plan", from))
	}
	if r.leads() {
		if found == nil {
			err = r.findInitial(ctx)
		}
		for _, path := range newer {
			if err == nil {
				err = discardCheckpoint(path)
			}
		}
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return nil, err
	}
	return found, r.shareInitial(ctx)
}

// backTo returns the earliest step to which the next rollback may return. The newest checkpoint up
// to that step must be kept. backTo is negative if none is needed.
func (r *run) backTo() int64 {
	if r.config.Spikes.Action != SpikeRollback {
		return -1
	}
	return max(r.state.Step+1-r.config.Spikes.LeaveOut, r.state.Spikes.PlanFrom)
}

// endOfSpikes returns the error that ends a run after too many spikes.
func (r *run) endOfSpikes(spike *Spike, why string) error {
	checkpoint := "there is no checkpoint"
	if r.lastSaved >= 0 {
		checkpoint = "the newest checkpoint is " + checkpointName(r.lastSaved)
	}
	err := fmt.Errorf("step %d: %s, and %s; the weights are unchanged since the step before, and %s. If losses have "+
		"risen and stay high, the learning rate is too high, or the data has changed permanently (mula peek "+
		"--position %d shows it). Otherwise, raise the limit and start the run again. Skipped positions are "+
		"listed in %s",
		r.state.Step, spike, why, checkpoint, r.positions(r.state.Step).From, r.dir.join(skipsFile))
	if spike.NotFinite {
		err = fmt.Errorf("%w: %w", ErrNotFinite, err)
	}
	return collective.OfAll(r.ranks.World(), err)
}

// writeSkips writes the positions skipped because of spikes in the format of blend.yaml. Without
// any, it removes an old file.
func (r *run) writeSkips() error {
	path := r.dir.join(skipsFile)
	if r.state.Spikes == nil || len(r.state.Spikes.Skips) == 0 {
		return atomicfile.Remove(path)
	}
	var text strings.Builder
	text.WriteString("# Positions that this run skipped because of spikes, written by mula train. A plan that is " +
		"built with these skips has the batches that the run was trained on.\nskips:\n")
	for _, s := range r.state.Spikes.Skips {
		fmt.Fprintf(&text, "- {from: %d, to: %d}\n", s.From, s.To)
	}
	return atomicfile.WriteFile(path, []byte(text.String()))
}
