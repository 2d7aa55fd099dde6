// Package shards keeps token ids on disk: it reads and writes the token files of Megatron-LM (MMIDIDX), x.bin with the ids and
// x.idx with the lengths, and beside them two files of mula's own, x.docs.arrow that says where each document came from and the
// manifest x.json with the SHA-256 of the others. docs/formats/shard.md has every byte.
//
//	x.bin   ids of all sequences, back to back, little-endian uint16 or int32
//	x.idx    0  "MMIDIDX" and two zero bytes
//	         9  u64  version, 1
//	        17  u8   element type: 4 int32, 8 uint16
//	        18  u64  ns, number of sequences
//	        26  u64  nd, number of documents + 1
//	        34  i32  × ns  length of each sequence in tokens
//	            i64  × ns  byte offset of each sequence in x.bin
//	            i64  × nd  0, then for each document the number of the sequence one past its end
//
// Files are mapped into memory and searched where they lie, so an open shard costs no memory of its own, however many documents it
// has. A file that another process cuts short while it is mapped ends this process with a bus error; shards are replaced by renaming,
// never rewritten in place, so only a foreign program does that.
package shards

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sort"
	"strings"
	"sync"
)

// ErrCorrupt is wrapped by errors about a file whose content contradicts itself or the files beside it: a truncated .bin, offsets that
// do not follow from the lengths, a hash that is not the manifest's.
var ErrCorrupt = errors.New("corrupt shard")

// The layout of an .idx file; all of it is fixed by the format.
const (
	idxMagic      = "MMIDIDX\x00\x00"
	idxVersion    = 1
	idxHeaderSize = 34
)

// Endings of a shard's files.
const (
	binExt      = ".bin"
	idxExt      = ".idx"
	docsExt     = ".docs.arrow"
	manifestExt = ".json"
)

// A Shard is an open pair of x.bin and x.idx. It is safe for concurrent use until [Shard.Close].
type Shard struct {
	prefix    string
	dtype     DType
	sequences int64
	documents int64
	tokens    int64

	bin, idx mapping
	starts   []byte // sequences × i64, byte offset of each sequence in bin
	ends     []byte // (documents+1) × i64, the document array

	manifest *Manifest

	mu      sync.Mutex // guards origins
	origins *Documents
}

// Open opens the shard with the given prefix; the name of its .bin or .idx file does as well. It reads the whole .idx file once and
// compares it with itself, with the size of .bin and with the manifest if there is one: what passes can be read without surprises.
// It does not hash anything; see [Shard.Verify].
func Open(prefix string) (_ *Shard, err error) {
	prefix = strings.TrimSuffix(strings.TrimSuffix(prefix, idxExt), binExt)
	s := &Shard{prefix: prefix}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if s.idx, err = mapFile(prefix + idxExt); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			if _, binErr := os.Stat(prefix + binExt); binErr == nil {
				return nil, fmt.Errorf("%s stands without %s, which is written last: the shard was never finished, write it again: %w",
					prefix+binExt, prefix+idxExt, err)
			}
		}
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	if s.bin, err = mapFile(prefix + binExt); err != nil {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	if err := s.check(s.idx.data, int64(len(s.bin.data))); err != nil {
		return nil, err
	}
	if s.manifest, err = readManifest(prefix + manifestExt); err != nil {
		return nil, err
	}
	// A writer removes x.idx before it replaces the others: while the one that was opened stands, they are its own.
	if now, err := os.Stat(prefix + idxExt); err != nil || !os.SameFile(now, s.idx.info) {
		return nil, fmt.Errorf("opening shard: %s was replaced in the meantime; try again when its writer has finished", prefix)
	}
	if s.manifest != nil {
		if err := s.checkManifest(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// check parses the .idx file and holds it against a .bin file of binSize bytes.
func (s *Shard) check(idx []byte, binSize int64) error {
	name := s.prefix + idxExt
	corrupt := func(format string, args ...any) error {
		return fmt.Errorf("%s: %s: %w", name, fmt.Sprintf(format, args...), ErrCorrupt)
	}
	if start := idx[:min(len(idx), len(idxMagic))]; string(start) != idxMagic {
		return fmt.Errorf("%s is not an MMIDIDX index: its first %d bytes are %q", name, len(start), start)
	}
	if len(idx) < idxHeaderSize {
		return corrupt("it has %d bytes, fewer than the %d of its header; it was cut short", len(idx), idxHeaderSize)
	}
	if v := binary.LittleEndian.Uint64(idx[9:]); v != idxVersion {
		return fmt.Errorf("%s: MMIDIDX version %d (byte 9), only version 1 is known", name, v)
	}
	s.dtype = DType(idx[17])
	if !s.dtype.valid() {
		return fmt.Errorf("%s: tokens are %s (byte 17); only uint16 and int32 are token ids here, convert the shard first", name, s.dtype)
	}
	ns, nd := binary.LittleEndian.Uint64(idx[18:]), binary.LittleEndian.Uint64(idx[26:])
	body := uint64(len(idx) - idxHeaderSize)
	if ns > body/12 || nd > body/8 || 12*ns+8*nd > body {
		return corrupt("%d sequences and %d document entries (bytes 18 and 26) need more than the file's %d bytes; it was cut short", ns, nd, len(idx))
	}
	switch rest := body - 12*ns - 8*nd; {
	case rest == ns && ns > 0:
		return fmt.Errorf("%s: it has a mode for each sequence, so it is a multimodal dataset; only text is read", name)
	case rest != 0:
		return corrupt("%d bytes follow the document array", rest)
	case nd == 0:
		return corrupt("the document array is empty, it must at least hold a 0")
	}
	s.sequences, s.documents = int64(ns), int64(nd)-1
	lengths := idx[idxHeaderSize : idxHeaderSize+4*ns]
	s.starts = idx[idxHeaderSize+4*ns : idxHeaderSize+12*ns]
	s.ends = idx[idxHeaderSize+12*ns:]

	size, next := int64(s.dtype.Size()), int64(0)
	starts := s.starts
	for i := 0; len(lengths) >= 4 && len(starts) >= 8; i++ {
		length := int64(int32(binary.LittleEndian.Uint32(lengths)))
		start := int64(binary.LittleEndian.Uint64(starts))
		if start != next || start|length < 0 {
			switch {
			case length < 0:
				return corrupt("sequence %d has the length %d", i, length)
			case next < 0:
				return corrupt("the lengths before sequence %d add up to more than 2^63 bytes", i)
			}
			return corrupt("sequence %d starts at byte %d, by the lengths before it at byte %d", i, start, next)
		}
		next += length * size
		lengths, starts = lengths[4:], starts[8:]
	}
	if next != binSize {
		what := "it was cut short"
		if binSize > next {
			what = "it belongs to another .idx"
		}
		return fmt.Errorf("%s: expected %d bytes by %s, found %d: %s: %w", s.prefix+binExt, next, name, binSize, what, ErrCorrupt)
	}
	s.tokens = next / size

	last := int64(0)
	ends := s.ends
	for d := 0; len(ends) >= 8; d++ {
		end := int64(binary.LittleEndian.Uint64(ends))
		if end < last || d == 0 && end != 0 {
			return corrupt("entry %d of the document array is %d, after %d", d, end, last)
		}
		last, ends = end, ends[8:]
	}
	if last != s.sequences {
		return corrupt("the document array ends at sequence %d of %d", last, s.sequences)
	}
	return nil
}

// Prefix is the path of the shard's files without their endings.
func (s *Shard) Prefix() string { return s.prefix }

// DType is the element type of the .bin file.
func (s *Shard) DType() DType { return s.dtype }

// Tokens is the number of tokens.
func (s *Shard) Tokens() int64 { return s.tokens }

// Documents is the number of documents. Where the file counts sequences and documents apart, as foreign files may, a document is a run of
// sequences.
func (s *Shard) Documents() int64 { return s.documents }

// Manifest is what x.json says, or nil for a shard without one. It is not to be changed.
func (s *Shard) Manifest() *Manifest { return s.manifest }

// DocumentStart is the first token of document d, from 0; d may be [Shard.Documents], which gives [Shard.Tokens]. It panics when d is out of
// that range, as indexing a slice does.
func (s *Shard) DocumentStart(d int64) int64 {
	if d < 0 || d > s.documents {
		panic(fmt.Sprintf("shards: document %d of %d", d, s.documents))
	}
	sequence := int64(binary.LittleEndian.Uint64(s.ends[8*d:]))
	if sequence == s.sequences {
		return s.tokens
	}
	return int64(binary.LittleEndian.Uint64(s.starts[8*sequence:])) / int64(s.dtype.Size())
}

// DocumentAt is the document that holds the given token: the only d with DocumentStart(d) ≤ token < DocumentStart(d+1), so never an empty
// one. For a token that the shard does not have it is -1.
func (s *Shard) DocumentAt(token int64) int64 {
	if token < 0 || token >= s.tokens {
		return -1
	}
	return int64(sort.Search(int(s.documents), func(d int) bool { return s.DocumentStart(int64(d)+1) > token }))
}

// Read fills dst with the ids from the given token on. Windows may cross documents. It fails if the shard does not have that many tokens
// there, or if an id of an int32 shard is negative.
func (s *Shard) Read(dst []uint32, token int64) error {
	if token < 0 || token > s.tokens || int64(len(dst)) > s.tokens-token {
		return fmt.Errorf("%s: tokens %d to %d were asked for, it has %d", s.prefix+binExt, token, token+int64(len(dst)), s.tokens)
	}
	if s.dtype == UInt16 {
		src := s.bin.data[2*token:]
		src = src[:2*len(dst)]
		for i := range dst {
			dst[i] = uint32(binary.LittleEndian.Uint16(src[2*i:]))
		}
		return nil
	}
	src := s.bin.data[4*token:]
	src = src[:4*len(dst)]
	var all uint32
	for i := range dst {
		id := binary.LittleEndian.Uint32(src[4*i:])
		dst[i] = id
		all |= id
	}
	if all>>31 == 0 {
		return nil
	}
	for i, id := range dst {
		if id>>31 != 0 {
			at := token + int64(i)
			return fmt.Errorf("%s: token %d (byte %d) is %d, ids are not negative: %w", s.prefix+binExt, at, 4*at, int32(id), ErrCorrupt)
		}
	}
	return nil
}

// Close ends the mapping of the files. No method of the shard, nor of its [Documents], may be running or be called afterwards.
func (s *Shard) Close() error {
	s.mu.Lock()
	origins := s.origins
	s.origins = nil
	s.mu.Unlock()
	var err error
	if origins != nil {
		err = origins.close()
	}
	s.starts, s.ends = nil, nil
	return errors.Join(err, s.bin.unmap(), s.idx.unmap())
}
