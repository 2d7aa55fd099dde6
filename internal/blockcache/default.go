package blockcache

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"mula/internal/quantity"
	"mula/internal/usercache"
)

// The environment variables that set the default cache.
const (
	FolderVariable = "MULA_CACHE"      // the folder
	SizeVariable   = "MULA_CACHE_SIZE" // the limit, such as 500G
)

// defaultSize is the limit of the default cache if no variable sets it.
const defaultSize = 20 << 30

// opened is the default cache, after it was opened.
var opened atomic.Pointer[Cache]

// Failure returns why the folder of the default cache could not keep a block that this process has
// fetched, for instance because the disk is full. It returns nil if it has kept all of them, or if
// the process has not used the cache. Such blocks are fetched again each time they are read.
func Failure() error {
	if c := opened.Load(); c != nil {
		if err := c.failure.Load(); err != nil {
			return fmt.Errorf("remote data is fetched again for each read: %w", c.unable(*err))
		}
	}
	return nil
}

// unable returns the error about a folder that cannot keep data.
func (c *Cache) unable(err error) error {
	return fmt.Errorf("the cache %s cannot keep remote data: %w; free space, or set %s to another folder", c.dir, err,
		FolderVariable)
}

// Limit returns the limit of the default cache in bytes.
func Limit() (int64, error) {
	text := os.Getenv(SizeVariable)
	if text == "" {
		return defaultSize, nil
	}
	limit, err := quantity.Count(text)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", SizeVariable, err)
	}
	return limit, nil
}

// Default returns the cache that all parts of this process use. Its folder is in the user's folder
// for caches, unless an environment variable names another.
var Default = sync.OnceValues(func() (*Cache, error) {
	limit, err := Limit()
	if err != nil {
		return nil, err
	}
	dir := os.Getenv(FolderVariable)
	if dir == "" {
		if dir, err = usercache.Folder("objects"); err != nil {
			return nil, fmt.Errorf("a cache of remote files needs a folder; set %s: %w", FolderVariable, err)
		}
	}
	c, err := openCache(dir, limit)
	opened.Store(c)
	return c, err
})
