package shards

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"

	"mula/internal/mapping"
)

// The layout of x.sums: the header, a sum for each block of x.bin, and the sum of all bytes before. Sums are CRC-32C (Castagnoli), which
// find every error within 32 bits and all but one in 2^32 of the others.
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

// blockSums are the sums of a shard's x.bin and what is known of its blocks. It is safe for concurrent use.
type blockSums struct {
	path  string // of x.sums
	file  mapping.File
	sums  []byte // u32 each
	block int64  // bytes

	once sync.Once       // makes good, when something is read for the first time
	good []atomic.Uint64 // a bit a block: it was found to have its sum
}

// openSums maps x.sums; without the file it gives nil. It looks at the header only: the sums themselves are doubted when one differs.
func openSums(path string, binBytes int64) (*blockSums, error) {
	file, err := mapping.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	c := &blockSums{path: path, file: file}
	if err := c.parse(binBytes); err != nil {
		file.Close()
		return nil, fmt.Errorf("%s: %w: restore it, or remove it: tokens are then not compared with sums when they are read: %w", path, err, ErrCorrupt)
	}
	file.Scattered()
	return c, nil
}

// parse looks at the header and the size.
func (c *blockSums) parse(binBytes int64) error {
	le, data := binary.LittleEndian, c.file.Data
	if len(data) < sumsHeaderSize+4 || !bytes.HasPrefix(data, []byte(sumsMagic)) {
		return fmt.Errorf("its %d bytes do not begin with the header of a file of sums", len(data))
	}
	if v := le.Uint32(data[8:]); v != sumsVersion {
		return fmt.Errorf("version %d (byte 8), only version %d is known", v, sumsVersion)
	}
	c.block = int64(le.Uint32(data[12:]))
	if bits.OnesCount64(uint64(c.block)) != 1 || c.block < 1<<9 {
		return fmt.Errorf("blocks of %d bytes (byte 12), not of a power of two from 512 on", c.block)
	}
	if of := le.Uint64(data[16:]); of != uint64(binBytes) {
		return fmt.Errorf("it has the sums of %d bytes (byte 16), the .bin file has %d", of, binBytes)
	}
	if want := sumsHeaderSize + 4*c.blocks(binBytes) + 4; want != int64(len(data)) {
		return fmt.Errorf("it has %d bytes, not the %d that the sums of %d bytes take", len(data), want, binBytes)
	}
	c.sums = data[sumsHeaderSize : len(data)-4]
	return nil
}

// blocks is the number of blocks of so many bytes.
func (c *blockSums) blocks(binBytes int64) int64 { return (binBytes + c.block - 1) / c.block }

// check compares the blocks that hold the bytes [from, end) of bin with their sums, those that have not been found right before, and gives
// the first that differs, or -1.
func (c *blockSums) check(bin []byte, from, end int64) int64 {
	c.once.Do(func() { c.good = make([]atomic.Uint64, (c.blocks(int64(len(bin)))+63)/64) })
	for b := from / c.block; b*c.block < end; b++ {
		word, bit := &c.good[b/64], uint64(1)<<(b%64)
		if word.Load()&bit != 0 {
			continue
		}
		if !c.right(bin, b) {
			return b
		}
		word.Or(bit)
	}
	return -1
}

// right says whether a block has its sum.
func (c *blockSums) right(bin []byte, block int64) bool {
	start := block * c.block
	return crc32.Checksum(bin[start:min(start+c.block, int64(len(bin)))], castagnoli) == binary.LittleEndian.Uint32(c.sums[4*block:])
}

// doubt says why the sums are not to be believed, if they are not: they are not those that were written, or not the manifest's.
func (c *blockSums) doubt(want FileInfo) error {
	data := c.file.Data
	last := len(data) - 4
	if crc32.Checksum(data[:last], castagnoli) != binary.LittleEndian.Uint32(data[last:]) {
		return fmt.Errorf("%s is damaged itself: restore it, or remove it: tokens are then not compared with sums when they are read: %w", c.path, ErrCorrupt)
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != want.SHA256 {
		return fmt.Errorf("%s has SHA-256 %x, by the manifest %s: restore the shard or write it again: %w", c.path, sum, want.SHA256, ErrCorrupt)
	}
	return nil
}

func (c *blockSums) close() error {
	c.sums = nil
	return c.file.Close()
}

// A DamageError says which bytes of x.bin are not those that were written, and which documents have tokens there. It wraps [ErrCorrupt].
type DamageError struct {
	Path      string     // of x.bin
	Blocks    []ByteSpan // that do not have their sums, neighbours joined, in order
	Documents []int64    // numbers of those that have tokens in Blocks, in order, the first 1,000 of them
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
		if n := len(e.Blocks); n > 0 && e.Blocks[n-1].End == span.First {
			e.Blocks[n-1].End = span.End
		} else {
			e.Blocks = append(e.Blocks, span)
		}
		for doc, err := range s.Spans(span.First/size, span.End/size) {
			if err != nil { // then x.idx is damaged as well
				e.ids = fmt.Sprintf("documents that cannot be told: %v", err)
				return e
			}
			if doc.Document == last {
				continue
			}
			last = doc.Document
			if len(e.Documents) < maxDamaged {
				e.Documents = append(e.Documents, doc.Document)
			} else {
				e.More++
			}
		}
	}
	e.ids = s.nameDocuments(ctx, e.Documents, e.More, last)
	return e
}

// nameDocuments lists documents for a message: numbers, and the ids and places of origin where x.docs.arrow is readable. Behind docs there are
// more of them, the last of all being number last.
func (s *Shard) nameDocuments(ctx context.Context, docs []int64, more, last int64) string {
	origins, err := s.DocumentIDs(ctx)
	var names []string
	for _, d := range docs[:min(len(docs), maxNamed)] {
		name := fmt.Sprintf("number %d", d)
		if err == nil {
			if o, err := origins.Origin(d); err == nil {
				name = fmt.Sprintf("number %d (%q, %s:%d)", d, o.ID, o.File, o.Line)
			}
		}
		names = append(names, name)
	}
	if rest := int64(len(docs)-len(names)) + more; rest > 0 {
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

// end takes the block up, full or the last one, and gives its bytes, which are to be written before the next are added.
func (c *sums32) end() []byte {
	if len(c.block) == 0 {
		return nil
	}
	c.sums = append(c.sums, crc32.Checksum(c.block, castagnoli))
	done := c.block
	c.block = c.block[:0]
	return done
}
