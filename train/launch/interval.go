package launch

import (
	"fmt"
	"math"
	"time"
)

// Advice is the recommended interval of checkpoints, computed from the durations of the run so far.
type Advice struct {
	SaveSeconds    float64 `json:"save_seconds"`    // mean time of a checkpoint
	BetweenSeconds float64 `json:"between_seconds"` // mean time between failures
	StepSeconds    float64 `json:"step_seconds"`    // mean time of a step
	Every          int64   `json:"checkpoint_every"`
}

// String describes the advice.
func (a Advice) String() string {
	return fmt.Sprintf("a checkpoint takes %.2g s, and the mean time between failures is %s; saving every %d steps "+
		"(checkpoint.every) would lose the least time",
		a.SaveSeconds, time.Duration(a.BetweenSeconds*float64(time.Second)).Round(time.Second), a.Every)
}

// interval returns the time between two saves, in seconds, that loses the least time. save is the
// time of a save and between the mean time between failures, both in seconds. The interval is
// √(2·save·between), Young's first-order optimum (J. W. Young, A first order approximation to the
// optimum checkpoint interval, CACM 17(9), 1974). The formula assumes that save is much less than
// between. The result is at most between, which is also the limit of J. T. Daly's better estimate
// (FGCS 22(3), 2006).
func interval(save, between float64) float64 {
	return min(math.Sqrt(2*save*between), between)
}

// advise converts the interval to steps.
func advise(save, between, step float64) *Advice {
	if !(save > 0 && between > 0 && step > 0) {
		return nil
	}
	return &Advice{save, between, step, max(1, int64(math.Round(interval(save, between)/step)))}
}
