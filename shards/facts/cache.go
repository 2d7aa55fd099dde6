// Package facts caches facts about shards between runs: their counts and hashes, and when their
// files were last verified.
package facts

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"mula/internal/locks"
	"mula/internal/objects"
	"mula/internal/usercache"
	"mula/shards"
)

// Facts describe a shard without its tokens and documents.
type Facts struct {
	DType             shards.DType
	Tokens, Documents int64
	Manifest          bool      // the shard has a manifest
	Tokenizer         Tokenizer // from the manifest; zero if it is missing or has no hash of a tokenizer
	Bin, Index        string    // SHA-256, from the manifest or by reading the files; "" if unknown
}

// A Tokenizer identifies the tokenizer of a shard.
type Tokenizer struct {
	SHA256     string // of tokenizer.json, in hexadecimal
	Vocabulary int    // highest id + 1
	EOD        int64  // end-of-document id, -1 without one
}

// Of returns the facts of an open shard.
func Of(s *shards.Shard) Facts {
	f := Facts{DType: s.DType(), Tokens: s.Tokens(), Documents: s.Documents()}
	if m := s.Manifest(); m != nil {
		f.Manifest = true
		f.Bin, f.Index = m.Files["bin"].SHA256, m.Files["idx"].SHA256
		if t := m.Tokenizer; t.SHA256 != "" { // the cache keeps no others
			f.Tokenizer = Tokenizer{t.SHA256, t.VocabSize, t.EOD}
		}
	}
	return f
}

// A stamp identifies a file's content without reading the file. The zero stamp means that the file
// does not exist.
type stamp struct {
	size, changed int64 // bytes; nanoseconds since 1970
	inode         uint64
}

// Stamps are the stamps of .bin, .idx and .json.
type Stamps [3]stamp

// Settled is the age from which the modification time of a shard identifies its content. A file
// that changes twice within the resolution of the file system's clock may keep its time.
const Settled = 2 * time.Second

func stampOf(info fs.FileInfo) (s stamp, ok bool) {
	if !info.Mode().IsRegular() || time.Since(info.ModTime()) < Settled {
		return stamp{}, false
	}
	return stamp{info.Size(), info.ModTime().UnixNano(), inode(info)}, true
}

// FileStamps returns the stamp of a file that is not part of a shard. ok is false if the file
// cannot be read, or is not settled.
func FileStamps(path string) (s Stamps, ok bool) {
	info, err := os.Stat(path)
	if err != nil {
		return s, false
	}
	s[0], ok = stampOf(info)
	return s, ok
}

// SameFiles reports whether the stamps belong to the same files, possibly with changed content.
func (s Stamps) SameFiles(other Stamps) bool {
	for i := range s {
		if s[i].inode != other[i].inode {
			return false
		}
	}
	return true
}

// StampsOf returns the stamps of a shard's files. ok is false if a file cannot be read, is not
// settled, or is in an object store.
func StampsOf(prefix string) (s Stamps, ok bool) {
	if objects.IsURL(prefix) {
		return s, false // opening a shard is as fast as reading the versions of its objects
	}
	for i, ending := range []string{".bin", ".idx", ".json"} {
		info, err := os.Stat(prefix + ending)
		if errors.Is(err, fs.ErrNotExist) && ending == ".json" {
			continue
		}
		if err != nil {
			return s, false
		}
		if s[i], ok = stampOf(info); !ok {
			return s, false
		}
	}
	return s, true
}

// A Cache keeps the facts of shards between runs, so that a plan over thousands of shards opens
// without opening each shard. It has one page, a file in the user's cache directory, for each
// directory of shards. If the cache cannot be read, written or trusted, the shards are opened
// instead. A fact is valid while the stamps of the shard's files are unchanged. Concurrent
// processes merge their entries.
//
// The cache also records when files were last verified. A file that is not part of a shard has an
// entry with one stamp and no facts.
type Cache struct {
	root string // directory of the pages; "" disables the cache

	mu    sync.Mutex
	pages map[string]*page // by directory
}

type page struct {
	entries map[string]entry // by the base name of the prefix
	used    map[string]bool  // in this run
	noted   map[string]bool  // in this run, not yet written
}

type entry struct {
	Stamps
	verified int64 // when all bytes last matched the hashes, in nanoseconds since 1970; 0: never
	Facts
	indexed bool // the .idx matched the manifest's hash
}

// verifiedFor is the time for which a verified file is not verified again.
const verifiedFor = 7 * 24 * time.Hour

// Limits of the cache on disk.
const (
	maxPageEntries = 1 << 16
	maxPageBytes   = 64 << 20
	maxCacheBytes  = 256 << 20 // beyond it, the oldest pages are removed
)

// pageMagic starts a page, and contains the version of its layout.
const pageMagic = "mula shards 2\n"

// Open opens the cache in the user's cache directory. Close it to write its new entries.
func Open() *Cache {
	c := &Cache{pages: map[string]*page{}}
	if dir, err := usercache.Folder("shards"); err == nil {
		c.root = dir
	}
	return c
}

// page returns the page of a directory. The cache must be locked.
func (c *Cache) page(dir string) *page {
	if p := c.pages[dir]; p != nil {
		return p
	}
	p := &page{entries: map[string]entry{}, used: map[string]bool{}, noted: map[string]bool{}}
	if c.root != "" {
		if data, err := readBounded(c.path(dir), maxPageBytes); err == nil {
			p.parse(data, dir)
		}
	}
	c.pages[dir] = p
	return p
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("%s is not a file of at most %d bytes", path, limit)
	}
	data := make([]byte, info.Size())
	_, err = io.ReadFull(f, data)
	return data, err
}

// path returns the path of a directory's page.
func (c *Cache) path(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return filepath.Join(c.root, hex.EncodeToString(sum[:16]))
}

// Find returns the facts of a shard if they are valid for its current files. Otherwise it returns
// the stamps of the files, for [Cache.Note].
func (c *Cache) Find(prefix string) (f Facts, s Stamps, ok bool) {
	s, trusted := StampsOf(prefix)
	if !trusted {
		return Facts{}, Stamps{}, false
	}
	dir, name := filepath.Split(prefix)
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.page(dir)
	e, ok := p.entries[name]
	if !ok || e.Stamps != s {
		return Facts{}, s, false
	}
	p.used[name] = true
	return e.Facts, s, true
}

// Note stores facts that were found after the stamps were taken, if the stamps are unchanged.
func (c *Cache) Note(prefix string, f Facts, before Stamps) {
	if now, ok := StampsOf(prefix); !ok || now != before {
		return
	}
	dir, name := filepath.Split(prefix)
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.page(dir)
	e := p.entries[name]
	p.note(name, entry{before, e.since(before), f, e.indexed && e.Stamps == before})
}

func (p *page) note(name string, e entry) {
	p.entries[name], p.used[name], p.noted[name] = e, true, true
}

// since returns when the file with these stamps was verified.
func (e entry) since(s Stamps) int64 {
	if e.Stamps != s {
		return 0
	}
	return e.verified
}

// VerifiedAt reports whether a shard (by its prefix) or another file (by its path) was verified
// recently. s are its stamps.
func (c *Cache) VerifiedAt(path string, s Stamps) bool {
	dir, name := filepath.Split(path)
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.page(dir)
	ago := time.Since(time.Unix(0, p.entries[name].since(s)))
	if ago < 0 || ago > verifiedFor {
		return false
	}
	p.used[name] = true
	return true
}

// NoteVerified records that a shard or another file with these stamps and facts has been verified.
func (c *Cache) NoteVerified(path string, s Stamps, f Facts) {
	dir, name := filepath.Split(path)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.page(dir).note(name, entry{s, time.Now().UnixNano(), f, f.Manifest})
}

// IndexVerified reports whether the .idx of a shard with these stamps matched the manifest's hash.
func (c *Cache) IndexVerified(prefix string, s Stamps) bool {
	dir, name := filepath.Split(prefix)
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.page(dir).entries[name]
	return e.indexed && e.Stamps == s
}

// NoteIndex records that the .idx of a shard matches the manifest's hash. The stamps must have been
// taken before the .idx was read.
func (c *Cache) NoteIndex(prefix string, f Facts, before Stamps) {
	if now, ok := StampsOf(prefix); !ok || now != before {
		return
	}
	dir, name := filepath.Split(prefix)
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.page(dir)
	p.note(name, entry{before, p.entries[name].since(before), f, true})
}

// Close merges the new entries into the pages and writes them. Entries that cannot be written are
// lost, and are found again next time.
func (c *Cache) Close() {
	if c.root == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var done func()
	for dir, p := range c.pages {
		if len(p.noted) == 0 {
			continue
		}
		if done == nil {
			if os.MkdirAll(c.root, 0o700) != nil {
				return
			}
			done = locks.Alone(c.root)
			defer done()
		}
		if data, err := readBounded(c.path(dir), maxPageBytes); err == nil {
			p.merge(data, dir)
		}
		_ = replaceFile(c.path(dir), p.text(dir)) // a full disk must not fail the command
		clear(p.noted)
	}
	if done != nil {
		c.prune()
	}
}

// merge adds the entries that other processes have written, except for entries that were noted
// here.
func (p *page) merge(data []byte, dir string) {
	others := &page{entries: map[string]entry{}}
	others.parse(data, dir)
	for name, e := range others.entries {
		mine, known := p.entries[name]
		if known && p.noted[name] {
			mine.verified = max(mine.verified, e.since(mine.Stamps))
			mine.indexed = mine.indexed || e.indexed && e.Stamps == mine.Stamps
			e = mine
		}
		p.entries[name] = e
	}
}

// replaceFile replaces a file without waiting for the disk, unlike atomicfile. The checksum of a
// page detects a partial write after a crash.
func replaceFile(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".page-*.tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// prune removes the oldest pages if the cache is too large.
func (c *Cache) prune() {
	list, err := os.ReadDir(c.root)
	if err != nil {
		return
	}
	var files []fs.FileInfo
	var total int64
	for _, e := range list {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			files = append(files, info)
			total += info.Size()
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, f := range files {
		if total <= maxCacheBytes {
			return
		}
		if os.Remove(filepath.Join(c.root, f.Name())) == nil {
			total -= f.Size()
		}
	}
}

// The layout of a page: pageMagic; the directory, after its length (u16); the number of entries
// (u32); the entries; the CRC-32 (IEEE) of everything before. The layout of an entry: the name,
// after its length (u16); size, modification time (i64) and inode (u64) of each of the three files;
// time of verification (i64); tokens, documents (i64); element type, flags (u8); the fields that
// the flags announce. Numbers are little-endian.
const (
	hasManifest  = 1 << iota
	hasTokenizer // SHA-256 (32 bytes), highest id + 1, end-of-document id (i64)
	hasHashes    // SHA-256 of .bin and .idx, 32 bytes each
	hasIndex     // the .idx matched the manifest's hash; has no field
)

func (p *page) text(dir string) []byte {
	names := make([]string, 0, len(p.entries))
	for name := range p.entries {
		if len(p.entries) <= maxPageEntries || p.used[name] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	names = names[:min(len(names), maxPageEntries)]
	le := binary.LittleEndian
	b := []byte(pageMagic)
	b = append(le.AppendUint16(b, uint16(len(dir))), dir...)
	b = le.AppendUint32(b, uint32(len(names)))
	for _, name := range names {
		e := p.entries[name]
		b = append(le.AppendUint16(b, uint16(len(name))), name...)
		for _, s := range e.Stamps {
			b = le.AppendUint64(le.AppendUint64(le.AppendUint64(b, uint64(s.size)), uint64(s.changed)), s.inode)
		}
		b = le.AppendUint64(b, uint64(e.verified))
		b = le.AppendUint64(le.AppendUint64(b, uint64(e.Tokens)), uint64(e.Documents))
		at := len(b) + 1
		b = append(b, e.DType.Code(), 0)
		if e.Manifest {
			b[at] |= hasManifest
		}
		if len(e.Tokenizer.SHA256) == 64 {
			b[at] |= hasTokenizer
			b, _ = hex.AppendDecode(b, []byte(e.Tokenizer.SHA256))
			b = le.AppendUint64(le.AppendUint64(b, uint64(e.Tokenizer.Vocabulary)), uint64(e.Tokenizer.EOD))
		}
		if e.Bin != "" && e.Index != "" {
			b[at] |= hasHashes
			b, _ = hex.AppendDecode(b, []byte(e.Bin))
			b, _ = hex.AppendDecode(b, []byte(e.Index))
		}
		if e.indexed {
			b[at] |= hasIndex
		}
	}
	return le.AppendUint32(b, crc32.ChecksumIEEE(b))
}

// parse adds the entries of a page. It adds none if the page is damaged or belongs to another
// directory.
func (p *page) parse(data []byte, dir string) {
	le := binary.LittleEndian
	if len(data) < 4 || crc32.ChecksumIEEE(data[:len(data)-4]) != le.Uint32(data[len(data)-4:]) {
		return
	}
	data = data[:len(data)-4]
	take := func(n int) []byte { // nil beyond the end
		if n > len(data) {
			data = nil
			return nil
		}
		b := data[:n]
		data = data[n:]
		return b
	}
	number := func() int64 {
		if b := take(8); b != nil {
			return int64(le.Uint64(b))
		}
		return 0
	}
	text := func() string {
		if b := take(2); b != nil {
			return string(take(int(le.Uint16(b))))
		}
		return ""
	}
	if !bytes.Equal(take(len(pageMagic)), []byte(pageMagic)) || text() != dir {
		return
	}
	count := take(4)
	if count == nil {
		return
	}
	for range min(le.Uint32(count), maxPageEntries) {
		name := text()
		var e entry
		for i := range e.Stamps {
			e.Stamps[i] = stamp{number(), number(), uint64(number())}
		}
		e.verified = number()
		e.Tokens, e.Documents = number(), number()
		kind := take(2)
		if kind == nil {
			return
		}
		e.DType, e.Manifest, e.indexed = shards.DTypeOf(kind[0]), kind[1]&hasManifest != 0, kind[1]&hasIndex != 0
		if kind[1]&hasTokenizer != 0 {
			e.Tokenizer = Tokenizer{hex.EncodeToString(take(32)), int(number()), number()}
		}
		if kind[1]&hasHashes != 0 {
			e.Bin, e.Index = hex.EncodeToString(take(32)), hex.EncodeToString(take(32))
		}
		if data == nil || name == "" {
			return // truncated despite a valid checksum: written by another version
		}
		p.entries[name] = e
	}
}

// lookers is the number of shards that are examined concurrently. Most of the time is spent waiting
// for the file system, which may be remote.
const lookers = 128

// Survey returns the facts of n shards, from the cache or by opening them. path returns the
// absolute prefix of a shard; survey calls it from several goroutines. If shards cannot be opened,
// survey returns the error of the first, and its number as failed. If ctx is cancelled, failed is
// -1.
func (c *Cache) Survey(ctx context.Context, n int, path func(i int) (string, error)) (found []Facts, failed int,
	err error) {
	found = make([]Facts, n)
	errs := make([]error, n)
	batch := min(16, n/lookers+1) // shards for one goroutine
	var mu sync.Mutex
	refused := false // start no further batch; earlier batches have all started
	var g errgroup.Group
	g.SetLimit(lookers)
	for first := 0; first < n; first += batch {
		mu.Lock()
		stop := refused
		mu.Unlock()
		if stop || ctx.Err() != nil {
			break
		}
		g.Go(func() error {
			for i := first; i < min(first+batch, n); i++ {
				if ctx.Err() != nil {
					return nil
				}
				prefix, err := path(i)
				if err == nil {
					found[i], err = c.look(ctx, prefix)
				}
				if errs[i] = err; err != nil {
					mu.Lock()
					refused = true
					mu.Unlock()
					return nil
				}
			}
			return nil
		})
	}
	g.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, -1, err
	}
	for i, err := range errs {
		if err != nil {
			return nil, i, err
		}
	}
	return found, -1, nil
}

// look returns the facts of one shard.
func (c *Cache) look(ctx context.Context, prefix string) (Facts, error) {
	f, before, ok := c.Find(prefix)
	if ok {
		return f, nil
	}
	s, err := shards.OpenContext(ctx, prefix)
	if err != nil {
		return f, err
	}
	defer s.Close()
	f = Of(s)
	if before != (Stamps{}) {
		c.Note(prefix, f, before)
	}
	return f, nil
}
