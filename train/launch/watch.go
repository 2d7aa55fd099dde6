package launch

import (
	"fmt"
	"math"
	"time"

	"mula/train/record"
)

// Limits are the times after which a section of a run counts as hung. The limit of a section is
// Factor times its longest duration in all attempts, and at least the section's floor.
type Limits struct {
	Floor  map[record.Section]time.Duration
	First  time.Duration // limit of a section without a duration so far, if its floor is not larger
	Factor float64
}

// DefaultLimits returns limits for runs whose steps take up to a minute. The longest save that
// AuroraGPT reports took 19 minutes.
func DefaultLimits() Limits {
	return Limits{
		Floor: map[record.Section]time.Duration{
			record.SectionSetup: 10 * time.Minute, record.SectionStep: 5 * time.Minute,
			record.SectionEvaluate: 10 * time.Minute, record.SectionCheckpoint: 10 * time.Minute,
		},
		First:  30 * time.Minute,
		Factor: 5,
	}
}

// A watch checks the progress of a run from its heartbeat. It measures changes with its own clock,
// because the clocks of hosts differ.
type watch struct {
	limits  Limits
	longest map[record.Section]time.Duration
	before  map[record.Section]record.Spent // in earlier attempts

	beat record.Heartbeat
	seen time.Time // when the beat was first read
}

func newWatch(limits Limits) *watch {
	return &watch{limits: limits, longest: map[record.Section]time.Duration{},
		before: map[record.Section]record.Spent{}}
}

// begin starts an attempt. It is in its setup until the heartbeat names another section.
func (w *watch) begin(now time.Time) {
	for _, section := range record.Sections {
		w.before[section] = w.spent(section)
	}
	w.beat, w.seen = record.Heartbeat{Section: record.SectionSetup}, now
}

// see records a new beat.
func (w *watch) see(beat record.Heartbeat, now time.Time) {
	w.beat, w.seen = beat, now
	for section, spent := range beat.Spent {
		w.longest[section] = max(w.longest[section], time.Duration(spent.Longest*float64(time.Second)))
	}
}

// spent returns the time in a section over all attempts.
func (w *watch) spent(section record.Section) record.Spent {
	a, b := w.before[section], w.beat.Spent[section]
	return record.Spent{Times: a.Times + b.Times, Seconds: a.Seconds + b.Seconds, Longest: max(a.Longest, b.Longest)}
}

// limit returns the time limit of a section.
func (w *watch) limit(section record.Section) time.Duration {
	floor := w.limits.Floor[section]
	longest, seen := w.longest[section]
	if !seen || longest == 0 {
		return max(floor, w.limits.First)
	}
	return max(floor, time.Duration(min(w.limits.Factor*float64(longest), math.MaxInt64/2)))
}

// An overdue is a section that exceeds its limit.
type overdue struct {
	section record.Section
	step    int64
	limit   time.Duration
}

func (o overdue) String() string {
	if o.section == record.SectionSetup {
		return fmt.Sprintf("no first step within %s", o.limit.Round(time.Second))
	}
	return fmt.Sprintf("no progress for %s in the section %s after %d steps", o.limit.Round(time.Second), o.section,
		o.step)
}

// overdue returns the section that exceeds its limit, or nil.
func (w *watch) overdue(now time.Time) *overdue {
	if limit := w.limit(w.beat.Section); now.Sub(w.seen) > limit {
		return &overdue{w.beat.Section, w.beat.Step, limit}
	}
	return nil
}
