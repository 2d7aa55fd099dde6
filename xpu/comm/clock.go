package comm

import "context"

// A Clock is the time of a rank on a [Transport] that simulates a network: see
// [mula/xpu/comm/simulated]. Operations of [Comm.Start] have clocks of their own.
type Clock interface {
	// Fork returns a clock that shows the same time.
	Fork() Clock
	// Join waits, in simulated time, for another clock of the same rank.
	Join(other Clock)
}

type clockKey struct{}

// WithClock returns a context whose exchanges advance the clock.
func WithClock(ctx context.Context, clock Clock) context.Context {
	return context.WithValue(ctx, clockKey{}, clock)
}

// ClockOf returns the clock of [WithClock], or nil.
func ClockOf(ctx context.Context) Clock {
	clock, _ := ctx.Value(clockKey{}).(Clock)
	return clock
}
