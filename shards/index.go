package shards

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"strings"
	"time"

	"mula/internal/mapping"
)

// The layout of an .idx file. The format fixes every field.
const (
	idxMagic      = "MMIDIDX\x00\x00"
	idxVersion    = 1
	idxHeaderSize = 34
)

// An Index is an open x.idx file: the lengths of a shard's sequences, and the sequences of each
// document. It does not need x.bin. It is safe for concurrent use until [Index.Close].
//
// Open checks only the first and last entries. Other entries are checked when they are used, and
// [Index.Check] checks all of them.
type Index struct {
	path      string
	dtype     DType
	sequences int64
	documents int64
	elements  int64 // in x.bin, according to the last sequence

	file     mapping.File
	modified time.Time // of an object; zero for a local file
	lengths  []byte    // sequences × i32
	starts   []byte    // sequences × i64, byte offset of each sequence in x.bin
	ends     []byte    // (documents+1) × i64, the document array
}

// OpenIndex opens the .idx file at path, which may also be the prefix of the shard. It takes
// constant time: it reads the header, compares the counts with the size of the file, and checks the
// first and last entry of each array. It accepts every element type of megatron-core, and
// multimodal files, whose modes it ignores.
func OpenIndex(path string) (*Index, error) {
	path = strings.TrimSuffix(strings.TrimSuffix(path, idxExt), binExt) + idxExt
	file, err := mapping.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening index: %w", err)
	}
	file.Scattered()
	x := &Index{path: path, file: file}
	if err := mapping.Guard(x.open); err != nil {
		x.Close()
		return nil, err
	}
	return x, nil
}

// open finds the arrays of a mapped file.
func (x *Index) open() error {
	idx := x.file.Data
	err := x.parse(int64(len(idx)), func(from int64, n int) ([]byte, error) { return idx[from:][:n], nil })
	if err != nil {
		return err
	}
	ns, nd := x.sequences, x.documents+1
	x.lengths = idx[idxHeaderSize:][:4*ns]
	x.starts = idx[idxHeaderSize+4*ns:][:8*ns]
	x.ends = idx[idxHeaderSize+12*ns:][:8*nd]
	return nil
}

func (x *Index) corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", x.path, fmt.Sprintf(format, args...), ErrCorrupt)
}

// parse makes all checks that take constant time, and sets the element type and the counts. at
// reads n bytes of the file, which has size bytes.
func (x *Index) parse(size int64, at func(from int64, n int) ([]byte, error)) error {
	idx, err := at(0, int(min(size, idxHeaderSize)))
	if err != nil {
		return err
	}
	if start := idx[:min(len(idx), len(idxMagic))]; string(start) != idxMagic {
		return fmt.Errorf("%s is not an MMIDIDX index: its first %d bytes are %q", x.path, len(start), start)
	}
	if len(idx) < idxHeaderSize {
		return x.corrupt("%d bytes, but the header has %d; the file was cut short", len(idx), idxHeaderSize)
	}
	if v := binary.LittleEndian.Uint64(idx[9:]); v != idxVersion {
		return fmt.Errorf("%s: MMIDIDX version %d (byte 9) is not supported; want version 1", x.path, v)
	}
	x.dtype = DTypeOf(idx[17])
	if x.dtype.Size() == 0 {
		return fmt.Errorf("%s: unknown type of tokens: %s (byte 17)", x.path, x.dtype)
	}
	ns, nd := binary.LittleEndian.Uint64(idx[18:]), binary.LittleEndian.Uint64(idx[26:])
	body := uint64(size - idxHeaderSize)
	if ns > body/12 || nd > body/8 || 12*ns+8*nd > body {
		return x.corrupt("%d sequences and %d document entries (bytes 18 and 26) need more than the file's %d "+
			"bytes; the file was cut short", ns, nd, size)
	}
	switch rest := body - 12*ns - 8*nd; {
	case rest != 0 && rest != ns: // a multimodal file ends with one byte of mode for each sequence
		return x.corrupt("%d bytes follow the document array", rest)
	case nd == 0:
		return x.corrupt("the document array is empty; the first entry must be 0")
	}
	x.sequences, x.documents = int64(ns), int64(nd)-1
	lengths, starts, ends := int64(idxHeaderSize), idxHeaderSize+4*x.sequences, idxHeaderSize+12*x.sequences
	number := func(from int64) (n int64) { // the first error is reported at the end
		entry, readErr := at(from, 8)
		if readErr != nil {
			err = cmp.Or(err, readErr)
			return 0
		}
		return int64(binary.LittleEndian.Uint64(entry))
	}
	first, last := number(ends), number(ends+8*x.documents)
	var start0, start, length int64
	if ns > 0 {
		start0, start = number(starts), number(starts+8*(x.sequences-1))
		// The 4 bytes after the last length belong to the first start.
		length = int64(int32(number(lengths + 4*(x.sequences-1))))
	}
	element := int64(x.dtype.Size())
	switch {
	case err != nil:
		return err
	case first != 0:
		return x.corrupt("entry 0 of the document array is %d, not 0", first)
	case last != x.sequences:
		return x.corrupt("the document array ends at sequence %d of %d", last, x.sequences)
	case start0 != 0:
		return x.corrupt("sequence 0 starts at byte %d, not 0", start0)
	case length < 0:
		return x.corrupt("sequence %d has the length %d", x.sequences-1, length)
	case start < 0 || start%element != 0 || start > math.MaxInt64-length*element:
		return x.corrupt("sequence %d starts at byte %d, not a valid offset of a %d-byte element", x.sequences-1, start,
			element)
	}
	x.elements = start/element + length
	return nil
}

// The entries of the arrays. The index must be in range. The values are unchecked.

func (x *Index) length(sequence int64) int64 {
	return int64(int32(binary.LittleEndian.Uint32(x.lengths[4*sequence:])))
}

func (x *Index) start(sequence int64) int64 {
	return int64(binary.LittleEndian.Uint64(x.starts[8*sequence:]))
}

func (x *Index) end(document int64) int64 {
	return int64(binary.LittleEndian.Uint64(x.ends[8*document:]))
}

// Path returns the path of the file.
func (x *Index) Path() string { return x.path }

// Size returns the size of the file in bytes.
func (x *Index) Size() int64 { return x.file.Info.Size() }

// ModTime returns the modification time of the file or object when the index was opened.
func (x *Index) ModTime() time.Time {
	if !x.modified.IsZero() {
		return x.modified
	}
	return x.file.Info.ModTime()
}

// DType returns the element type of x.bin.
func (x *Index) DType() DType { return x.dtype }

// Sequences returns the number of sequences.
func (x *Index) Sequences() int64 { return x.sequences }

// Documents returns the number of documents. A document is a run of sequences. In files of [Writer]
// or of Megatron's usual preprocessing each document is one sequence.
func (x *Index) Documents() int64 { return x.documents }

// Elements returns the number of elements of x.bin according to the last sequence.
func (x *Index) Elements() int64 { return x.elements }

// Guard is like [Shard.Guard], but for reads of the index only. If the file was truncated within
// its last page, which then reads as zeros, Guard needs a system call, which takes about a
// microsecond.
func (x *Index) Guard(read func() error) error {
	return mapping.Guard(func() error {
		if err := read(); err != nil {
			return err
		}
		x.file.Probe()
		return x.file.Cut()
	})
}

// Lengths returns the number of elements of each sequence as stored in the file: unaligned
// little-endian int32, back to back. The slice is read-only and valid until Close. Read it inside
// [Index.Guard].
func (x *Index) Lengths() []byte { return x.lengths }

// ReadAhead announces a sequential read of Lengths to the system, so that it reads ahead.
func (x *Index) ReadAhead() { x.file.InSequence(x.lengths) }

// Forget releases the memory of Lengths after they were read. They can be read again.
func (x *Index) Forget() { x.file.Forget(x.lengths) }

// Multimodal reports whether the file has a mode for each sequence after the document array.
func (x *Index) Multimodal() bool {
	return int64(len(x.file.Data)) > idxHeaderSize+12*x.sequences+8*(x.documents+1)
}

// SequenceStart returns the first element of a sequence, counted from 0. If sequence is the number
// of sequences, it returns [Index.Elements]. The error wraps [ErrCorrupt] if the file has an
// impossible value, or if the start and the length of the sequence do not add up to the start of
// the next. Call it inside [mapping.Guard]. It also detects a truncation that raises no fault.
func (x *Index) SequenceStart(sequence int64) (int64, error) {
	start, err := x.sequenceStart(sequence)
	if err == nil && sequence < x.sequences {
		if err = x.file.Intact(x.starts[8*sequence:][:8]); err == nil {
			err = x.follows(sequence)
		}
	}
	return start, err
}

// SequenceTokens returns the number of elements of the sequences [first, end), computed from their
// starts. Errors are as for SequenceStart. It needs no guard.
func (x *Index) SequenceTokens(first, end int64) (n int64, err error) {
	err = x.Guard(func() error {
		from, err := x.SequenceStart(first)
		if err != nil {
			return err
		}
		to, err := x.SequenceStart(end)
		n = to - from
		return err
	})
	return n, err
}

// SequenceLength returns the number of elements of a sequence. Errors and guard are as for
// SequenceStart.
func (x *Index) SequenceLength(sequence int64) (int64, error) {
	if sequence < 0 || sequence >= x.sequences {
		return 0, fmt.Errorf("%s: sequence %d is out of range [0, %d)", x.path, sequence, x.sequences)
	}
	length := x.length(sequence)
	if err := x.file.Intact(x.lengths[4*sequence:][:4]); err != nil {
		return 0, err
	}
	if length < 0 {
		return 0, x.corrupt("sequence %d has the length %d", sequence, length)
	}
	return length, nil
}

func (x *Index) sequenceStart(sequence int64) (int64, error) {
	if sequence < 0 || sequence > x.sequences {
		return 0, fmt.Errorf("%s: sequence %d is out of range [0, %d)", x.path, sequence, x.sequences)
	}
	if sequence == x.sequences {
		return x.elements, nil
	}
	start, size := x.start(sequence), int64(x.dtype.Size())
	if start < 0 || start%size != 0 || start/size > x.elements {
		return 0, x.corrupt("sequence %d starts at byte %d of %d", sequence, start, x.elements*size)
	}
	return start / size, nil
}

// follows returns an error unless the sequence ends where the next sequence starts, or at the end
// of x.bin. It detects a damaged start or length of the sequence, and a damaged start of the next.
func (x *Index) follows(sequence int64) error {
	start, err := x.sequenceStart(sequence)
	if err != nil {
		return err
	}
	next, err := x.sequenceStart(sequence + 1)
	if err != nil {
		return err
	}
	if length := x.length(sequence); length != next-start {
		return x.corrupt("sequence %d has the tokens %d to %d, but its length is %d", sequence, start, next, length)
	}
	return nil
}

// document returns the elements [first, end) of a document, which must match the lengths of its
// sequences. For a document of one sequence, the usual case, it reads one entry of each array and
// the next entry of two arrays.
func (x *Index) document(d int64) (first, end int64, err error) {
	if first, err = x.documentStart(d); err != nil {
		return 0, 0, err
	}
	if end, err = x.documentStart(d + 1); err != nil {
		return 0, 0, err
	}
	from, to := x.end(d), x.end(d+1) // documentStart has compared them with the number of sequences
	if to < from {
		return 0, 0, x.corrupt("document %d starts at sequence %d and ends at %d", d, from, to)
	}
	n := int64(0)
	for sequence := from; sequence < to; sequence++ {
		length := x.length(sequence)
		if length < 0 {
			return 0, 0, x.corrupt("sequence %d has the length %d", sequence, length)
		}
		n += length
	}
	if end-first != n {
		return 0, 0, x.corrupt("document %d has the tokens %d to %d, but the lengths of its sequences add up to %d", d,
			first, end,
			n)
	}
	return first, end, nil
}

// documentStart returns the first element of a document in [0, Documents()].
func (x *Index) documentStart(document int64) (int64, error) {
	if document < 0 || document > x.documents {
		return 0, fmt.Errorf("%s: document %d is out of range [0, %d)", x.path, document, x.documents)
	}
	sequence := x.end(document)
	if sequence < 0 || sequence > x.sequences {
		return 0, x.corrupt("document %d starts at sequence %d of %d", document, sequence, x.sequences)
	}
	return x.sequenceStart(sequence)
}

// DocumentLengths yields the number of elements of every document, in order. It reads the file
// sequentially and compares the start and end of each document with the lengths of its sequences.
// An error ends the iteration and wraps [ErrCorrupt].
func (x *Index) DocumentLengths() iter.Seq2[int64, error] {
	return func(yield func(int64, error) bool) {
		x.file.InSequence(x.file.Data)
		defer x.file.Scattered()
		for d := range x.documents {
			n := int64(0)
			err := mapping.Guard(func() error {
				first, end, err := x.document(d)
				n = end - first
				return err
			})
			if !yield(n, err) || err != nil {
				return
			}
		}
	}
}

// Check reads the whole file and checks that it is consistent: every start must follow from the
// lengths before it, and the document array must not decrease from 0 to the number of sequences. It
// stops if ctx is done.
func (x *Index) Check(ctx context.Context) error {
	return mapping.Guard(func() error { return x.check(ctx) })
}

func (x *Index) check(ctx context.Context) error {
	x.file.InSequence(x.file.Data)
	defer x.file.Scattered()
	const block = 1 << 16 // entries between two checks of ctx
	size, next := int64(x.dtype.Size()), int64(0)
	for i := range x.sequences {
		if i%block == 0 && ctx.Err() != nil {
			return fmt.Errorf("checking %s: %w", x.path, context.Cause(ctx))
		}
		switch length, start := x.length(i), x.start(i); {
		case length < 0:
			return x.corrupt("sequence %d has the length %d", i, length)
		case start != next:
			return x.corrupt("sequence %d starts at byte %d, but by the lengths before it at byte %d", i, start, next)
		case length > (math.MaxInt64-next)/size:
			return x.corrupt("the lengths up to sequence %d add up to more than 2^63 bytes", i)
		default:
			next += length * size
		}
	}
	last := int64(0)
	for d := range x.documents + 1 {
		if d%block == 0 && ctx.Err() != nil {
			return fmt.Errorf("checking %s: %w", x.path, context.Cause(ctx))
		}
		end := x.end(d)
		if end < last || end > x.sequences {
			return x.corrupt("entry %d of the document array is %d, after %d", d, end, last)
		}
		last = end
	}
	return x.file.Cut()
}

// Close unmaps the file. No method may run during or after Close.
func (x *Index) Close() error {
	x.lengths, x.starts, x.ends = nil, nil, nil
	return x.file.Close()
}
