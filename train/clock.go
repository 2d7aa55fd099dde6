package train

import (
	"maps"
	"time"

	"mula/internal/quantity"
	"mula/train/record"
	"mula/xpu/comm"
)

// An activity of a rank. Time in which the rank waits for other ranks does not count.
type activity int

const (
	idle      activity = iota // none of the others, for example an evaluation or writing records
	reading                   // the samples of a step
	computing                 // losses and gradients
	updating                  // the weights, after the vote
	saving                    // a checkpoint
	activities
)

// A clock measures the time that a rank spends in each activity, and waiting for other ranks.
type clock struct {
	waits *comm.Waits

	current activity
	since   time.Time     // start of the time that is not in spent yet
	waited  time.Duration // waits.Total at that time
	spent   [activities]time.Duration
	waiting time.Duration
}

func newClock(waits *comm.Waits) *clock {
	return &clock{waits: waits, since: time.Now(), waited: waits.Total()}
}

// begin starts an activity and returns the activity that ends.
func (c *clock) begin(next activity) (last activity) {
	now, waited := time.Now(), c.waits.Total()
	waiting := waited - c.waited
	c.spent[c.current] += now.Sub(c.since) - waiting
	c.waiting += waiting
	last, c.current, c.since, c.waited = c.current, next, now, waited
	return last
}

// warnSlow warns of ranks that have become slow, and names one in the heartbeat.
func (r *run) warnSlow(m *record.StepMetrics) {
	slow := map[int]bool{}
	slowest := -1
	for _, s := range m.SlowestRanks {
		if !s.Slow {
			continue
		}
		if slowest < 0 {
			slowest = s.Rank
		}
		if slow[s.Rank] = true; !r.history.slow[s.Rank] {
			r.warn("step %d: rank %d on %s is slow: it was late in most of the last steps (log.slow_factor); "+
				"in this step its own work took %s s, %.2f times the median of its stage; number of slow ranks: %d",
				m.Step, s.Rank, s.Host, quantity.Short(float64(s.Own()), 3), s.Excess(), m.SlowRanks)
		}
	}
	if m.SlowRanks > len(slow) { // the list has not all slow ranks
		maps.Copy(slow, r.history.slow)
	}
	r.history.slow = slow
	r.history.heartbeat.Slow(slowest)
}

// take returns the time since the last call.
func (c *clock) take() record.RankSeconds {
	c.begin(c.current)
	seconds := func(d time.Duration) record.Seconds { return record.Seconds(d.Seconds()) }
	s := record.RankSeconds{Reading: seconds(c.spent[reading]), Compute: seconds(c.spent[computing]),
		Waiting: seconds(c.waiting), Update: seconds(c.spent[updating]), Saving: seconds(c.spent[saving])}
	c.spent, c.waiting = [activities]time.Duration{}, 0
	return s
}
