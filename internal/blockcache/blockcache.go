// Package blockcache keeps parts of remote files in a folder of the local disk.
//
// Several processes may share a folder. A remote file has one cache file, which has all blocks of
// 16 KiB that were read, at their own offsets, and a table with a CRC-32C for each of them. Every
// read from the cache compares the block with its sum. So a block is never wrong: a write that a
// kill or a crash has interrupted, a block that another process removes at the same time, and a
// damaged disk all look like a block that is absent, which is fetched again. A folder that is full
// or cannot be written makes reads slower, never wrong.
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

	"mula/internal/freelist"
)

// Block is the number of bytes of a block. The last block of a file may be shorter.
const Block = 1 << 14

// A Source reads a remote file whose content does not change.
type Source interface {
	// ReadAt fills p with the bytes from offset off, or returns an error.
	ReadAt(ctx context.Context, p []byte, off int64) error
}

// parallel is the maximum number of requests of a cache at a time. A store answers after tens of
// milliseconds, and serves many requests at the same time.
const parallel = 64

// longest is the maximum number of bytes of one request. All requests of a cache together need at
// most 128 MiB of memory.
const longest = 2 << 20

// A Cache is a folder of cache files. It is safe for concurrent use by several goroutines and
// processes.
type Cache struct {
	dir      string
	limit    int64
	requests chan struct{} // one element for each request in progress

	mu     sync.Mutex
	wholes map[string]*flight // complete files that are being fetched, by path

	buffers freelist.List[buffer]

	untrimmed atomic.Int64 // bytes written since the last trim
	trimming  atomic.Bool
	stats     struct{ requests, fetched, cached, failed atomic.Int64 }
}

// A buffer is memory for the blocks of one request.
type buffer struct{ bytes []byte }

// sized returns n bytes of the buffer.
func (b *buffer) sized(n int64) []byte {
	if int64(len(b.bytes)) < n {
		b.bytes = make([]byte, n)
	}
	return b.bytes[:n]
}

// A flight is a fetch in progress. done is closed at its end.
type flight struct{ done chan struct{} }

// Stats counts what a cache of this process has done.
type Stats struct {
	Requests     int64 // reads of a source
	Fetched      int64 // bytes read from sources
	Cached       int64 // bytes read from the folder
	FailedWrites int64 // fetched runs of blocks that the folder could not take
}

// openCache opens the cache in a folder, and creates the folder if it does not exist. Processes
// that use the folder remove old blocks when all files together have more than limit bytes on disk.
// The limit may be exceeded by a sixteenth for each process.
func openCache(dir string, limit int64) (*Cache, error) {
	if limit < longest {
		return nil, fmt.Errorf("a cache needs at least %d bytes, not %d", longest, limit)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("opening the cache of remote files: %w", err)
	}
	return &Cache{dir: dir, limit: limit, requests: make(chan struct{}, parallel), wholes: map[string]*flight{}}, nil
}

// Stats returns the counters of this process.
func (c *Cache) Stats() Stats {
	s := &c.stats
	return Stats{s.requests.Load(), s.fetched.Load(), s.cached.Load(), s.failed.Load()}
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
	c.stats.requests.Add(1)
	if err := source.ReadAt(ctx, p, off); err != nil {
		return err
	}
	c.stats.fetched.Add(int64(len(p)))
	return nil
}

// wrote counts bytes that were added to the folder, and starts to remove old ones if necessary.
func (c *Cache) wrote(n int64) {
	if c.untrimmed.Add(n) < c.limit/16 || !c.trimming.CompareAndSwap(false, true) {
		return
	}
	c.untrimmed.Store(0)
	go func() {
		defer c.trimming.Store(false)
		c.trim()
	}()
}

// wait waits for the end of a fetch by another goroutine.
func (f *flight) wait(ctx context.Context) error {
	select {
	case <-f.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
