package blockcache

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	wholeEnding = ".whole"
	sumEnding   = ".sum" // has the SHA-256 of the .whole of the same name, in hexadecimal
	tempEnding  = ".tmp"
)

// Whole returns the path of a complete local copy of a remote file. If the cache does not have it,
// it is fetched. identity and size are as in [Cache.File]. check, which may be nil, gets the
// SHA-256 of a fetched file; if it returns an error, the file is not kept. A copy that the cache
// has is hashed, and fetched again if it is damaged. It may be removed at any time, so open it at
// once, and repeat the call if it is gone. If the folder is full, Whole fails.
func (c *Cache) Whole(ctx context.Context, identity string, size int64, source Source,
	check func(sha256hex string) error) (path string, err error) {
	path = c.path(identity, wholeEnding)
	for {
		if wholeIsRight(path, size) {
			return path, nil
		}
		c.mu.Lock()
		other := c.wholes[path]
		if other == nil {
			mine := &flight{make(chan struct{})}
			c.wholes[path] = mine
			c.mu.Unlock()
			release := c.claim(ctx, c.claims, claimOf(path), 1, size)
			var err error
			if !wholeIsRight(path, size) { // another process has not fetched it meanwhile
				err = c.fetchWhole(ctx, path, size, source, check)
			}
			release()
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

// claimOf returns the byte of the file of claims that is locked for a complete file.
func claimOf(path string) int64 { return int64(crc32.ChecksumIEEE([]byte(path))) }

// sumPath returns the path of the hash of a complete file.
func sumPath(path string) string { return strings.TrimSuffix(path, wholeEnding) + sumEnding }

// wholeIsRight reports whether a complete file has its size and its hash.
func wholeIsRight(path string, size int64) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || info.Size() != size {
		return false
	}
	want, err := os.ReadFile(sumPath(path))
	if err != nil {
		return false
	}
	if sum, err := hashOf(f, size); err != nil || sum != string(want) {
		return false
	}
	if now := time.Now(); now.Sub(info.ModTime()) > refresh*time.Second {
		_ = os.Chtimes(path, now, now) // the time of the last use, for trim
	}
	return true
}

// hashOf returns the SHA-256 of the first size bytes of a file, in hexadecimal.
func hashOf(f *os.File, size int64) (string, error) {
	hash := sha256.New()
	if _, err := io.Copy(hash, io.NewSectionReader(f, 0, size)); err != nil {
		return "", fmt.Errorf("caching a remote file: %w", err)
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// fetchWhole fetches a file to path, under which it appears complete.
func (c *Cache) fetchWhole(ctx context.Context, path string, size int64, source Source,
	check func(sha256hex string) error) (err error) {
	out, err := os.CreateTemp(c.dir, "*"+tempEnding)
	if err != nil {
		return c.unable(err)
	}
	defer func() {
		if err = errors.Join(err, out.Close()); err == nil {
			err = os.Rename(out.Name(), path)
		}
		if err != nil {
			os.Remove(out.Name())
		}
	}()
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(Parallel / 4) // so that others can read at the same time
	for at := int64(0); at < size; at += Longest {
		g.Go(func() error {
			p, err := c.borrow(gctx, min(Longest, size-at))
			if err != nil {
				return err
			}
			defer func() { c.buffers <- p }()
			if err := c.get(gctx, source, p, at); err != nil {
				return err
			}
			if _, err := out.WriteAt(p, at); err != nil {
				return c.unable(err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	sum, err := hashOf(out, size)
	if err == nil && check != nil {
		err = check(sum)
	}
	if err == nil {
		if err = os.WriteFile(sumPath(path), []byte(sum), 0o600); err != nil {
			err = c.unable(err)
		}
	}
	if err != nil {
		return err
	}
	c.wrote(size)
	return out.Sync()
}
