package comm

import (
	"context"
	"sync/atomic"
	"time"
)

// Waits adds up the time that a rank spends in exchanges with other ranks: in all functions of this
// package that wait for another rank, of all groups. Operations that [Comm.Start] runs in the
// background do not count, but [Pending.Wait] does.
type Waits struct{ nanoseconds atomic.Int64 }

type waitsKey struct{}

// CountWaits returns a context whose exchanges are counted.
func CountWaits(ctx context.Context) (context.Context, *Waits) {
	w := new(Waits)
	return context.WithValue(ctx, waitsKey{}, w), w
}

// Total returns the time since CountWaits.
func (w *Waits) Total() time.Duration { return time.Duration(w.nanoseconds.Load()) }

// uncounted returns a context whose exchanges are not counted, and the Waits of ctx, or nil.
func uncounted(ctx context.Context) (context.Context, *Waits) {
	w := waitsOf(ctx)
	if w == nil {
		return ctx, nil
	}
	return context.WithValue(ctx, waitsKey{}, (*Waits)(nil)), w
}

func waitsOf(ctx context.Context) *Waits {
	w, _ := ctx.Value(waitsKey{}).(*Waits)
	return w
}

// A wait is an exchange in progress.
type wait struct {
	waits *Waits // nil: not counted
	began time.Time
}

// begin starts to count an exchange. Its method end is to be called after the exchange.
func (w *Waits) begin() wait {
	if w == nil {
		return wait{}
	}
	return wait{w, time.Now()}
}

func (w wait) end() {
	if w.waits != nil {
		w.waits.nanoseconds.Add(int64(time.Since(w.began)))
	}
}
