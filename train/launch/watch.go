package launch

import (
	"fmt"
	"math"
	"time"

	"mula/train"
)

// Limits are how long a section of a run may last before the run counts as one that hangs. A
// section that was seen may take Factor times as long as the longest that was seen, whatever
// attempt that was in; no limit is below the section's floor.
type Limits struct {
	Floor  map[train.Section]time.Duration
	First  time.Duration // limit of a section that was not seen yet, where the floor is not above it
	Factor float64
}

// DefaultLimits are for runs whose steps take up to a minute. The longest legitimate silence that
// AuroraGPT reports is a save of 19 minutes.
func DefaultLimits() Limits {
	return Limits{
		Floor: map[train.Section]time.Duration{
			train.SectionSetup: 10 * time.Minute, train.SectionStep: 5 * time.Minute,
			train.SectionEvaluate: 10 * time.Minute, train.SectionCheckpoint: 10 * time.Minute,
		},
		First:  30 * time.Minute,
		Factor: 5,
	}
}

// A watch sees from the heartbeat whether the run makes progress. It takes only what changes as
// progress, by its own clock: those of hosts differ.
type watch struct {
	limits  Limits
	longest map[train.Section]time.Duration
	before  map[train.Section]train.Spent // by attempts before this one

	beat train.Heartbeat
	seen time.Time // when the beat was first seen
}

func newWatch(limits Limits) *watch {
	return &watch{limits: limits, longest: map[train.Section]time.Duration{}, before: map[train.Section]train.Spent{}}
}

// begin begins an attempt: it is in its setup until it says otherwise.
func (w *watch) begin(now time.Time) {
	for _, section := range train.Sections {
		w.before[section] = w.spent(section)
	}
	w.beat, w.seen = train.Heartbeat{Section: train.SectionSetup}, now
}

// see takes a new beat.
func (w *watch) see(beat train.Heartbeat, now time.Time) {
	w.beat, w.seen = beat, now
	for section, spent := range beat.Spent {
		w.longest[section] = max(w.longest[section], time.Duration(spent.Longest*float64(time.Second)))
	}
}

// spent is the time in a section over all attempts.
func (w *watch) spent(section train.Section) train.Spent {
	a, b := w.before[section], w.beat.Spent[section]
	return train.Spent{Times: a.Times + b.Times, Seconds: a.Seconds + b.Seconds, Longest: max(a.Longest, b.Longest)}
}

// limit is how long a section may last.
func (w *watch) limit(section train.Section) time.Duration {
	floor := w.limits.Floor[section]
	longest, seen := w.longest[section]
	if !seen || longest == 0 {
		return max(floor, w.limits.First)
	}
	return max(floor, time.Duration(min(w.limits.Factor*float64(longest), math.MaxInt64/2)))
}

// An overdue is a section that lasts longer than it may.
type overdue struct {
	section train.Section
	step    int64
	limit   time.Duration
}

func (o overdue) String() string {
	if o.section == train.SectionSetup {
		return fmt.Sprintf("no first step within %s", o.limit.Round(time.Second))
	}
	return fmt.Sprintf("no progress for %s in the section %s after %d steps", o.limit.Round(time.Second), o.section,
		o.step)
}

// overdue is what is overdue at a moment, nil for nothing.
func (w *watch) overdue(now time.Time) *overdue {
	if limit := w.limit(w.beat.Section); now.Sub(w.seen) > limit {
		return &overdue{w.beat.Section, w.beat.Step, limit}
	}
	return nil
}
