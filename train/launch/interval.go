package launch

import (
	"fmt"
	"math"
	"time"
)

// Advice is how often a run should save, by what was seen of it.
type Advice struct {
	SaveSeconds    float64 `json:"save_seconds"`    // of a checkpoint, mean
	BetweenSeconds float64 `json:"between_seconds"` // from failure to failure, mean
	StepSeconds    float64 `json:"step_seconds"`    // mean
	Every          int64   `json:"checkpoint_every"`
}

// String is the sentence about it.
func (a Advice) String() string {
	return fmt.Sprintf("a checkpoint takes %.2g s and a failure came every %s: saving every %d steps "+
		"(checkpoint.every) would lose the least time",
		a.SaveSeconds, time.Duration(a.BetweenSeconds*float64(time.Second)).Round(time.Second), a.Every)
}

// Interval is the time of work between two saves that loses the least time in all, if a save takes
// so many seconds and failures come so many seconds apart in the mean: √(2·save·between), Young's
// first-order optimum (J. W. Young, A first order approximation to the optimum checkpoint interval,
// CACM 17(9), 1974). It holds for saves that are short beside the time between failures, and is cut
// to that time, which is also what J. T. Daly's better estimate ends at (FGCS 22(3), 2006).
func Interval(save, between float64) float64 {
	return min(math.Sqrt(2*save*between), between)
}

// advise turns the interval into steps.
func advise(save, between, step float64) *Advice {
	if !(save > 0 && between > 0 && step > 0) {
		return nil
	}
	return &Advice{save, between, step, max(1, int64(math.Round(Interval(save, between)/step)))}
}
