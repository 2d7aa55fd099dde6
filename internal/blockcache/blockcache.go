// Package blockcache keeps parts of remote files in a folder of the local disk.
//
// Several processes may share a folder. A remote file has one cache file, which has all blocks of
// 16 KiB that were read, at their own offsets, and a table with a CRC-32C for each of them. Every
// read from the cache compares the block with its sum. So a block is never wrong: a write that a
// kill or a crash has interrupted, a block that another process removes at the same time, and a
// damaged disk all look like a block that is absent, which is fetched again. A folder that is full
// or cannot be written makes reads of blocks slower, never wrong. Complete files need space in it.
//
// A process claims bytes before it fetches them, by a lock that ends with the process, so that
// several processes do not fetch the same bytes.
package blockcache

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
)

// Block is the number of bytes of a block. The last block of a file may be shorter.
const Block = 1 << 14

// A Source reads a remote file whose content does not change.
type Source interface {
	// ReadAt fills p with the bytes from offset off, or returns an error.
	ReadAt(ctx context.Context, p []byte, off int64) error
}

// Parallel is the maximum number of requests of a cache at a time. A store answers after tens of
// milliseconds, and serves many requests at the same time.
const Parallel = 64

// Longest is the maximum number of bytes of one request. All blocks that are fetched ahead at a
// time, and all complete files, need at most Parallel times as much memory: 128 MiB.
const Longest = 2 << 20

// A Cache is a folder of cache files. It is safe for concurrent use by several goroutines and
// processes.
type Cache struct {
	dir      string
	limit    int64
	requests chan struct{} // one element for each request in progress

	buffers chan []byte // memory of requests; Parallel elements, nil until they are used

	mu     sync.Mutex
	wholes map[string]*flight // complete files that are being fetched, by path

	untrimmed atomic.Int64 // bytes written since the last trim
	trimming  atomic.Bool
	failure   atomic.Pointer[error] // see [Failure]

	claims  *os.File     // its bytes are claimed for complete files; nil if it cannot be opened
	hurried atomic.Int64 // nanoseconds since 1970 until which no claim waits

	patience time.Duration // see the constant
	now      func() uint32 // seconds since 1970
	spawn    func(func())  // runs a function in the background
}

// A flight is a fetch in progress. done is closed at its end.
type flight struct{ done chan struct{} }

// openCache opens the cache in a folder, and creates the folder if it does not exist. Processes
// that use the folder remove old blocks when all files together have more than limit bytes on disk.
// The limit may be exceeded by a sixteenth for each process.
func openCache(dir string, limit int64) (*Cache, error) {
	if limit < Longest {
		return nil, fmt.Errorf("a cache needs at least %d bytes, not %d", Longest, limit)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("opening the cache of remote files: %w", err)
	}
	// Without the file, processes fetch complete files that they need at the same time twice.
	claims, _ := os.OpenFile(filepath.Join(dir, "claims.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	c := &Cache{dir: dir, limit: limit, requests: make(chan struct{}, Parallel), buffers: make(chan []byte, Parallel),
		wholes: map[string]*flight{}, claims: claims, patience: patience,
		now: func() uint32 { return uint32(time.Now().Unix()) }, spawn: func(f func()) { go f() }}
	for range Parallel {
		c.buffers <- nil
	}
	return c, nil
}

// fail records why the folder could not keep a block.
func (c *Cache) fail(err error) { c.failure.CompareAndSwap(nil, &err) }

// borrow waits for memory for a request of n bytes, at most Longest. The caller sends it back to
// c.buffers.
func (c *Cache) borrow(ctx context.Context, n int64) ([]byte, error) {
	select {
	case b := <-c.buffers:
		if int64(cap(b)) < n {
			b = make([]byte, n)
		}
		return b[:n], nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// path returns the path of a cache file. identity names the remote file and its version.
func (c *Cache) path(identity, ending string) string {
	sum := sha256.Sum256([]byte(identity))
	return filepath.Join(c.dir, hex.EncodeToString(sum[:16])+ending)
}

// get reads p from a source, in one request.
func (c *Cache) get(ctx context.Context, source Source, p []byte, off int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case c.requests <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-c.requests }()
	return source.ReadAt(ctx, p, off)
}

// wrote counts bytes that were added to the folder, and starts to remove old ones if necessary.
func (c *Cache) wrote(n int64) {
	if c.untrimmed.Add(n) < trimAfter(c.limit) || !c.trimming.CompareAndSwap(false, true) {
		return
	}
	c.untrimmed.Store(0)
	c.spawn(func() {
		defer c.trimming.Store(false)
		c.trim()
	})
}

// trimAfter returns the number of bytes that a process writes before it looks for old blocks.
func trimAfter(limit int64) int64 { return limit / 16 }

// wait waits for the end of a fetch by another goroutine.
func (f *flight) wait(ctx context.Context) error {
	select {
	case <-f.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
