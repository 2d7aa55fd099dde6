package blockcache

import (
	"cmp"
	"encoding/binary"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"mula/internal/locks"
)

// extent is the number of blocks that are removed together. Fewer would leave many small holes.
const extent = 1 << 20 / Block

// abandoned is the age from which a temporary file belongs to no process any more.
const abandoned = 24 * time.Hour

// An item is a part of the folder that can be removed: an extent of a cache file, or a complete
// file.
type item struct {
	used   uint32 // seconds since 1970
	bytes  int64
	path   string
	first  int64 // the first block of the extent, -1 for a complete file
	blocks int64 // of the cache file
}

// trim removes the items that were not used for the longest time, until the folder has at most
// three quarters of the limit. Only one process trims at a time. Errors are ignored: what cannot be
// removed stays.
func (c *Cache) trim() {
	lock, err := locks.Hold(filepath.Join(c.dir, "trim.lock"))
	if err != nil {
		return
	}
	defer lock.Close()
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return
	}
	var items []item
	total := int64(0)
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue
		}
		path := filepath.Join(c.dir, e.Name())
		used := uint32(info.ModTime().Unix())
		switch filepath.Ext(e.Name()) {
		case blocksEnding:
			extents := listExtents(path, info)
			items = append(items, extents...)
			for _, x := range extents {
				total += x.bytes
			}
		case wholeEnding:
			items = append(items, item{used: used, bytes: info.Size(), path: path, first: -1})
			total += info.Size()
		case tempEnding:
			if time.Since(info.ModTime()) > abandoned {
				os.Remove(path)
			}
		}
	}
	for _, x := range surplus(items, total, c.limit) {
		if x.first < 0 {
			os.Remove(x.path)
			os.Remove(sumPath(x.path))
		} else {
			x.clear()
		}
	}
}

// surplus sorts the items of a cache that have total bytes. It returns the first of them, which
// must be removed.
func surplus(items []item, total, limit int64) []item {
	if total <= limit {
		return nil
	}
	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(cmp.Compare(a.used, b.used), cmp.Compare(a.path, b.path), cmp.Compare(a.first, b.first))
	})
	n := 0
	for ; n < len(items) && total > limit/4*3; n++ {
		total -= items[n].bytes
	}
	return items[:n]
}

// listExtents returns the extents of a cache file that have blocks.
func listExtents(path string, info fs.FileInfo) (list []item) {
	n := (info.Size() - int64(len(trailer))) / (Block + entrySize)
	disk, err := os.Open(path)
	if err != nil || n < 1 {
		return nil
	}
	defer disk.Close()
	table := make([]byte, n*entrySize)
	if _, err := disk.ReadAt(table, n*Block); err != nil {
		return nil
	}
	for first := int64(0); first < n; first += extent {
		x := item{path: path, first: first, blocks: n}
		for b := first; b < min(first+extent, n); b++ {
			if used := binary.LittleEndian.Uint32(table[b*entrySize+4:]); used != 0 {
				x.used = max(x.used, used)
				x.bytes += Block
			}
		}
		if x.bytes > 0 {
			list = append(list, x)
		}
	}
	return list
}

// clear removes the blocks of an extent: first their entries, then their bytes.
func (x *item) clear() {
	disk, err := os.OpenFile(x.path, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer disk.Close()
	n := min(extent, x.blocks-x.first)
	if _, err := disk.WriteAt(make([]byte, n*entrySize), x.blocks*Block+x.first*entrySize); err != nil {
		return
	}
	if punch(disk, x.first*Block, n*Block) != nil {
		os.Remove(x.path) // with all its blocks
	}
}
