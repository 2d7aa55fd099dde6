package blockcache

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"sync"
)

// The layout of a cache file of n blocks: the blocks; a table with 8 bytes for each block; the
// trailer. The file is sparse. An entry of the table is a CRC-32C (u32) and the time of the last
// use in seconds since 1970 (u32), or 8 zero bytes for an absent block. Numbers are little-endian.
const (
	blocksEnding = ".blocks"
	entrySize    = 8
	trailer      = "mula block cache 1\n"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// refresh is the age from which the time of the last use is written again.
const refresh = 60 // seconds

// A File reads a remote file through the cache. It is safe for concurrent use until Close.
type File struct {
	cache  *Cache
	source Source
	size   int64
	disk   *os.File // the cache file; nil if the folder cannot hold it

	mu      sync.Mutex
	flights map[int64]*flight // by block
}

// File opens the cache file of a remote file. identity names the remote file and its version; two
// files with the same identity have the same content. size is the number of its bytes.
func (c *Cache) File(identity string, size int64, source Source) *File {
	f := &File{cache: c, source: source, size: size, flights: map[int64]*flight{}}
	var err error
	if f.disk, err = openBlocks(c.path(identity, blocksEnding), f.blocks()); err != nil {
		c.fail(err)
	}
	return f
}

// Size returns the number of bytes of the remote file.
func (f *File) Size() int64 { return f.size }

// Close closes the cache file. No other method may run during or after Close.
func (f *File) Close() error {
	if f.disk == nil {
		return nil
	}
	return f.disk.Close()
}

// blocks returns the number of blocks.
func (f *File) blocks() int64 { return (f.size + Block - 1) / Block }

// openBlocks opens the cache file of n blocks, or creates it.
func openBlocks(path string, n int64) (*os.File, error) {
	size := n*(Block+entrySize) + int64(len(trailer))
	for {
		disk, err := os.OpenFile(path, os.O_RDWR, 0)
		if err == nil {
			end := make([]byte, len(trailer))
			if info, err := disk.Stat(); err == nil && info.Size() == size {
				if _, err := disk.ReadAt(end, size-int64(len(end))); err == nil && string(end) == trailer {
					return disk, nil
				}
			}
			disk.Close()
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // damaged
				return nil, err
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err := createBlocks(path, size); err != nil {
			return nil, err
		}
	}
}

// createBlocks creates a cache file without blocks, unless another process is faster.
func createBlocks(path string, size int64) error {
	disk, err := os.CreateTemp(filepath.Dir(path), "*"+tempEnding)
	if err != nil {
		return err
	}
	defer os.Remove(disk.Name())
	_, err = disk.WriteAt([]byte(trailer), size-int64(len(trailer)))
	if err = errors.Join(err, disk.Close()); err != nil {
		return err
	}
	if err := os.Link(disk.Name(), path); err == nil || errors.Is(err, fs.ErrExist) {
		return nil
	}
	return os.Rename(disk.Name(), path) // a file system without links; a file of another process becomes invisible
}

// A run is the blocks [from, end).
type run struct{ from, end int64 }

// ReadBlocks fills p with blocks of the remote file, from the block with the given number on. p
// ends at the end of a block. Blocks that the cache has are read from it, the others are fetched.
func (f *File) ReadBlocks(ctx context.Context, p []byte, first int64) error {
	end := first*Block + int64(len(p))
	if first < 0 || end > f.size || end%Block != 0 && end != f.size {
		return fmt.Errorf("bytes %d to %d are not blocks of a file of %d bytes", first*Block, end, f.size)
	}
	for _, r := range f.load(p, first) {
		if err := f.fetch(ctx, f.part(p, first, r), r.from); err != nil {
			return err
		}
	}
	return nil
}

// Fetch adds the blocks of the bytes [from, end) to the cache. It does not read blocks that the
// cache has, and it does not wait for blocks that another goroutine fetches, so it costs little to
// call it again.
func (f *File) Fetch(ctx context.Context, from, end int64) error {
	if f.disk == nil {
		return nil // the cache cannot keep the blocks
	}
	first, last := from/Block, (min(end, f.size)+Block-1)/Block
	entries := f.entries(first, last-first)
	for r := range requests(first, last, presentIn(entries, first)) {
		for at := r.from; at < r.end; {
			n, _ := f.begin(at, r.end-at)
			if n == 0 {
				at++
				continue
			}
			err := f.fetchAhead(ctx, run{at, at + n})
			f.release(at, n)
			if err != nil {
				return err
			}
			at += n
		}
	}
	return nil
}

// fetchAhead fetches blocks that this goroutine has marked.
func (f *File) fetchAhead(ctx context.Context, r run) error {
	part, err := f.cache.borrow(ctx, min(r.end*Block, f.size)-r.from*Block)
	if err != nil {
		return err
	}
	defer func() { f.cache.buffers <- part }()
	return f.fetchClaimed(ctx, part, r.from)
}

// requests divides the absent blocks of [first, end) into requests of at most Longest bytes.
func requests(first, end int64, present func(block int64) bool) iter.Seq[run] {
	return func(yield func(run) bool) {
		for r, present := range runs(first, end, present) {
			for ; !present && r.from < r.end; r.from += Longest / Block {
				if !yield(run{r.from, min(r.end, r.from+Longest/Block)}) {
					return
				}
			}
		}
	}
}

// entries returns the entries of n blocks from first, with zeros if they cannot be read.
func (f *File) entries(first, n int64) []byte {
	entries := make([]byte, n*entrySize)
	if f.disk == nil {
		return entries
	}
	if _, err := f.disk.ReadAt(entries, f.entry(first)); err != nil {
		clear(entries)
	}
	return entries
}

// presentIn returns a function that reports whether a block is present, from the entries of the
// blocks from first.
func presentIn(entries []byte, first int64) func(block int64) bool {
	return func(block int64) bool { return binary.LittleEndian.Uint64(entries[(block-first)*entrySize:]) != 0 }
}

// runs divides the blocks [first, end) into the longest runs that are present, or absent.
func runs(first, end int64, present func(block int64) bool) iter.Seq2[run, bool] {
	return func(yield func(run, bool) bool) {
		for from := first; from < end; {
			is, to := present(from), from+1
			for to < end && present(to) == is {
				to++
			}
			if !yield(run{from, to}, is) {
				return
			}
			from = to
		}
	}
}

// joined appends a run to a list, or extends the last one.
func joined(list []run, r run) []run {
	if k := len(list); k > 0 && list[k-1].end == r.from {
		list[k-1].end = r.end
		return list
	}
	return append(list, r)
}

// part returns the part of p that has the blocks of a run. p starts with block first.
func (f *File) part(p []byte, first int64, r run) []byte {
	return p[(r.from-first)*Block : min((r.end-first)*Block, int64(len(p)))]
}

// load reads the blocks of p that the cache has, and returns the runs of the others.
func (f *File) load(p []byte, first int64) (absent []run) {
	n := (int64(len(p)) + Block - 1) / Block
	entries := f.entries(first, n)
	now := f.cache.now()
	for r, present := range runs(first, first+n, presentIn(entries, first)) {
		if present {
			_, err := f.disk.ReadAt(f.part(p, first, r), r.from*Block)
			present = err == nil
		}
		if !present {
			absent = joined(absent, r)
			continue
		}
		stale := false
		for b := r.from; b < r.end; b++ {
			entry := entries[(b-first)*entrySize:]
			if crc32.Checksum(f.part(p, first, run{b, b + 1}), castagnoli) != binary.LittleEndian.Uint32(entry) {
				absent = joined(absent, run{b, b + 1})
			} else if binary.LittleEndian.Uint32(entry[4:])+refresh < now {
				binary.LittleEndian.PutUint32(entry[4:], now)
				stale = true
			}
		}
		if stale { // An error, or an entry that changes meanwhile, costs a fetch later.
			_, _ = f.disk.WriteAt(entries[(r.from-first)*entrySize:(r.end-first)*entrySize], f.entry(r.from))
		}
	}
	return absent
}

// entry returns the offset of a block's entry in the cache file.
func (f *File) entry(block int64) int64 { return f.blocks()*Block + block*entrySize }

// fetch fills p with blocks from the source and adds them to the cache. Blocks that another
// goroutine fetches at the same time are fetched once.
func (f *File) fetch(ctx context.Context, p []byte, first int64) error {
	for len(p) > 0 {
		n, other := f.begin(first, min(int64(len(p)+Block-1)/Block, Longest/Block))
		if n == 0 {
			if err := other.wait(ctx); err != nil {
				return err
			}
			block := p[:min(Block, len(p))]
			if len(f.load(block, first)) > 0 {
				continue // the other goroutine failed, or the block could not be stored
			}
			p, first = p[len(block):], first+1
			continue
		}
		part := p[:min(n*Block, int64(len(p)))]
		err := f.fetchClaimed(ctx, part, first)
		f.release(first, n)
		if err != nil {
			return err
		}
		p, first = p[len(part):], first+n
	}
	return nil
}

// fetchClaimed fetches the blocks of p that no other goroutine or process has added since they were
// claimed. Other processes fetch none of them meanwhile.
func (f *File) fetchClaimed(ctx context.Context, p []byte, first int64) error {
	n := (int64(len(p)) + Block - 1) / Block
	defer f.cache.claim(ctx, f.disk, f.entry(first), n*entrySize, int64(len(p)))()
	for _, r := range f.load(p, first) {
		part := f.part(p, first, r)
		if err := f.cache.get(ctx, f.source, part, r.from*Block); err != nil {
			return err
		}
		f.store(part, r.from)
	}
	return nil
}

// begin marks up to n blocks from first as being fetched, until the first that another goroutine
// fetches. If this is block first, it returns 0 and the other goroutine's flight.
func (f *File) begin(first, n int64) (claimed int64, other *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	mine := &flight{make(chan struct{})}
	for claimed < n {
		if other = f.flights[first+claimed]; other != nil {
			break
		}
		f.flights[first+claimed] = mine
		claimed++
	}
	return claimed, other
}

// release ends a flight of n blocks.
func (f *File) release(first, n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.flights[first].done)
	for b := first; b < first+n; b++ {
		delete(f.flights, b)
	}
}

// store adds blocks to the cache. If the folder is full, they are not added.
func (f *File) store(p []byte, first int64) {
	if f.disk == nil {
		return
	}
	now := f.cache.now()
	var entries []byte
	for at := 0; at < len(p); at += Block {
		sum := crc32.Checksum(p[at:min(at+Block, len(p))], castagnoli)
		entries = binary.LittleEndian.AppendUint32(entries, sum)
		entries = binary.LittleEndian.AppendUint32(entries, now)
	}
	_, err := f.disk.WriteAt(p, first*Block)
	if err == nil {
		_, err = f.disk.WriteAt(entries, f.entry(first))
	}
	if err != nil {
		f.cache.fail(err)
	}
	f.cache.wrote(int64(len(p)))
}
