package job

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"slices"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/shards"
	"mula/tokenize/documents"
)

// A segment is a file with the ids of a run of documents of one unit, and their origins.
// docs/formats/job.md specifies the format.
//
// Documents are stored in blocks: first the metadata of all documents, then their ids. The footer
// holds the positions of the blocks, their checksums, and how far the unit was read, so that
// another process can continue after the segment. The documents are in unit order or, for a
// shuffled output, sorted by their keys. Both orders have the same documents in a segment.

const (
	segmentMagic   = "MULASEG1"
	segmentEnd     = "MULASEGE"
	segmentTrailer = 4 + 4 + len(segmentEnd) // length of the footer, its sum
	maxFooter      = 64 << 20
	// weight of a document in a segment in addition to its ids and its own id: its memory use
	documentWeight  = 128
	maxBlockIDs     = 1 << 20
	maxBlocks       = 256 // of a segment whose documents are smaller than a block
	blockDocuments  = 1 << 15
	maxBlockContent = 8 << 30
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A meta is the metadata of a document.
type meta struct {
	tokens  int64
	part    int
	line    int64 // in the part, from 1
	offset  int64
	text    int64  // bytes
	id      []byte // empty if the document has none
	ordinal int64  // in the unit, from 0
	key     uint64 // with shuffling
}

func (m *meta) append(b []byte, shuffled bool) []byte {
	b = binary.AppendUvarint(b, uint64(m.tokens))
	b = binary.AppendUvarint(b, uint64(m.part))
	b = binary.AppendUvarint(b, uint64(m.line))
	b = binary.AppendUvarint(b, uint64(m.offset))
	b = binary.AppendUvarint(b, uint64(m.text))
	b = binary.AppendUvarint(b, uint64(m.ordinal))
	b = binary.AppendUvarint(b, uint64(len(m.id)))
	b = append(b, m.id...)
	if shuffled {
		b = binary.LittleEndian.AppendUint64(b, m.key)
	}
	return b
}

var errMeta = errors.New("the metadata of a document is truncated or out of bounds")

// parse reads the metadata of one document and returns the rest. m.id is a slice of b.
func (m *meta) parse(b []byte, shuffled bool) ([]byte, error) {
	var v [7]uint64
	for i := range v {
		x, k := binary.Uvarint(b)
		if k <= 0 || x > math.MaxInt64 {
			return nil, errMeta
		}
		v[i], b = x, b[k:]
	}
	n := v[6]
	if n > uint64(len(b)) || shuffled && uint64(len(b))-n < 8 {
		return nil, errMeta
	}
	*m = meta{tokens: int64(v[0]), part: int(v[1]), line: int64(v[2]), offset: int64(v[3]), text: int64(v[4]),
		ordinal: int64(v[5]), id: b[:n:n]}
	b = b[n:]
	if shuffled {
		m.key, b = binary.LittleEndian.Uint64(b), b[8:]
	}
	return b, nil
}

// A block of a segment.
type block struct {
	At        int64  `json:"at"` // of its first byte in the file
	Documents int    `json:"documents"`
	Tokens    int64  `json:"tokens"`
	Meta      int64  `json:"meta"`     // bytes of the documents' metadata; the ids follow
	MetaSum   uint32 `json:"meta_sum"` // CRC-32C
	IDSum     uint32 `json:"id_sum"`
	Key       uint64 `json:"key,omitempty"` // of the first document, with shuffling
}

// A place is a reading position in a unit.
type place struct {
	Part   int   `json:"part"`
	Within bool  `json:"within"` // the part was started: Offset and Lines are valid
	Offset int64 `json:"offset"` // of the last document that was read
	Lines  int64 `json:"lines"`  // lines read in the part
}

// A totals holds the counts of a part of a unit.
type totals struct {
	Lines     int64 `json:"lines"`
	Documents int64 `json:"documents"`
	Tokens    int64 `json:"tokens"`
	TextBytes int64 `json:"text_bytes"`
	// of the part's bytes on disk; "" if the part was not read completely
	SHA256 string `json:"sha256"`
}

// A footer is the end of a segment.
type footer struct {
	Format    int    `json:"format"`        // 1
	Job       string `json:"job,omitempty"` // as in the description
	Width     int    `json:"width"`         // bytes of an id: 2 or 4
	Shuffled  bool   `json:"shuffled"`
	Documents int64  `json:"documents"`
	Tokens    int64  `json:"tokens"`
	// lines of the rejects file next to the segment, which does not exist if there are none
	Rejects    int64    `json:"rejects"`
	RejectsSum uint32   `json:"rejects_sum"` // its CRC-32C
	Next       place    `json:"next"`
	Parts      []totals `json:"parts"` // of the parts up to Next, from the start of the unit
	Last       bool     `json:"last"`  // the unit ends here
	Blocks     []block  `json:"blocks"`
}

// dtype returns the type of the ids.
func (f *footer) dtype() shards.DType { return shards.Unsigned(f.Width) }

// A segmentWriter writes a segment. Its output depends only on the documents and the job's
// settings.
type segmentWriter struct {
	files atomicfile.Files
	file  *atomicfile.File
	limit int64 // weight at which the segment is full
	idMax int   // bytes of ids at which a block is full
	foot  footer

	at        int64 // in the file
	weight    int64
	meta, ids []byte // of the block
	block     block

	// With shuffling all documents are kept until the end.
	kept    []keptDocument
	keptIDs []byte
	names   []byte // memory of the documents' ids

	rejects    *atomicfile.File
	rejectsOut *bufio.Writer
	rejectPath string
}

// A keptDocument waits to be sorted by key.
type keptDocument struct {
	meta
	at int // of its ids in keptIDs
}

// blockIDs is the size of ids at which a block is closed.
func blockIDs(limit int64, shuffled bool) int {
	if !shuffled {
		return int(min(limit, maxBlockIDs))
	}
	return int(max(limit/maxBlocks, min(limit, 64<<10)))
}

// createSegment starts a segment. It reuses the memory of old, which may be nil and must not be
// used afterwards.
func createSegment(files atomicfile.Files, path, rejectPath string, d *description, old *segmentWriter) (
	*segmentWriter, error) {
	f, err := files.Create(path)
	if err != nil {
		return nil, err
	}
	shuffled := d.Settings.Shuffle
	w := &segmentWriter{files: files, file: f, limit: d.SegmentBytes, idMax: blockIDs(d.SegmentBytes, shuffled),
		rejectPath: rejectPath}
	if old != nil {
		w.meta, w.ids, w.kept, w.keptIDs = old.meta[:0], old.ids[:0], old.kept[:0], old.keptIDs[:0]
	}
	w.foot = footer{Format: 1, Job: d.ID, Width: d.width(), Shuffled: shuffled, Blocks: []block{}}
	if _, err := f.Write([]byte(segmentMagic)); err != nil {
		f.Abort()
		return nil, err
	}
	w.at = int64(len(segmentMagic))
	return w, nil
}

// full reports whether the segment is full.
func (w *segmentWriter) full() bool { return w.weight >= w.limit }

// add adds a document. It keeps no reference to m or tokens.
func (w *segmentWriter) add(m *meta, tokens []uint32) error {
	m.tokens = int64(len(tokens))
	w.weight += documentWeight + int64(len(m.id)) + int64(w.foot.Width)*m.tokens
	if w.foot.Shuffled {
		k := keptDocument{*m, len(w.keptIDs)}
		w.names = append(w.names, m.id...)
		// refers to the old memory when names moves, with the same bytes
		k.id = w.names[len(w.names)-len(m.id):]
		w.kept = append(w.kept, k)
		w.keptIDs = w.foot.dtype().AppendEncoded(w.keptIDs, tokens)
		return nil
	}
	w.ids = w.foot.dtype().AppendEncoded(w.ids, tokens)
	return w.placed(m)
}

// placed records a document whose ids were added to the block.
func (w *segmentWriter) placed(m *meta) error {
	if w.block.Documents == 0 {
		w.block.Key = m.key
	}
	w.meta = m.append(w.meta, w.foot.Shuffled)
	w.block.Documents++
	w.block.Tokens += m.tokens
	if len(w.ids) >= w.idMax || w.block.Documents == blockDocuments {
		return w.flush()
	}
	return nil
}

// flush writes the block.
func (w *segmentWriter) flush() error {
	if w.block.Documents == 0 {
		return nil
	}
	b := w.block
	b.At, b.Meta = w.at, int64(len(w.meta))
	b.MetaSum, b.IDSum = crc32.Checksum(w.meta, castagnoli), crc32.Checksum(w.ids, castagnoli)
	for _, part := range [][]byte{w.meta, w.ids} {
		n, err := w.file.Write(part)
		w.at += int64(n)
		if err != nil {
			return err
		}
	}
	w.foot.Blocks = append(w.foot.Blocks, b)
	w.foot.Documents += int64(b.Documents)
	w.foot.Tokens += b.Tokens
	w.block, w.meta, w.ids = block{}, w.meta[:0], w.ids[:0]
	return nil
}

// A rejected is a skipped document, as the spool stores it: a line of JSON.
type rejected struct {
	Part    int            `json:"part"`
	Ordinal int64          `json:"ordinal"` // of the document of the unit that would have been next
	Line    int64          `json:"line"`    // in the part
	Byte    int64          `json:"byte"`
	ID      string         `json:"id,omitempty"`
	Kind    documents.Kind `json:"kind"`
	Error   string         `json:"error"`
}

// reject records a skipped document.
func (w *segmentWriter) reject(part int, ordinal int64, bad *documents.DocumentError) error {
	if w.rejects == nil {
		f, err := w.files.Create(w.rejectPath)
		if err != nil {
			return err
		}
		w.rejects, w.rejectsOut = f, bufio.NewWriter(f)
	}
	line, err := json.Marshal(rejected{part, ordinal, bad.Line, bad.Offset, bad.ID, bad.Kind, bad.Err.Error()})
	if err != nil {
		return err
	}
	line = append(line, '\n')
	w.foot.Rejects++
	w.foot.RejectsSum = crc32.Update(w.foot.RejectsSum, castagnoli, line)
	_, err = w.rejectsOut.Write(line)
	return err
}

// finish completes the segment under its temporary name.
func (w *segmentWriter) finish(next place, parts []totals, last bool) error {
	// parts of a unit are in the order of their inputs
	slices.SortFunc(w.kept, func(a, b keptDocument) int {
		return compareKeys(a.key, a.part, a.offset, b.key, b.part, b.offset)
	})
	for i := range w.kept {
		m := &w.kept[i]
		w.ids = append(w.ids, w.keptIDs[m.at:m.at+w.foot.Width*int(m.tokens)]...)
		if err := w.placed(&m.meta); err != nil {
			return err
		}
	}
	if err := w.flush(); err != nil {
		return err
	}
	w.foot.Next, w.foot.Parts, w.foot.Last = next, parts, last
	text, err := json.Marshal(&w.foot)
	if err != nil {
		return err
	}
	sum := crc32.Checksum(text, castagnoli)
	size := uint32(len(text))
	text = binary.LittleEndian.AppendUint32(text, size)
	text = binary.LittleEndian.AppendUint32(text, sum)
	if _, err := w.file.Write(append(text, segmentEnd...)); err != nil {
		return err
	}
	if w.rejects != nil {
		if err := w.rejectsOut.Flush(); err != nil {
			return err
		}
		if err := w.rejects.Seal(); err != nil {
			return err
		}
	}
	return w.file.Seal()
}

// publish renames the files. The segment is last, because its presence means that the others exist.
func (w *segmentWriter) publish() error {
	if w.rejects != nil {
		if err := w.rejects.Rename(); err != nil {
			return err
		}
	}
	return w.file.Publish()
}

func (w *segmentWriter) abort() {
	w.file.Abort()
	if w.rejects != nil {
		w.rejects.Abort()
	}
}

// errDamaged is wrapped by every error about the contents of a segment.
var errDamaged = errors.New("the file is damaged")

// A segment is an open segment.
type segment struct {
	path string
	file segmentFile
	foot footer
}

// A segmentFile is an open file.
type segmentFile interface {
	io.ReaderAt
	io.Closer
}

// openSegment opens a segment of the job and checks its footer.
func (f *workDir) openSegment(unit, number int) (*segment, error) {
	path := segmentName(f.dir, unit, number)
	s, err := openSegment(f.files, path)
	if err == nil && s.foot.Job != f.d.ID {
		s.close()
		return nil, fmt.Errorf("%s: %w: %w", path, errDamaged, errOtherJob)
	}
	return s, err
}

var errOtherJob = errors.New("the file belongs to an older job in the same folder")

// openSegment opens a segment and checks its footer.
func openSegment(files atomicfile.Files, path string) (*segment, error) {
	f, err := filesystem.Open(files.FS(), path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	s, err := newSegment(path, f, info.Size())
	if err != nil {
		f.Close()
		return nil, err
	}
	return s, nil
}

func newSegment(path string, f segmentFile, size int64) (*segment, error) {
	s := &segment{path: path, file: f}
	var err error
	if s.foot, err = readFooter(f, size); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", path, errDamaged, err)
	}
	return s, nil
}

// readFooter reads the footer of a segment of size bytes and checks that the blocks are within the
// segment.
func readFooter(r io.ReaderAt, size int64) (f footer, err error) {
	least := int64(len(segmentMagic) + segmentTrailer)
	if size < least {
		return f, errors.New("the file is too short")
	}
	var head [len(segmentMagic)]byte
	var tail [segmentTrailer]byte
	if _, err := r.ReadAt(head[:], 0); err != nil {
		return f, err
	}
	if _, err := r.ReadAt(tail[:], size-int64(segmentTrailer)); err != nil {
		return f, err
	}
	if string(head[:]) != segmentMagic || string(tail[8:]) != segmentEnd {
		return f, errors.New("the file does not start and end like a segment")
	}
	n := int64(binary.LittleEndian.Uint32(tail[:]))
	if n > maxFooter || n > size-least {
		return f, errors.New("the length of the footer is wrong")
	}
	text := make([]byte, n)
	end := size - int64(segmentTrailer) - n // of the blocks
	if _, err := r.ReadAt(text, end); err != nil {
		return f, err
	}
	if crc32.Checksum(text, castagnoli) != binary.LittleEndian.Uint32(tail[4:]) {
		return f, errors.New("the checksum of the footer is wrong")
	}
	if err := json.Unmarshal(text, &f); err != nil {
		return f, err
	}
	if f.Format != 1 || f.Width != 2 && f.Width != 4 || f.Next.Part < 0 || len(f.Parts) < f.Next.Part {
		return f, errors.New("the footer has another format")
	}
	at := int64(len(segmentMagic))
	var documents, tokens int64
	for _, b := range f.Blocks {
		if b.At != at || b.Documents <= 0 || b.Meta < 0 || b.Meta > maxBlockContent || b.Tokens < 0 ||
			b.Tokens > maxBlockContent || end-at < b.size(f.Width) {
			return f, errors.New("a block is out of bounds")
		}
		at += b.size(f.Width)
		documents += int64(b.Documents)
		tokens += b.Tokens
	}
	if at != end || documents != f.Documents || tokens != f.Tokens {
		return f, errors.New("the sizes of the blocks do not add up")
	}
	return f, nil
}

// size returns the number of bytes of a block.
func (b *block) size(width int) int64 { return b.Meta + b.Tokens*int64(width) }

// length returns the number of bytes of a block without the ids, or with them.
func (b *block) length(width int, ids bool) int64 {
	if ids {
		return b.size(width)
	}
	return b.Meta
}

func (s *segment) close() { s.file.Close() }

// read reads a block into buf: the metadata of the documents and, if requested, the ids.
func (s *segment) read(n int, buf []byte, ids bool) (metas, idBytes, newBuf []byte, err error) {
	b := &s.foot.Blocks[n]
	size := b.length(s.foot.Width, ids)
	buf = slices.Grow(buf[:0], int(size))[:size]
	if _, err := s.file.ReadAt(buf, b.At); err != nil {
		return nil, nil, buf, fmt.Errorf("%s: %w: %w", s.path, errDamaged, err)
	}
	metas, idBytes = buf[:b.Meta], buf[b.Meta:]
	if crc32.Checksum(metas, castagnoli) != b.MetaSum || ids && crc32.Checksum(idBytes, castagnoli) != b.IDSum {
		return nil, nil, buf, fmt.Errorf("%s: %w: the checksum of the block at byte %d is wrong", s.path, errDamaged,
			b.At)
	}
	return metas, idBytes, buf, nil
}

// verifySegment reads a whole segment and its rejects file.
func (f *workDir) verifySegment(u, number int, record *unitRecord) error {
	if number >= len(record.Segments) {
		return errDamaged
	}
	if err := readRejects(f.files, rejectName(f.dir, u, number), record.Segments[number].footerRejects,
		func(*rejected) error { return nil }); err != nil {
		return err
	}
	s, err := f.openSegment(u, number)
	if err != nil {
		return err
	}
	defer s.close()
	var r blockReader
	for n := range s.foot.Blocks {
		if err := r.open(s, n, true); err != nil {
			return err
		}
		for {
			more, err := r.next()
			if err != nil {
				return err
			}
			if !more {
				break
			}
			r.take()
		}
	}
	return nil
}

// A blockReader iterates over the documents of consecutive blocks.
type blockReader struct {
	buf []byte

	seg     *segment
	ids     bool
	metas   []byte
	rest    []byte // ids
	left    int    // documents
	current meta
}

// open starts a block.
func (r *blockReader) open(s *segment, n int, ids bool) (err error) {
	r.seg, r.ids = s, ids
	r.metas, r.rest, r.buf, err = s.read(n, r.buf, ids)
	r.left = s.foot.Blocks[n].Documents
	return err
}

// next advances to the next document and reports whether there is one. The document is r.current,
// and its ids are the first of r.rest.
func (r *blockReader) next() (bool, error) {
	if r.left == 0 {
		if len(r.metas) > 0 || r.ids && len(r.rest) > 0 {
			return false, fmt.Errorf("%s: %w: a block is longer than its documents", r.seg.path, errDamaged)
		}
		return false, nil
	}
	var err error
	if r.metas, err = r.current.parse(r.metas, r.seg.foot.Shuffled); err != nil {
		return false, fmt.Errorf("%s: %w: %w", r.seg.path, errDamaged, err)
	}
	if r.ids && r.current.tokens > int64(len(r.rest)/r.seg.foot.Width) {
		return false, fmt.Errorf("%s: %w: a block has fewer ids than its documents", r.seg.path, errDamaged)
	}
	r.left--
	return true, nil
}

// take returns the ids of r.current, as they are stored. If ids were requested, it must be called
// once for each document.
func (r *blockReader) take() []byte {
	n := r.current.tokens * int64(r.seg.foot.Width)
	ids := r.rest[:n]
	r.rest = r.rest[n:]
	return ids
}

// readRejects yields the skipped documents of a segment.
func readRejects(files atomicfile.Files, path string, want footerRejects, yield func(*rejected) error) error {
	if want.Rejects == 0 {
		return nil
	}
	f, err := filesystem.Open(files.FS(), path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", errDamaged, err)
		}
		return err
	}
	defer f.Close()
	var sum uint32
	var n int64
	r := bufio.NewReaderSize(f, 1<<16)
	var long []byte
	for {
		line, err := r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			long = append(long, line...)
			continue
		}
		if err == io.EOF && len(line)+len(long) == 0 {
			break
		}
		if err != nil {
			return fmt.Errorf("%s: %w: %w", path, errDamaged, err)
		}
		if len(long) > 0 {
			long = append(long, line...)
			line = long
		}
		sum = crc32.Update(sum, castagnoli, line)
		var bad rejected
		if err := json.Unmarshal(line, &bad); err != nil {
			return fmt.Errorf("%s: %w: %w", path, errDamaged, err)
		}
		long = long[:0]
		n++
		if err := yield(&bad); err != nil {
			return err
		}
	}
	if n != want.Rejects || sum != want.RejectsSum {
		return fmt.Errorf("%s: %w: it has %d lines, or its checksum differs from the segment's footer", path,
			errDamaged, n)
	}
	return nil
}

// footerRejects holds the fields of a segment's footer about its rejects file.
type footerRejects struct {
	Rejects    int64  `json:"rejects,omitempty"`
	RejectsSum uint32 `json:"rejects_sum,omitempty"`
}

// segmentName and rejectName return file names in the job's folder.
func segmentName(dir string, unit, number int) string {
	return objects.Join(dir, fmt.Sprintf("unit-%05d.%04d.segment", unit, number))
}

func rejectName(dir string, unit, number int) string {
	return objects.Join(dir, fmt.Sprintf("unit-%05d.%04d.rejects", unit, number))
}
