package shards

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"iter"
	"math/bits"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"mula/internal/mapping"
)

// The layout of x.sums: the header, a sum for each block of x.bin, and a sum of all preceding
// bytes. Sums are CRC-32C (Castagnoli). They detect every error burst of up to 32 bits, and all but
// one in 2^32 of other errors.
const (
	sumsMagic      = "MULASUMS"
	sumsVersion    = 1
	sumsHeaderSize = 24
	sumsBlock      = 1 << 14 // bytes of x.bin in a block; the last block may be shorter
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encodeSums returns the bytes of x.sums for an x.bin of binBytes bytes.
func encodeSums(binBytes int64, sums []uint32) []byte {
	le := binary.LittleEndian
	out := make([]byte, 0, sumsHeaderSize+4*len(sums)+4)
	out = append(out, sumsMagic...)
	out = le.AppendUint32(out, sumsVersion)
	out = le.AppendUint32(out, sumsBlock)
	out = le.AppendUint64(out, uint64(binBytes))
	for _, sum := range sums {
		out = le.AppendUint32(out, sum)
	}
	return le.AppendUint32(out, crc32.Checksum(out, castagnoli))
}

// blockSums are the sums of a file of ids, which is x.bin or a file of another layout, and the
// state of its blocks. It is safe for concurrent use.
type blockSums struct {
	path  string // of the file of sums
	file  mapping.File
	part  []byte // the part of file for this file of ids, from the header to the final sum
	sums  []byte // u32 each
	block int64  // bytes

	// a block is compared again if its comparison is older than this; 0: never; below 0: always
	again time.Duration
	now   func() time.Time               // for tests; nil is time.Now
	known atomic.Pointer[comparedBlocks] // nil before the first read
}

// comparedBlocks are the blocks that matched their sums in a period.
type comparedBlocks struct {
	since time.Time
	good  []atomic.Uint64 // one bit for each block
}

// openSums maps a file with the sums of one or more files of ids, whose sizes are idBytes. It
// returns nil if the file does not exist. It checks only the headers: the sums themselves are
// checked when one differs. Call it inside [mapping.Guard].
func openSums(path string, idBytes ...int64) (all []*blockSums, err error) {
	file, err := mapping.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	return parseSums(path, file, idBytes...)
}

// parseSums is openSums for a mapped file, which it closes after an error. path is its name in
// messages.
func parseSums(path string, file mapping.File, idBytes ...int64) (all []*blockSums, err error) {
	at := int64(0)
	for _, n := range idBytes {
		c := &blockSums{path: path, file: file}
		if err = c.parse(at, n); err != nil {
			break
		}
		at += int64(len(c.part))
		all = append(all, c)
	}
	if size := int64(len(file.Data)); err == nil && size != at {
		err = fmt.Errorf("file has %d bytes, but the sums of the ids need %d", size, at)
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("%s: %w; restore it, or remove it to read tokens without checking their sums: %w",
			path, err, ErrCorrupt)
	}
	file.Scattered()
	return all, nil
}

// parse finds the part for a file of ids, which starts at byte at, and checks its header.
func (c *blockSums) parse(at, idBytes int64) error {
	le, data := binary.LittleEndian, c.file.Data[at:]
	if len(data) < sumsHeaderSize+4 || !bytes.HasPrefix(data, []byte(sumsMagic)) {
		return fmt.Errorf("no header of sums at byte %[2]d (%[1]d bytes are left)", len(data), at)
	}
	if v := le.Uint32(data[8:]); v != sumsVersion {
		return fmt.Errorf("version %d (byte %d) is not supported; want version %d", v, at+8, sumsVersion)
	}
	c.block = int64(le.Uint32(data[12:]))
	if bits.OnesCount64(uint64(c.block)) != 1 || c.block < 1<<9 {
		return fmt.Errorf("block size %d (byte %d) must be a power of two of at least 512", c.block, at+12)
	}
	if of := le.Uint64(data[16:]); of != uint64(idBytes) {
		return fmt.Errorf("sums are for %d bytes (byte %d), but the file of ids has %d", of, at+16, idBytes)
	}
	want := sumsHeaderSize + 4*c.blocks(idBytes) + 4
	if want > int64(len(data)) {
		return fmt.Errorf("file has %d bytes, but %d are needed for the sums of %d bytes of ids", len(c.file.Data),
			at+want, idBytes)
	}
	c.part = data[:want]
	c.sums = data[sumsHeaderSize : want-4]
	return nil
}

// blocks returns the number of blocks of binBytes bytes.
func (c *blockSums) blocks(binBytes int64) int64 { return (binBytes + c.block - 1) / c.block }

// check compares the blocks of the bytes [from, end) of bin with their sums, except blocks that
// were compared recently. It returns the first block that differs, or -1.
func (c *blockSums) check(bin []byte, from, end int64) int64 {
	good := c.compared(int64(len(bin))).good
	for b := from / c.block; b*c.block < end; b++ {
		word, bit := &good[b/64], uint64(1)<<(b%64)
		if word.Load()&bit != 0 && c.again >= 0 {
			continue
		}
		if !c.right(bin, b) {
			return b
		}
		word.Or(bit)
	}
	return -1
}

// compared returns the blocks that need not be compared again. They are all forgotten at the end of
// a period, so that no time is stored for each block.
func (c *blockSums) compared(binBytes int64) *comparedBlocks {
	known := c.known.Load()
	if known != nil && c.again <= 0 {
		return known
	}
	clock := c.now
	if clock == nil {
		clock = time.Now
	}
	now := clock()
	if known != nil && now.Sub(known.since) < c.again {
		return known
	}
	next := &comparedBlocks{now, make([]atomic.Uint64, (c.blocks(binBytes)+63)/64)}
	if !c.known.CompareAndSwap(known, next) { // another goroutine was faster
		return c.known.Load()
	}
	return next
}

// right reports whether a block of bin matches its sum.
func (c *blockSums) right(bin []byte, block int64) bool {
	start := block * c.block
	return c.matches(bin[start:min(start+c.block, int64(len(bin)))], block)
}

// matches reports whether data matches the sum of a block.
func (c *blockSums) matches(data []byte, block int64) bool {
	return crc32.Checksum(data, castagnoli) == binary.LittleEndian.Uint32(c.sums[4*block:])
}

// doubt returns an error if the sums themselves are damaged or do not match the manifest.
func (c *blockSums) doubt(want FileInfo) error {
	last := len(c.part) - 4
	if crc32.Checksum(c.part[:last], castagnoli) != binary.LittleEndian.Uint32(c.part[last:]) {
		return fmt.Errorf("%s is damaged itself; restore it, or remove it to read tokens without checking their "+
			"sums: %w",
			c.path, ErrCorrupt)
	}
	if sum := sha256.Sum256(c.file.Data); hex.EncodeToString(sum[:]) != want.SHA256 {
		return fmt.Errorf("%s has SHA-256 %x, but the manifest has %s; restore the shard or write it again: %w", c.path,
			sum,
			want.SHA256, ErrCorrupt)
	}
	return nil
}

func (c *blockSums) close() error {
	c.part, c.sums = nil, nil
	return c.file.Close()
}

// A DamageError lists the damaged blocks of a file of ids (x.bin, or a file of another layout) and
// the documents that have bytes in them. It wraps [ErrCorrupt].
type DamageError struct {
	Path      string     // of the file of ids
	Blocks    []ByteSpan // blocks that differ from their sums, in order; adjacent blocks are joined
	Documents []int64    // numbers of the first 1,000 documents with bytes in Blocks, in order
	More      int64      // number of further documents

	why string // the start of the message
	ids string // the first documents, with ids and origins
}

// A ByteSpan is the byte range [First, End) of a file.
type ByteSpan struct{ First, End int64 }

const (
	maxDamaged = 1000 // documents in DamageError.Documents
	maxNamed   = 8    // documents and byte spans in the message
)

func (e *DamageError) Unwrap() error { return ErrCorrupt }

func (e *DamageError) Error() string {
	var spans []string
	for _, b := range e.Blocks[:min(len(e.Blocks), maxNamed)] {
		spans = append(spans, fmt.Sprintf("%d to %d", b.First, b.End-1))
	}
	if more := len(e.Blocks) - len(spans); more > 0 {
		spans = append(spans, fmt.Sprintf("%d more ranges", more))
	}
	return fmt.Sprintf("%s: %sbytes %s are damaged, in %s; restore the file or write the shard again: %v",
		e.Path, e.why, strings.Join(spans, ", "), e.ids, ErrCorrupt)
}

// damage returns the error about blocks, in order, that differ from their sums.
func (s *Shard) damage(ctx context.Context, why string, blocks []int64) error {
	sums, err := s.blockSums(ctx)
	if err != nil {
		return err
	}
	if err := sums.doubt(s.manifest.Files["sums"]); err != nil {
		return err
	}
	e := &DamageError{Path: s.prefix + binExt, why: why}
	size, last := int64(s.DType().Size()), int64(-1)
	for _, b := range blocks {
		span := ByteSpan{b * sums.block, min((b+1)*sums.block, s.binBytes())}
		e.addBlock(span)
		for doc, err := range s.Spans(span.First/size, span.End/size) {
			if err != nil { // then x.idx is damaged as well
				e.ids = fmt.Sprintf("unknown documents: %v", err)
				return e
			}
			if doc.Document == last {
				continue
			}
			last = doc.Document
			e.addDocument(last)
		}
	}
	origins, err := s.DocumentIDs(ctx)
	var names []string
	for _, d := range e.Documents[:min(len(e.Documents), maxNamed)] {
		var o DocumentOrigin
		if err == nil {
			o, _ = origins.Origin(d) // without an origin, the message has only the number
		}
		names = append(names, nameDocument(d, o))
	}
	e.ids = e.listDocuments(names, last)
	return e
}

// addBlock adds a block that follows the blocks before.
func (e *DamageError) addBlock(span ByteSpan) {
	if n := len(e.Blocks); n > 0 && e.Blocks[n-1].End == span.First {
		e.Blocks[n-1].End = span.End
	} else {
		e.Blocks = append(e.Blocks, span)
	}
}

// addDocument adds a document that follows the documents before.
func (e *DamageError) addDocument(number int64) {
	if len(e.Documents) < maxDamaged {
		e.Documents = append(e.Documents, number)
	} else {
		e.More++
	}
}

// nameDocument formats a document for a message: its number and, if known, its id and origin.
func nameDocument(number int64, o DocumentOrigin) string {
	if o == (DocumentOrigin{}) {
		return fmt.Sprintf("%d", number)
	}
	return fmt.Sprintf("%d (%q, %s:%d)", number, o.ID, o.File, o.Line)
}

// listDocuments lists the damaged documents for a message. names are the names of the first
// documents; last is the number of the last document.
func (e *DamageError) listDocuments(names []string, last int64) string {
	if len(names) == 0 {
		return "no document"
	}
	if rest := int64(len(e.Documents)-len(names)) + e.More; rest > 0 {
		names = append(names, fmt.Sprintf("%d more up to document %d", rest, last))
	}
	what := "document "
	if len(names) > 1 {
		what = "documents "
	}
	return what + strings.Join(names, ", ")
}

// An IDFile is a file of ids while it is written. It computes the sum of each block.
type IDFile struct {
	out   *bufio.Writer
	block []byte // the bytes of the incomplete block
	bytes int64  // of the complete blocks
	sums  []uint32
}

// Append writes ids as elements of type t.
func (f *IDFile) Append(ids []uint32, t DType) error {
	size := t.Size()
	for len(ids) > 0 {
		start := len(f.block)
		part := ids[:min(len(ids), (sumsBlock-start)/size)]
		if len(part) == 0 { // the element is in two blocks
			var element [8]byte
			t.encode(element[:size], ids[:1])
			if _, err := f.Write(element[:size]); err != nil {
				return err
			}
			ids = ids[1:]
			continue
		}
		ids = ids[len(part):]
		f.block = f.block[:start+len(part)*size]
		t.encode(f.block[start:], part)
		if len(f.block) == sumsBlock {
			if err := f.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Write writes bytes of the file that are not ids, or are ids already encoded.
func (f *IDFile) Write(p []byte) (n int, err error) {
	for n < len(p) {
		part := p[n:min(len(p), n+sumsBlock-len(f.block))]
		f.block = append(f.block, part...)
		n += len(part)
		if len(f.block) == sumsBlock {
			if err := f.flush(); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// flush writes the block, full or the last one.
func (f *IDFile) flush() error {
	if len(f.block) == 0 {
		return nil
	}
	f.sums = append(f.sums, crc32.Checksum(f.block, castagnoli))
	f.bytes += int64(len(f.block))
	_, err := f.out.Write(f.block)
	f.block = f.block[:0]
	return err
}

// finish writes the last block and returns the bytes of the file of sums, or of its part for this
// file.
func (f *IDFile) finish() ([]byte, error) {
	if err := f.flush(); err != nil {
		return nil, err
	}
	return encodeSums(f.bytes, f.sums), nil
}

// Sums are the block sums of the files of ids of a shard in a layout other than Megatron's. The
// files are numbered from 0; most layouts have one.
type Sums struct {
	files []*blockSums
	want  FileInfo
}

// OpenSums opens the file of sums that m lists under name, for files of ids whose sizes are
// idBytes. It returns nil if m is nil or does not list the file, or if the file does not exist: ids
// are then not checked.
func OpenSums(path string, m *Manifest, name string, idBytes ...int64) (*Sums, error) {
	if m == nil || m.Files[name].SHA256 == "" || len(idBytes) == 0 {
		return nil, nil
	}
	var files []*blockSums
	err := mapping.Guard(func() (err error) {
		files, err = openSums(path, idBytes...)
		return err
	})
	if files == nil {
		return nil, err
	}
	return &Sums{files, m.Files[name]}, nil
}

// Close unmaps the file. No reader from [Sums.Reader] may be used afterwards.
func (s *Sums) Close() error { return s.files[0].close() } // all files share one mapping

// Reader returns a reader of a file of ids from its start. For a damaged block it returns an error
// for [Sums.Damage] instead of the bytes. Each Read reads and compares as many blocks as fit.
func (s *Sums) Reader(file int, ids io.ReaderAt, idBytes int64) io.Reader {
	return &summedReader{sums: s.files[file], ids: ids, size: idBytes}
}

// Check compares the blocks of the bytes [from, end) of a file of ids, which may be mapped, with
// their sums, except blocks that matched before. If a block differs, it returns an error for
// [Sums.Damage]. A nil Sums checks nothing.
func (s *Sums) Check(file int, ids []byte, from, end int64) error {
	if s == nil {
		return nil
	}
	block := int64(-1)
	err := mapping.Guard(func() error {
		block = s.files[file].check(ids, from, end)
		return nil
	})
	if err != nil {
		return err
	}
	if block < 0 {
		return nil
	}
	// there may be damage before that block
	whole := &summedReader{sums: s.files[file], ids: bytes.NewReader(ids), size: int64(len(ids))}
	return &blockError{whole, block}
}

type summedReader struct {
	sums  *blockSums
	ids   io.ReaderAt
	size  int64
	block int64  // the next block
	whole []byte // a buffer of one block, for a Read of less than a block
	left  []byte // the unread rest of whole
}

// A blockError reports that a block differs from its sum. All blocks before it match.
type blockError struct {
	*summedReader
	bad int64
}

func (e *blockError) Error() string {
	bad := e.span(e.bad)
	return fmt.Sprintf("bytes %d to %d are damaged", bad.First, bad.End-1)
}

func (e *blockError) Unwrap() error { return ErrCorrupt }

func (r *summedReader) span(block int64) ByteSpan {
	return ByteSpan{block * r.sums.block, min((block+1)*r.sums.block, r.size)}
}

func (r *summedReader) Read(p []byte) (int, error) {
	if len(r.left) == 0 {
		follows := r.span(r.block)
		if follows.First >= follows.End {
			return 0, io.EOF
		}
		to, size := p, int(follows.End-follows.First)
		if len(p) < size {
			r.whole = slices.Grow(r.whole[:0], size)[:size]
			to = r.whole
		}
		right := 0
		err := mapping.Guard(func() (err error) {
			right, err = r.next(to)
			return err
		})
		if err != nil {
			return 0, err
		}
		if right == 0 {
			return 0, &blockError{r, r.block}
		}
		if len(p) >= size {
			return right, nil
		}
		r.left = r.whole
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

// next reads the blocks that fit into to and advances past the blocks before the first damaged
// block. It returns the length of their bytes. Call it inside [mapping.Guard].
func (r *summedReader) next(to []byte) (right int, err error) {
	first, block := r.block*r.sums.block, r.sums.block
	if rest := r.size - first; rest <= int64(len(to)) {
		to = to[:rest]
	} else {
		to = to[:int64(len(to))/block*block]
	}
	if n, err := r.ids.ReadAt(to, first); n < len(to) {
		return 0, err
	}
	for right < len(to) {
		end := int(min(int64(right)+block, int64(len(to))))
		if crc32.Checksum(to[right:end], castagnoli) != binary.LittleEndian.Uint32(r.sums.sums[4*r.block:]) {
			break
		}
		r.block++
		right = end
	}
	return right, nil
}

// DocumentBytes are bytes of a file of ids that a document needs: its ids, or the entry of a table
// that locates them.
type DocumentBytes struct {
	Document int64 // its number in the shard
	Bytes    ByteSpan
}

// Damage converts an error of [Sums.Reader] or [Sums.Check] into a [DamageError] about the file of
// ids at path. It returns other errors unchanged. It searches the rest of the file for more damage.
// documents yields the bytes of the file that each document needs, in the order of documents. Data
// in a damaged block may be wrong, as long as its documents have bytes in that block. origin
// returns the origin of the document that was yielded last.
func (s *Sums) Damage(ctx context.Context, err error, path string, documents iter.Seq2[DocumentBytes, error],
	origin func(number int64) (DocumentOrigin, error)) error {
	var first *blockError
	if s == nil || !errors.As(err, &first) {
		return err
	}
	return mapping.Guard(func() error { return s.locate(ctx, first.summedReader, path, documents, origin) })
}

// locate implements Damage for the reader that found a damaged block.
func (s *Sums) locate(ctx context.Context, r *summedReader, path string, documents iter.Seq2[DocumentBytes, error],
	origin func(number int64) (DocumentOrigin, error)) error {
	e := &DamageError{Path: path}
	if err := r.sums.doubt(s.want); err != nil {
		return err
	}
	for block := make([]byte, min(r.sums.block, r.size)); r.block < r.sums.blocks(r.size); {
		if ctx.Err() != nil {
			return fmt.Errorf("reading %s: %w", path, context.Cause(ctx))
		}
		right, err := r.next(block)
		if err != nil {
			return fmt.Errorf("reading %s: %w", path, err)
		}
		if right == 0 {
			e.addBlock(r.span(r.block))
			r.block++
		}
	}
	var names []string
	last := int64(-1)
	for d, err := range documents {
		if err != nil {
			e.ids = fmt.Sprintf("unknown documents: %v", err)
			return e
		}
		if d.Document == last || !e.hits(d.Bytes) {
			continue
		}
		last = d.Document
		e.addDocument(last)
		if len(names) < maxNamed {
			o, _ := origin(last) // without an origin, the message has only the number
			names = append(names, nameDocument(last, o))
		}
	}
	e.ids = e.listDocuments(names, last)
	return e
}

// hits reports whether bytes of the span are damaged.
func (e *DamageError) hits(span ByteSpan) bool {
	i, _ := slices.BinarySearchFunc(e.Blocks, span.First, func(b ByteSpan, at int64) int {
		return cmp.Compare(b.End-1,
			at)
	})
	return span.First < span.End && i < len(e.Blocks) && e.Blocks[i].First < span.End
}
