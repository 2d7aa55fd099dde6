package blockcache

import (
	"math/bits"
	"slices"
)

// A Model counts the requests that a [Cache] would make. It has the rules of a Cache and no data.
// Times of use are the numbers of the uses, where a Cache has seconds.
type Model struct {
	Requests int64
	Bytes    int64 // of all requests
	Again    int64 // bytes of blocks that were fetched before and removed since

	limit     int64
	extents   map[place]*modelExtent
	uses      uint32
	total     int64 // bytes of the blocks that are present
	untrimmed int64
}

// A place is an extent of a file, from 0, or -1 for a complete file.
type place struct {
	path   string
	extent int64
}

// A modelExtent has the state of an extent's blocks, one bit each.
type modelExtent struct {
	present, fetched uint64 // fetched: at any time
	used             uint32
	bytes            int64 // of a complete file
}

// NewModel returns a model of an empty cache with a limit in bytes.
func NewModel(limit int64) *Model { return &Model{limit: limit, extents: map[place]*modelExtent{}} }

// Fetch counts the requests of [File.Fetch] for the bytes [from, end) of a file of size bytes.
func (m *Model) Fetch(path string, size, from, end int64) {
	first, last := from/Block, (min(end, size)+Block-1)/Block
	present := func(block int64) bool {
		x := m.extents[place{path, block / extent}]
		return x != nil && x.has(block)
	}
	for _, r := range slices.Collect(requests(first, last, present)) { // before blocks are removed
		m.Requests++
		m.uses++
		for b := r.from; b < r.end; b++ {
			m.add(path, b, min(Block, size-b*Block))
		}
		m.wrote(min(r.end*Block, size) - r.from*Block)
	}
}

// Read counts the requests of [File.ReadBlocks] for the blocks with the bytes [from, end).
func (m *Model) Read(path string, size, from, end int64) {
	m.uses++
	for block := from / Block; block*Block < end; block++ {
		if x := m.extents[place{path, block / extent}]; x != nil && x.has(block) {
			x.used = m.uses
		}
	}
	m.Fetch(path, size, from, end)
}

// Whole counts the requests of [Cache.Whole] for a file of size bytes.
func (m *Model) Whole(path string, size int64) {
	m.uses++
	x := m.extents[place{path, -1}]
	if x == nil {
		x = &modelExtent{bytes: size}
		m.extents[place{path, -1}] = x
	}
	x.used = m.uses
	if x.present == 1 {
		return
	}
	m.Requests += (size + Longest - 1) / Longest
	m.Bytes += size
	if x.fetched == 1 {
		m.Again += size
	}
	m.wrote(size) // a Cache renames the file afterwards
	x.present, x.fetched = 1, 1
	m.total += size
}

// add adds a block of n bytes.
func (m *Model) add(path string, block, n int64) {
	key, bit := place{path, block / extent}, uint64(1)<<(block%extent)
	x := m.extents[key]
	if x == nil {
		x = &modelExtent{}
		m.extents[key] = x
	}
	m.Bytes += n
	if x.fetched&bit != 0 {
		m.Again += n
	}
	x.present |= bit
	x.fetched |= bit
	x.used = m.uses
	m.total += Block
}

// wrote is [Cache.wrote].
func (m *Model) wrote(n int64) {
	if m.untrimmed += n; m.untrimmed < trimAfter(m.limit) {
		return
	}
	m.untrimmed = 0
	if m.total <= m.limit {
		return
	}
	var items []item
	for key, x := range m.extents {
		if x.present != 0 {
			items = append(items, item{used: x.used, bytes: x.size(), path: key.path, first: key.extent})
		}
	}
	for _, x := range surplus(items, m.total, m.limit) {
		m.extents[place{x.path, x.first}].present = 0
		m.total -= x.bytes
	}
}

// has reports whether a block of the extent is present.
func (x *modelExtent) has(block int64) bool { return x.present>>(block%extent)&1 == 1 }

// size returns the number of bytes that count towards the limit.
func (x *modelExtent) size() int64 {
	if x.bytes > 0 {
		return x.bytes
	}
	return int64(bits.OnesCount64(x.present)) * Block
}
