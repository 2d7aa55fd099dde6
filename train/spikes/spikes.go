// Package spikes finds outliers of the loss and of the gradient norm, and keeps the positions that
// a run skips because of them.
package spikes

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"

	"mula/blend"
)

// Config is the reaction to a spike of the loss or gradient norm; see [Spike].
type Config struct {
	Action Action `yaml:"action"`
	// a spike is above the mean plus this many standard deviations; default 6
	Sigma  float64 `yaml:"sigma"`
	Window int     `yaml:"window"` // number of past updates in the mean and deviation; default 128
	// rollback: number of steps whose data is skipped, up to and including the spike; default 100
	LeaveOut int64 `yaml:"skip_steps" was:"leave_out"`
	// consecutive skipped steps after which the run fails; default 16
	MaxSkips     int `yaml:"max_skips"`
	MaxRollbacks int `yaml:"max_rollbacks"` // rollbacks of the whole run after which it fails; default 10
}

// Action names a reaction to a spike.
type Action string

// The reactions to a spike. The default is to do nothing, so that a run follows its configuration
// and is comparable with other trainers. Skipping data is opt-in.
const (
	None Action = "none" // the update is made; NaN or Inf ends the run
	Skip Action = "skip" // the update is not made
	// the run returns to a checkpoint before the spike and skips the data in between
	RollBack Action = "rollback"
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
	Loss     = "loss"
	AuxLoss  = "aux_loss"
	GradNorm = "grad_norm"
)

var spikeWords = map[string]string{Loss: "loss", AuxLoss: "auxiliary loss", GradNorm: "gradient norm"}

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

// State is the state of spike handling between steps. Checkpoints contain it.
type State struct {
	Losses        []float64 `json:"losses"` // values of the last updates, at most spikes.window, oldest first
	GradNorms     []float64 `json:"grad_norms"`
	SkippedInARow int       `json:"skipped_in_a_row"` // consecutive skipped steps before the next step
	// positions skipped because of spikes, in order and disjoint
	Skips     []blend.Range `json:"skips"`
	Rollbacks []Rollback    `json:"rollbacks"` // in order of time
	// step from which the run follows its current plan; rollbacks do not go back further
	PlanFrom int64 `json:"plan_from,omitempty"`
	// initial weights: BeganBySeed, or the hash of the weights of initialize_from
	Began string `json:"began"`
}

const BeganBySeed = "seed"

// NewState returns the state at the start of a run, or nil if spikes.action is "none".
func NewState(c Config) *State {
	if c.Action == None {
		return nil
	}
	return &State{Losses: []float64{}, GradNorms: []float64{}, Skips: []blend.Range{}, Rollbacks: []Rollback{}}
}

// Check returns the spike of a step, or nil. The receiver may be nil.
func (s *State) Check(c Config, loss, gradNorm float64) *Spike {
	if s == nil || len(s.Losses) < c.Window {
		return nil
	}
	if spike := beyond(s.Losses, c.Sigma, Loss, loss); spike != nil {
		return spike
	}
	return beyond(s.GradNorms, c.Sigma, GradNorm, gradNorm)
}

// Update records an update that was made. The receiver may be nil.
func (s *State) Update(window int, loss, gradNorm float64) {
	if s == nil {
		return
	}
	s.Losses, s.GradNorms = appendLast(s.Losses, window, loss), appendLast(s.GradNorms, window, gradNorm)
	s.SkippedInARow = 0
}

// Exclude adds skipped positions.
func (s *State) Exclude(r blend.Range) {
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

// Excludes reports whether a position is skipped. The receiver may be nil.
func (s *State) Excludes(position int64) bool {
	if s == nil {
		return false
	}
	i := sort.Search(len(s.Skips), func(i int) bool { return s.Skips[i].To > position })
	return i < len(s.Skips) && s.Skips[i].From <= position
}

// Excluded returns the number of skipped positions. The receiver may be nil.
func (s *State) Excluded() int64 {
	if s == nil {
		return 0
	}
	var n int64
	for _, r := range s.Skips {
		n += r.To - r.From
	}
	return n
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

// appendLast appends a value and keeps the last most values.
func appendLast(values []float64, most int, v float64) []float64 {
	if drop := len(values) + 1 - most; drop > 0 {
		values = values[:copy(values, values[drop:])]
	}
	return append(values, v)
}
