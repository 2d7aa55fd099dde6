package blockcache

import (
	"fmt"
	"os"
	"sync"

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

// Default returns the cache that all parts of this process use. Its folder is in the user's folder
// for caches, unless an environment variable names another.
var Default = sync.OnceValues(func() (*Cache, error) {
	limit := int64(defaultSize)
	if text := os.Getenv(SizeVariable); text != "" {
		var err error
		if limit, err = quantity.Count(text); err != nil {
			return nil, fmt.Errorf("%s: %w", SizeVariable, err)
		}
	}
	dir := os.Getenv(FolderVariable)
	if dir == "" {
		var err error
		if dir, err = usercache.Folder("objects"); err != nil {
			return nil, fmt.Errorf("a cache of remote files needs a folder; set %s: %w", FolderVariable, err)
		}
	}
	return openCache(dir, limit)
})
