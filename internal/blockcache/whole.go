package blockcache

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"
)

const (
	wholeEnding = ".whole"
	tempEnding  = ".tmp"
)

// Whole returns the path of a complete local copy of a remote file. If the cache does not have it,
// it is fetched. identity and size are as in [Cache.File]. check, which may be nil, gets the
// SHA-256 of a fetched file; if it returns an error, the file is not kept. The copy may be removed
// at any time, so open it at once, and repeat the call if it is gone.
func (c *Cache) Whole(ctx context.Context, identity string, size int64, source Source,
	check func(sha256hex string) error) (path string, err error) {
	path = c.path(identity, wholeEnding)
	for {
		if info, err := os.Stat(path); err == nil && info.Size() == size {
			if now := time.Now(); now.Sub(info.ModTime()) > refresh*time.Second {
				_ = os.Chtimes(path, now, now) // the time of the last use, for trim
			}
			return path, nil
		}
		c.mu.Lock()
		other := c.wholes[path]
		if other == nil {
			mine := &flight{make(chan struct{})}
			c.wholes[path] = mine
			c.mu.Unlock()
			err := c.fetchWhole(ctx, path, size, source, check)
			c.mu.Lock()
			delete(c.wholes, path)
			c.mu.Unlock()
			close(mine.done)
			return path, err
		}
		c.mu.Unlock()
		if err := other.wait(ctx); err != nil {
			return "", err
		}
	}
}

// fetchWhole fetches a file to path, under which it appears complete.
func (c *Cache) fetchWhole(ctx context.Context, path string, size int64, source Source,
	check func(sha256hex string) error) (err error) {
	out, err := os.CreateTemp(c.dir, "*"+tempEnding)
	if err != nil {
		return fmt.Errorf("caching a remote file: %w", err)
	}
	defer func() {
		if err = errors.Join(err, out.Close()); err == nil {
			err = os.Rename(out.Name(), path)
		}
		if err != nil {
			os.Remove(out.Name())
		}
	}()
	hash := sha256.New()
	block := make([]byte, min(longest, size))
	for at := int64(0); at < size; at += int64(len(block)) {
		block = block[:min(int64(len(block)), size-at)]
		if err := c.get(ctx, source, block, at); err != nil {
			return err
		}
		hash.Write(block)
		if _, err := out.Write(block); err != nil {
			return fmt.Errorf("caching a remote file: %w", err)
		}
	}
	if check != nil {
		if err := check(hex.EncodeToString(hash.Sum(nil))); err != nil {
			return err
		}
	}
	c.wrote(size)
	return out.Sync()
}
