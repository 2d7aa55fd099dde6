// Package testwait lets tests wait for a condition without a time limit of their own. A busy
// machine can be slow, so the only limit is the deadline of the test binary.
package testwait

import (
	"context"
	"testing"
	"time"
)

// reserve is the time between the end of a wait and the deadline of the test binary, in which the
// test fails and cleans up.
const reserve = 20 * time.Second

// Context returns a context that ends with the test, or shortly before the deadline of the test
// binary.
func Context(t testing.TB) context.Context {
	deadline, ok := deadlineOf(t)
	if !ok {
		return t.Context()
	}
	ctx, cancel := context.WithDeadline(t.Context(), deadline.Add(-reserve))
	t.Cleanup(cancel)
	return ctx
}

// Until returns when holds returns true. It fails the test shortly before the deadline of the test
// binary. what describes the condition.
func Until(t testing.TB, what string, holds func() bool) {
	t.Helper()
	end := never
	if deadline, ok := deadlineOf(t); ok {
		end = time.After(time.Until(deadline) - reserve)
	}
	for !holds() {
		select {
		case <-end:
			t.Fatalf("not before the deadline of the test: %s", what)
		case <-time.After(time.Millisecond):
		}
	}
}

// never is a channel on which nothing arrives.
var never <-chan time.Time

// deadlineOf returns the deadline of the test binary. Benchmarks and fuzz targets have none.
func deadlineOf(t testing.TB) (time.Time, bool) {
	if limited, ok := t.(interface{ Deadline() (time.Time, bool) }); ok {
		return limited.Deadline()
	}
	return time.Time{}, false
}
