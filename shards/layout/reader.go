package layout

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"math"
	"os"
	"slices"

	"mula/shards"
)

// maxUnmarked is the maximum number of tokens that are searched for the end of a document if only
// an end-of-document id marks it.
const maxUnmarked = 1 << 28

// searchChunk is the number of ids that are decoded at a time in a search for the end of a
// document. The ids after the end are decoded again.
const searchChunk = 1 << 9

// Hints describe the files of a shard without a manifest.
type Hints struct {
	// element type of the ids in a bare array, as in [shards.ParseDType]; "" if not known
	DType string
	// the size of the vocabulary; 0 if not known. It determines the element type of a bare array if
	// DType is not set
	VocabSize int
	EOD       int64 // the id that ends each document, used if no file has the ends; -1 for no such id
}

// TypeOf returns the element type of a bare array: h.DType, else the type that the layout's
// framework chooses for the vocabulary: the smallest of types. path and bytes are the name and size
// of the array's file. ids is its number of ids, or -1 if not known. The file size alone
// determines the type only at four bytes per id: a smaller array might be a truncated array of a
// wider type.
func (h Hints) TypeOf(path string, bytes, ids int64, types []shards.DType) (t shards.DType, err error) {
	switch {
	case h.DType != "":
		if t, err = shards.ParseDType(h.DType); err != nil {
			return "", err
		}
		if int64(h.VocabSize) > t.IDs() {
			return "", fmt.Errorf("%s: a vocabulary of %d ids does not fit %s; correct --dtype or --vocab-size", path,
				h.VocabSize, t)
		}
	case h.VocabSize > 0:
		t = shards.SmallestDType(h.VocabSize, types...)
	case bytes == 0:
		return shards.UInt16, nil
	case ids > 0 && bytes == 4*ids:
		return shards.UInt32, nil
	case ids > 0 && (bytes == 2*ids || bytes == ids):
		return "", fmt.Errorf("%s has %d bytes for %d ids: either ids of %d bytes, or a truncated array of wider ids; "+
			"give --vocab-size or --dtype",
			path, bytes, ids, bytes/ids)
	case ids >= 0:
		return "", fmt.Errorf("%s has %d bytes, which do not fit %d ids: it was cut short, or belongs to "+
			"another list of documents: %w", path, bytes, ids, shards.ErrCorrupt)
	default:
		return "", fmt.Errorf("%s: the type of its ids is unknown; give --dtype or --vocab-size", path)
	}
	if ids >= 0 && bytes != ids*int64(t.Size()) {
		hint := ""
		if h.DType == "" {
			hint = fmt.Sprintf("; if its ids are not %s, the type for a vocabulary of %d ids, give --dtype", t,
				h.VocabSize)
		}
		return "", fmt.Errorf("%s has %d bytes, but %d ids of type %s have %d: it was cut short, or is of another "+
			"type%s: %w",
			path, bytes, ids, t, ids*int64(t.Size()), hint, shards.ErrCorrupt)
	}
	return t, nil
}

// NoHints are empty hints.
var NoHints = Hints{EOD: -1}

// A Marked file is the open marker file of a shard. It existed when the shard's other files were
// opened.
type Marked struct {
	*os.File
	Size int64
	info fs.FileInfo
	sums *shards.Sums // nil if the shard has no sums
}

// OpenMarked opens the marker file, without which a shard is incomplete. Call it before opening the
// shard's other files.
func OpenMarked(path string) (*Marked, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("opening shard %s: %w", path, err)
	}
	return &Marked{File: f, Size: info.Size(), info: info}, nil
}

// Unchanged returns an error if the path no longer names the open file. A writer removes the marker
// before it replaces other files. So if the marker is unchanged, all files that were opened since
// belong to it.
func (m *Marked) Unchanged() error { return Unchanged(m.Name(), m.info) }

// Unchanged is like [Marked.Unchanged] for a file that was not opened with [OpenMarked].
func Unchanged(path string, opened fs.FileInfo) error {
	if now, err := os.Stat(path); err != nil || !os.SameFile(now, opened) {
		return fmt.Errorf("opening shard: %s was replaced while it was opened; try again when its writer has finished",
			path)
	}
	return nil
}

// sumsName is the name of the file of sums in the manifest of a layout without folders.
const sumsName = "sums"

// OpenSums opens the sums of the file if the manifest lists them. [NewIDs] then checks the ids with
// them.
func (m *Marked) OpenSums(path string, manifest *shards.Manifest) (err error) {
	m.sums, err = shards.OpenSums(path, manifest, sumsName, m.Size)
	return err
}

// Summed reports whether the ids of the file are checked with sums when they are read.
func (m *Marked) Summed() bool { return m.sums != nil }

// Damage is [shards.Sums.Damage] for a file that contains only ids of type t. ends yields
// the ends of all documents, in ids. Documents follow each other from the start of the file.
func (m *Marked) Damage(ctx context.Context, err error, t shards.DType, ends iter.Seq2[int64, error],
	origin func(int64) (shards.DocumentOrigin, error)) error {
	return m.sums.Damage(ctx, err, m.Name(), func(yield func(shards.DocumentBytes, error) bool) {
		number, start := int64(0), int64(0)
		for end, err := range ends {
			end *= int64(t.Size())
			if !yield(shards.DocumentBytes{Document: number, Bytes: shards.ByteSpan{First: start, End: end}}, err) {
				return
			}
			number, start = number+1, end
		}
	}, origin)
}

// Close closes the file and its sums.
func (m *Marked) Close() error {
	err := m.File.Close()
	if m.sums != nil {
		err = errors.Join(err, m.sums.Close())
	}
	return err
}

// ReadManifest reads the manifest of a shard of layout l. It returns nil for a shard without a
// manifest.
func ReadManifest(path string, l shards.Layout) (*shards.Manifest, error) {
	m, err := shards.ReadManifest(path)
	if err == nil && m != nil && m.Layout != l {
		return nil, fmt.Errorf("%s belongs to a shard of another layout; move one of the two away: %w", path,
			shards.ErrCorrupt)
	}
	return m, err
}

// Differs returns the error about a manifest that does not match the shard's files.
func Differs(manifest, what string, says, found any) error {
	return fmt.Errorf("%s has %s %v, but found %v; they belong to different shards: %w", manifest, what, says, found,
		shards.ErrCorrupt)
}

// IDs reads the ids of a bare array sequentially.
type IDs struct {
	path  string
	dtype shards.DType
	size  int // of an id
	r     *bufio.Reader
	total int64
	next  int64
}

// NewIDs returns a reader of a file with total ids. An error about a damaged block can be passed to
// [Marked.Damage].
func NewIDs(f *Marked, t shards.DType, total int64) *IDs {
	var from io.Reader = io.NewSectionReader(f, 0, f.Size)
	if f.sums != nil {
		from = f.sums.Reader(0, f, f.Size)
	}
	return &IDs{path: f.Name(), dtype: t, size: t.Size(), r: bufio.NewReaderSize(from, 1<<18), total: total}
}

// Next returns the number of ids read so far.
func (x *IDs) Next() int64 { return x.next }

// Left returns the number of remaining ids.
func (x *IDs) Left() int64 { return x.total - x.next }

// Append appends the next n ids to dst. n must be at most Left.
func (x *IDs) Append(dst []uint32, n int64) ([]uint32, error) {
	if n < 0 || n > x.Left() {
		return dst, fmt.Errorf("%s: %d ids from position %d exceed its %d ids", x.path, n, x.next, x.total)
	}
	dst = slices.Grow(dst, int(n))
	for n > 0 {
		src, err := x.peek(n)
		if err != nil {
			return dst, err
		}
		dst = x.dtype.AppendDecoded(dst, src)
		n -= x.pass(len(src) / x.size)
	}
	return dst, nil
}

// peek returns the bytes of at most n following ids that are buffered. It fills the buffer from the
// file if the buffer is empty.
func (x *IDs) peek(n int64) ([]byte, error) {
	if x.r.Buffered() < x.size {
		if _, err := x.r.Peek(x.size); err != nil {
			return nil, fmt.Errorf("reading %s at byte %d: %w", x.path, x.next*int64(x.size), err)
		}
	}
	return x.r.Peek(int(min(n, int64(x.r.Buffered()/x.size))) * x.size)
}

// pass advances past n buffered ids.
func (x *IDs) pass(n int) int64 {
	x.r.Discard(n * x.size)
	x.next += int64(n)
	return int64(n)
}

// AppendUntil appends ids to dst until the first id equal to end, inclusive, or until the end of
// the file.
func (x *IDs) AppendUntil(dst []uint32, end int64) ([]uint32, error) {
	start := x.next
	for x.Left() > 0 {
		src, err := x.peek(min(x.Left(), searchChunk))
		if err != nil {
			return dst, err
		}
		from, k := len(dst), len(src)/x.size
		dst = x.dtype.AppendDecoded(dst, src)
		i := -1
		if end <= math.MaxUint32 { // otherwise end is not an id
			i = slices.Index(dst[from:], uint32(end))
		}
		if i >= 0 {
			dst, k = dst[:from+i+1], i+1
		}
		x.pass(k)
		if i >= 0 {
			break
		}
		if x.next-start > maxUnmarked {
			return dst, fmt.Errorf("%s: the end-of-document id %d is not among the %d ids from position %d (byte %d); "+
				"give the right id",
				x.path, end, x.next-start, start, start*int64(x.size))
		}
	}
	return dst, nil
}

// Origins yields the origins of a shard's documents in order. It reads a file like x.docs.arrow.
type Origins struct {
	file *shards.Documents
	next int64
}

// OpenOrigins opens the file of origins that m lists under name. Without a manifest, or if m does
// not list the file, all origins are empty. The file is hashed first, as in [shards.OpenDocuments].
func OpenOrigins(ctx context.Context, path, name string, m *shards.Manifest) (*Origins, error) {
	if m == nil {
		return new(Origins), nil
	}
	want, ok := m.Files[name]
	if !ok {
		return new(Origins), nil
	}
	file, err := shards.OpenDocuments(ctx, path, want, m.Documents)
	return &Origins{file: file}, err
}

// Next returns the origin of the next document.
func (o *Origins) Next() (shards.DocumentOrigin, error) {
	if o.file == nil {
		return shards.DocumentOrigin{}, nil
	}
	o.next++
	return o.file.Origin(o.next - 1)
}

// Of returns the origin of the document with a number, counted from 0.
func (o *Origins) Of(number int64) (shards.DocumentOrigin, error) {
	if o.file == nil {
		return shards.DocumentOrigin{}, nil
	}
	return o.file.Origin(number)
}

// Close closes the file.
func (o *Origins) Close() error {
	if o.file == nil {
		return nil
	}
	return o.file.Close()
}
