package blockcache

import (
	"context"
	"os"
	"time"
)

const (
	// patience is the time for which a process waits for another process that fetches the same
	// bytes, plus the time for these bytes at slowest bytes/s. A fetch normally takes less, so the
	// other process is stopped, or its store does not answer.
	patience = 10 * time.Second
	slowest  = 10 << 20

	// After a wait that was too long, no claim waits for this time: the other process may have
	// claimed many ranges.
	hurry = time.Minute

	poll = 5 * time.Millisecond // interval between attempts to claim bytes
)

// claim waits until no other process, and no other opening of the file, has claimed any of n bytes
// from offset off of an open file. It claims them until the caller calls release. The system ends
// the claim of a process that dies. size is the number of bytes to fetch. If the wait is too long,
// or if the system has no such locks, claim claims nothing: bytes may then be fetched twice.
func (c *Cache) claim(ctx context.Context, file *os.File, off, n, size int64) (release func()) {
	if file == nil {
		return func() {}
	}
	began := time.Now()
	for {
		switch locked, err := lockRange(file, off, n); {
		case locked:
			return func() { unlockRange(file, off, n) }
		case err != nil || time.Now().UnixNano() < c.hurried.Load():
			return func() {}
		case time.Since(began) > c.patience+time.Duration(size/slowest)*time.Second:
			c.hurried.Store(time.Now().Add(hurry).UnixNano())
			return func() {}
		}
		select {
		case <-time.After(poll):
		case <-ctx.Done():
			return func() {}
		}
	}
}
