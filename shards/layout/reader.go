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

// MaxUnmarked is the greatest number of tokens that are searched for the end of a document where
// nothing but an end-of-document id says it.
const MaxUnmarked = 1 << 28

// searchChunk is how many ids are decoded at a time where the end of a document is searched: those
// behind it are decoded again.
const searchChunk = 1 << 9

// Hints say what the files of a shard without a manifest may leave open.
type Hints struct {
	DType string // element type of ids in a bare array, by its name in numpy: "uint16"; "" if not known
	// every id is below it; 0 if not known. It decides the element type of a bare array where DType
	// does not
	VocabSize int
	EOD       int64 // the id that ends each document, where nothing else says where documents end; -1 if there is none
}

// Width is the element type of a bare array: by h.DType, else what the layout's framework chooses
// for the vocabulary. The array is the file at path with so many bytes; ids is how many ids it has,
// or -1 if nothing says it. Its size alone decides only where it has four bytes an id: one with
// fewer may be an array of a wider type that was cut short.
func (h Hints) Width(path string, bytes, ids int64, forVocabulary func(vocabSize int) Width) (w Width, err error) {
	switch {
	case h.DType != "":
		if w, err = ParseWidth(h.DType); err != nil {
			return 0, err
		}
		if int64(h.VocabSize) > w.IDs() {
			return 0, fmt.Errorf("%s: a vocabulary of %d ids does not fit %s; correct --dtype or --vocab-size", path,
				h.VocabSize, w)
		}
	case h.VocabSize > 0:
		w = forVocabulary(h.VocabSize)
	case bytes == 0:
		return 2, nil
	case ids > 0 && bytes == 4*ids:
		return 4, nil
	case ids > 0 && (bytes == 2*ids || bytes == ids):
		return 0, fmt.Errorf("%s has %d bytes for %d ids: ids of %d bytes, or wider ones of which a part is "+
			"missing; give --vocab-size or --dtype",
			path, bytes, ids, bytes/ids)
	case ids >= 0:
		return 0, fmt.Errorf("%s has %d bytes, which are no array of %d ids: it was cut short, or belongs to "+
			"another list of documents: %w", path, bytes, ids, shards.ErrCorrupt)
	default:
		return 0, fmt.Errorf("nothing says of what type the ids in %s are; give --dtype or --vocab-size", path)
	}
	if ids >= 0 && bytes != ids*int64(w) {
		hint := ""
		if h.DType == "" {
			hint = fmt.Sprintf("; if its ids are not %s, the type for a vocabulary of %d ids, give --dtype", w,
				h.VocabSize)
		}
		return 0, fmt.Errorf("%s has %d bytes, but %d ids of type %s have %d: it was cut short, or is of another "+
			"type%s: %w",
			path, bytes, ids, w, ids*int64(w), hint, shards.ErrCorrupt)
	}
	return w, nil
}

// NoHints are hints that say nothing.
var NoHints = Hints{EOD: -1}

// A Marked file is open, and was there when the files beside it were looked at.
type Marked struct {
	*os.File
	Size int64
	info fs.FileInfo
	sums *shards.Sums // nil where there are none
}

// OpenMarked opens the file without which a shard is not complete, before any other of its files.
func OpenMarked(path string) (*Marked, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is no regular file")
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("opening shard %s: %w", path, err)
	}
	return &Marked{File: f, Size: info.Size(), info: info}, nil
}

// Unchanged says whether the file still stands under its name. A writer removes it before it
// replaces the others: if it does, those that were opened in between belong to it.
func (m *Marked) Unchanged() error { return Unchanged(m.Name(), m.info) }

// Unchanged is [Marked.Unchanged] for a file that was opened otherwise.
func Unchanged(path string, opened fs.FileInfo) error {
	if now, err := os.Stat(path); err != nil || !os.SameFile(now, opened) {
		return fmt.Errorf("opening shard: %s was replaced in the meantime; try again when its writer has finished",
			path)
	}
	return nil
}

// OpenSums opens the sums of the file, if the manifest lists them: [NewIDs] then compares the ids
// with them.
func (m *Marked) OpenSums(path string, manifest *shards.Manifest) (err error) {
	m.sums, err = shards.OpenSums(path, manifest, SumsName, m.Size)
	return err
}

// Summed says whether the ids of the file are compared with sums when they are read.
func (m *Marked) Summed() bool { return m.sums != nil }

// Damage is [shards.Sums.Damage] for a file of ids of the given width and nothing else. ends are
// the ends of all documents in ids, which follow each other from the beginning.
func (m *Marked) Damage(ctx context.Context, err error, w Width, ends iter.Seq2[int64, error],
	origin func(int64) (shards.DocumentOrigin, error)) error {
	return m.sums.Damage(ctx, err, m.Name(), func(yield func(shards.DocumentBytes, error) bool) {
		number, start := int64(0), int64(0)
		for end, err := range ends {
			end *= int64(w)
			if !yield(shards.DocumentBytes{Document: number, Bytes: shards.ByteSpan{First: start, End: end}}, err) {
				return
			}
			number, start = number+1, end
		}
	}, origin)
}

// Close closes the file and that of its sums.
func (m *Marked) Close() error {
	err := m.File.Close()
	if m.sums != nil {
		err = errors.Join(err, m.sums.Close())
	}
	return err
}

// ReadManifest reads the manifest of a shard of one layout. For a shard without one it is nil.
func ReadManifest(path string, l shards.Layout) (*shards.Manifest, error) {
	m, err := shards.ReadManifest(path)
	if err == nil && m != nil && m.Layout != l {
		return nil, fmt.Errorf("%s belongs to a shard of another layout; move one of the two away: %w", path,
			shards.ErrCorrupt)
	}
	return m, err
}

// Differs is the error about a manifest that is not that of the files beside it.
func Differs(manifest, what string, says, found any) error {
	return fmt.Errorf("%s says %s %v, found %v; they are of different shards: %w", manifest, what, says, found,
		shards.ErrCorrupt)
}

// IDs reads the ids of a bare array from its beginning.
type IDs struct {
	path  string
	width Width
	r     *bufio.Reader
	total int64
	next  int64
}

// NewIDs reads total ids of a file that has that many. An error about a block that does not have
// its sum is one for [Marked.Damage].
func NewIDs(f *Marked, w Width, total int64) *IDs {
	var from io.Reader = io.NewSectionReader(f, 0, f.Size)
	if f.sums != nil {
		from = f.sums.Reader(0, f, f.Size)
	}
	return &IDs{path: f.Name(), width: w, r: bufio.NewReaderSize(from, 1<<18), total: total}
}

// Next is the number of ids passed.
func (x *IDs) Next() int64 { return x.next }

// Left is the number of ids that follow.
func (x *IDs) Left() int64 { return x.total - x.next }

// Append adds the next n ids to dst; there must be as many.
func (x *IDs) Append(dst []uint32, n int64) ([]uint32, error) {
	if n < 0 || n > x.Left() {
		return dst, fmt.Errorf("%s: %d ids were asked for at %d, it has %d", x.path, n, x.next, x.total)
	}
	dst = slices.Grow(dst, int(n))
	for n > 0 {
		src, err := x.peek(n)
		if err != nil {
			return dst, err
		}
		dst = x.width.AppendIDs(dst, src)
		n -= x.pass(len(src) / int(x.width))
	}
	return dst, nil
}

// peek gives the bytes of up to n ids that follow, those that are at hand: the file is read when
// there is none, a buffer full at a time.
func (x *IDs) peek(n int64) ([]byte, error) {
	width := int(x.width)
	if x.r.Buffered() < width {
		if _, err := x.r.Peek(width); err != nil {
			return nil, fmt.Errorf("reading %s at byte %d: %w", x.path, x.next*int64(width), err)
		}
	}
	return x.r.Peek(int(min(n, int64(x.r.Buffered()/width))) * width)
}

// pass goes on behind n ids that are at hand.
func (x *IDs) pass(n int) int64 {
	x.r.Discard(n * int(x.width))
	x.next += int64(n)
	return int64(n)
}

// AppendUntil adds ids to dst up to and with the first that is end, or up to the end of the file.
func (x *IDs) AppendUntil(dst []uint32, end int64) ([]uint32, error) {
	start := x.next
	for x.Left() > 0 {
		src, err := x.peek(min(x.Left(), searchChunk))
		if err != nil {
			return dst, err
		}
		from, k := len(dst), len(src)/int(x.width)
		dst = x.width.AppendIDs(dst, src)
		i := -1
		if end <= math.MaxUint32 { // otherwise it is no id
			i = slices.Index(dst[from:], uint32(end))
		}
		if i >= 0 {
			dst, k = dst[:from+i+1], i+1
		}
		x.pass(k)
		if i >= 0 {
			break
		}
		if x.next-start > MaxUnmarked {
			return dst, fmt.Errorf("%s: the id %d, which ends documents, is not among the %d from %d on (byte %d); "+
				"name the right one",
				x.path, end, x.next-start, start, start*int64(x.width))
		}
	}
	return dst, nil
}

// Origins gives the origins of a shard's documents in their order, out of a file like x.docs.arrow.
type Origins struct {
	file *shards.Documents
	next int64
}

// OpenOrigins opens the file that m names so. Without a manifest, or if it names no such file,
// origins are empty. The file is hashed first, as [shards.OpenDocuments] says.
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

// Next is the origin of the next document.
func (o *Origins) Next() (shards.DocumentOrigin, error) {
	if o.file == nil {
		return shards.DocumentOrigin{}, nil
	}
	o.next++
	return o.file.Origin(o.next - 1)
}

// Of is the origin of the document with a number, from 0.
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
