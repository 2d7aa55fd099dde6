package shards

import (
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

// The layout of x.sums: the header, a sum for each block of x.bin, and the sum of all bytes before.
// Sums are CRC-32C (Castagnoli), which find every error within 32 bits and all but one in 2^32 of
// the others.
const (
	sumsMagic      = "MULASUMS"
	sumsVersion    = 1
	sumsHeaderSize = 24
	sumsBlock      = 1 << 14 // bytes of x.bin with a sum of their own; the last block has the rest
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encodeSums gives the bytes of x.sums for an x.bin of so many bytes.
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

// blockSums are the sums of a file of ids, x.bin or another layout's, and what is known of its
// blocks. It is safe for concurrent use.
type blockSums struct {
	path  string // of the file of sums
	file  mapping.File
	part  []byte // of file that is about this file of ids, from the header to the sum of all before
	sums  []byte // u32 each
	block int64  // bytes

	// a block that was compared so long ago is compared again when it is read; 0: never; below 0:
	// always
	again time.Duration
	now   func() time.Time               // for tests; nil is time.Now
	known atomic.Pointer[comparedBlocks] // nil before something is read
}

// comparedBlocks are the blocks that were found to have their sums in a period.
type comparedBlocks struct {
	since time.Time
	good  []atomic.Uint64 // a bit a block
}

// openSums maps a file of sums, that of files of ids with so many bytes each; without the file it
// gives nil. It looks at the headers only: the sums themselves are doubted when one differs. It is
// to be guarded.
func openSums(path string, idBytes ...int64) (all []*blockSums, err error) {
	file, err := mapping.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
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
		err = fmt.Errorf("it has %d bytes, not the %d that the sums of the ids take", size, at)
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("%s: %w: restore it, or remove it: tokens are then not compared with sums when they "+
			"are read: %w", path, err, ErrCorrupt)
	}
	file.Scattered()
	return all, nil
}

// parse finds the part about a file of ids, which begins at byte at, and looks at its header.
func (c *blockSums) parse(at, idBytes int64) error {
	le, data := binary.LittleEndian, c.file.Data[at:]
	if len(data) < sumsHeaderSize+4 || !bytes.HasPrefix(data, []byte(sumsMagic)) {
		return fmt.Errorf("its %d bytes from byte %d on do not begin with the header of sums", len(data), at)
	}
	if v := le.Uint32(data[8:]); v != sumsVersion {
		return fmt.Errorf("version %d (byte %d), only version %d is known", v, at+8, sumsVersion)
	}
	c.block = int64(le.Uint32(data[12:]))
	if bits.OnesCount64(uint64(c.block)) != 1 || c.block < 1<<9 {
		return fmt.Errorf("blocks of %d bytes (byte %d), not of a power of two from 512 on", c.block, at+12)
	}
	if of := le.Uint64(data[16:]); of != uint64(idBytes) {
		return fmt.Errorf("it has the sums of %d bytes (byte %d), the file of ids has %d", of, at+16, idBytes)
	}
	want := sumsHeaderSize + 4*c.blocks(idBytes) + 4
	if want > int64(len(data)) {
		return fmt.Errorf("it has %d bytes, not the %d that the sums up to those of %d bytes take", len(c.file.Data),
			at+want, idBytes)
	}
	c.part = data[:want]
	c.sums = data[sumsHeaderSize : want-4]
	return nil
}

// blocks is the number of blocks of so many bytes.
func (c *blockSums) blocks(binBytes int64) int64 { return (binBytes + c.block - 1) / c.block }

// check compares the blocks that hold the bytes [from, end) of bin with their sums, those that have
// not been found right lately, and gives the first that differs, or -1.
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

// compared gives the blocks that need not be compared again. They are forgotten together, at the
// end of a period: so a block is compared at most once in each, and no time is kept for each.
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

// right says whether a block has its sum.
func (c *blockSums) right(bin []byte, block int64) bool {
	start := block * c.block
	return crc32.Checksum(bin[start:min(start+c.block, int64(len(bin)))],
		castagnoli) == binary.LittleEndian.Uint32(c.sums[4*block:])
}

// doubt says why the sums are not to be believed, if they are not: they are not those that were
// written, or not the manifest's.
func (c *blockSums) doubt(want FileInfo) error {
	last := len(c.part) - 4
	if crc32.Checksum(c.part[:last], castagnoli) != binary.LittleEndian.Uint32(c.part[last:]) {
		return fmt.Errorf("%s is damaged itself: restore it, or remove it: tokens are then not compared with sums "+
			"when they are read: %w", c.path, ErrCorrupt)
	}
	if sum := sha256.Sum256(c.file.Data); hex.EncodeToString(sum[:]) != want.SHA256 {
		return fmt.Errorf("%s has SHA-256 %x, by the manifest %s: restore the shard or write it again: %w", c.path, sum,
			want.SHA256, ErrCorrupt)
	}
	return nil
}

func (c *blockSums) close() error {
	c.part, c.sums = nil, nil
	return c.file.Close()
}

// A DamageError says which bytes of a file of ids, x.bin or that of another layout, are not those
// that were written, and which documents have bytes there. It wraps [ErrCorrupt].
type DamageError struct {
	Path      string     // of the file of ids
	Blocks    []ByteSpan // that do not have their sums, neighbours joined, in order
	Documents []int64    // numbers of those that have bytes in Blocks, in order, the first 1,000 of them
	More      int64      // how many there are beyond Documents

	why string // what was found out, for the message
	ids string // the first documents with what is known of them
}

// A ByteSpan is the bytes [First, End) of a file.
type ByteSpan struct{ First, End int64 }

const (
	maxDamaged = 1000 // documents in DamageError.Documents
	maxNamed   = 8    // documents and byte spans in its message
)

func (e *DamageError) Unwrap() error { return ErrCorrupt }

func (e *DamageError) Error() string {
	var spans []string
	for _, b := range e.Blocks[:min(len(e.Blocks), maxNamed)] {
		spans = append(spans, fmt.Sprintf("%d to %d", b.First, b.End-1))
	}
	if more := len(e.Blocks) - len(spans); more > 0 {
		spans = append(spans, fmt.Sprintf("%d more places", more))
	}
	return fmt.Sprintf("%s: %sbytes %s are damaged, in %s: restore the file or write the shard again: %v",
		e.Path, e.why, strings.Join(spans, ", "), e.ids, ErrCorrupt)
}

// damage makes the error about blocks, in order, that do not have their sums.
func (s *Shard) damage(ctx context.Context, why string, blocks []int64) error {
	if err := s.sums.doubt(s.manifest.Files["sums"]); err != nil {
		return err
	}
	e := &DamageError{Path: s.prefix + binExt, why: why}
	size, last := int64(s.DType().Size()), int64(-1)
	for _, b := range blocks {
		span := ByteSpan{b * s.sums.block, min((b+1)*s.sums.block, int64(len(s.bin.Data)))}
		e.addBlock(span)
		for doc, err := range s.Spans(span.First/size, span.End/size) {
			if err != nil { // then x.idx is damaged as well
				e.ids = fmt.Sprintf("documents that cannot be told: %v", err)
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
			o, _ = origins.Origin(d) // without it the number is the name
		}
		names = append(names, nameDocument(d, o))
	}
	e.ids = e.listDocuments(names, last)
	return e
}

// addBlock takes up a block behind those before.
func (e *DamageError) addBlock(span ByteSpan) {
	if n := len(e.Blocks); n > 0 && e.Blocks[n-1].End == span.First {
		e.Blocks[n-1].End = span.End
	} else {
		e.Blocks = append(e.Blocks, span)
	}
}

// addDocument takes up a document behind those before.
func (e *DamageError) addDocument(number int64) {
	if len(e.Documents) < maxDamaged {
		e.Documents = append(e.Documents, number)
	} else {
		e.More++
	}
}

// nameDocument is a document in a message: its number and, where they are known, its id and place
// of origin.
func nameDocument(number int64, o DocumentOrigin) string {
	if o == (DocumentOrigin{}) {
		return fmt.Sprintf("number %d", number)
	}
	return fmt.Sprintf("number %d (%q, %s:%d)", number, o.ID, o.File, o.Line)
}

// listDocuments lists the damaged documents for a message. names are those of the first; the last
// of all is number last.
func (e *DamageError) listDocuments(names []string, last int64) string {
	if len(names) == 0 {
		return "no document"
	}
	if rest := int64(len(e.Documents)-len(names)) + e.More; rest > 0 {
		names = append(names, fmt.Sprintf("%d more up to number %d", rest, last))
	}
	what := "document "
	if len(names) > 1 {
		what = "documents "
	}
	return what + strings.Join(names, ", ")
}

// sums32 makes the sums of x.bin while it is written.
type sums32 struct {
	block []byte // bytes of the block that is not full yet
	sums  []uint32
}

// end takes the block up, full or the last one, and gives its bytes, which are to be written before
// the next are added.
func (c *sums32) end() []byte {
	if len(c.block) == 0 {
		return nil
	}
	c.sums = append(c.sums, crc32.Checksum(c.block, castagnoli))
	done := c.block
	c.block = c.block[:0]
	return done
}

// A SumsWriter makes the file of sums, as x.sums is for x.bin, of the ids that are written to it
// too.
type SumsWriter struct {
	bytes int64
	sum   uint32 // of the block that is not full yet
	sums  []uint32
}

// Write takes up bytes of the file of ids. It does not fail.
func (w *SumsWriter) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		part := rest[:min(int64(len(rest)), sumsBlock-w.bytes%sumsBlock)]
		rest = rest[len(part):]
		w.sum = crc32.Update(w.sum, castagnoli, part)
		if w.bytes += int64(len(part)); w.bytes%sumsBlock == 0 {
			w.sums, w.sum = append(w.sums, w.sum), 0
		}
	}
	return len(p), nil
}

// File gives the bytes of the file of sums, or of the part of it that is about this file of ids.
// What is written afterwards is another file of ids.
func (w *SumsWriter) File() []byte {
	if w.bytes%sumsBlock != 0 {
		w.sums = append(w.sums, w.sum)
	}
	out := encodeSums(w.bytes, w.sums)
	*w = SumsWriter{sums: w.sums[:0]}
	return out
}

// Sums are those of the files of ids of a shard in another layout than Megatron's. They are
// numbered from 0; most layouts have one.
type Sums struct {
	files []*blockSums
	want  FileInfo
}

// OpenSums opens the file of sums that m lists under a name, of files of ids that have so many
// bytes each. It gives nil where m is nil or lists none, or where the file is not there: ids are
// then read as they are.
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

// Close ends the mapping of the file. No reader of [Sums.Reader] may be used afterwards.
func (s *Sums) Close() error { return s.files[0].close() } // they share one

// Reader reads a file of ids from its beginning. It gives the bytes of no block that does not have
// its sum, but an error for [Sums.Damage]. It reads and compares as many blocks at a time as it is
// asked for.
func (s *Sums) Reader(file int, ids io.ReaderAt, idBytes int64) io.Reader {
	return &summedReader{sums: s.files[file], ids: ids, size: idBytes}
}

// Check compares the blocks that hold the bytes [from, end) of a file of ids, which may be mapped,
// with their sums, those that it has not found right before. Where one differs it gives an error
// for [Sums.Damage]. On nil it does nothing.
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
	block int64  // that follows
	whole []byte // a block, where less was asked for
	left  []byte // of whole
}

// A blockError says that a block does not have its sum. Those that the reader has passed have
// theirs.
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

// next reads the blocks that fit into to and passes those before the first that does not have its
// sum. It gives their bytes. It is to be guarded.
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

// DocumentBytes are bytes of a file of ids that a document needs: its ids, or where a table says
// where these are.
type DocumentBytes struct {
	Document int64 // its number in the shard
	Bytes    ByteSpan
}

// Damage makes a [DamageError] about the file of ids at path of an error that came of [Sums.Reader]
// or [Sums.Check]; others it gives back. What the reader has not read of the file is read for more
// damage. documents are the bytes of the file that documents need, in the order of documents; what
// stands in a damaged block need not be believed, as long as the documents that it is about have
// bytes there. origin gives that of the document given last.
func (s *Sums) Damage(ctx context.Context, err error, path string, documents iter.Seq2[DocumentBytes, error],
	origin func(number int64) (DocumentOrigin, error)) error {
	var first *blockError
	if s == nil || !errors.As(err, &first) {
		return err
	}
	return mapping.Guard(func() error { return s.locate(ctx, first.summedReader, path, documents, origin) })
}

// locate is Damage of what a reader has met.
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
			e.ids = fmt.Sprintf("documents that cannot be told: %v", err)
			return e
		}
		if d.Document == last || !e.hits(d.Bytes) {
			continue
		}
		last = d.Document
		e.addDocument(last)
		if len(names) < maxNamed {
			o, _ := origin(last) // without it the number is the name
			names = append(names, nameDocument(last, o))
		}
	}
	e.ids = e.listDocuments(names, last)
	return e
}

// hits says whether bytes of the span are damaged.
func (e *DamageError) hits(span ByteSpan) bool {
	i, _ := slices.BinarySearchFunc(e.Blocks, span.First, func(b ByteSpan, at int64) int {
		return cmp.Compare(b.End-1,
			at)
	})
	return span.First < span.End && i < len(e.Blocks) && e.Blocks[i].First < span.End
}
