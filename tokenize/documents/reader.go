package documents

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/klauspost/compress/zstd"

	"mula/internal/objects"
)

// readBuffer is the size of the line buffers.
const readBuffer = 1 << 20

// byteOrderMark is U+FEFF in UTF-8, which some programs write at the start of a file. It does not
// belong to a document.
const byteOrderMark = "\xef\xbb\xbf"

// A Reader reads the documents of one piece. Only one goroutine may use it, except for BytesRead.
type Reader struct {
	ctx    context.Context // ends when the Reader is closed
	cancel context.CancelFunc
	piece  Piece
	o      Options

	format Format
	next   func() (Document, error)
	err    error // the final error
	lines  int64 // see Lines
	closed bool

	// For every format: the file.
	file    io.Closer
	version string    // of an object
	sum     hash.Hash // nil if the bytes are not hashed
	read    atomic.Int64

	// For sequential formats: the decompressed content.
	*machine
	in     *bufio.Reader
	header zstd.Header // of the first frame
	offset int64       // of the next byte of in
	start  int64       // of the current line or object
	number int64       // of that line or object, from 1
	line   int64       // for JSON: of the next byte, from 1
	array  bool        // for JSON: the objects are in an array
	values int64       // for JSON: number of objects read

	// For Parquet and Arrow.
	rows    rowReader
	hashed  chan struct{} // closed when hashRange has ended
	hashErr error
}

// A rowReader reads documents of a format with rows.
type rowReader interface {
	next() (Document, error)
	skip(row int64) error // continue after this row of the file
}

// A machine is the memory for reading. It is reused for later readers.
type machine struct {
	raw, decoded *ahead
	rawBuf       *bufio.Reader // of raw
	decodedBuf   *bufio.Reader // of decoded
	decoders     decoders
	scanner      lineScanner
	long         []byte // a line longer than the buffer
	slab         slab
}

var machines = sync.Pool{New: func() any { return &machine{raw: new(ahead), decoded: new(ahead)} }}

// buffer returns the buffer of an ahead, which is allocated on first use.
func buffer(b **bufio.Reader, of *ahead) *bufio.Reader {
	if *b == nil {
		*b = bufio.NewReaderSize(of, readBuffer)
	} else {
		(*b).Reset(of)
	}
	return *b
}

// withDefaults sets the defaults of unset options.
func (o Options) withDefaults() Options {
	if o.Text == "" {
		o.Text = "text"
	}
	if o.MaxLine <= 0 {
		o.MaxLine = defaultMaxLine
	}
	if o.Stdin == nil {
		o.Stdin = os.Stdin
	}
	return o
}

// Open opens a piece for reading until ctx ends.
func Open(ctx context.Context, p Piece, o Options) (*Reader, error) {
	o = o.withDefaults()
	ctx, cancel := context.WithCancel(ctx)
	r := &Reader{ctx: ctx, cancel: cancel, piece: p, o: o, number: 1, sum: sha256.New(),
		machine: machines.Get().(*machine)}
	if err := r.open(); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

func (r *Reader) open() error {
	if err := r.scanner.find(r.o.Text, r.o.idField()); err != nil {
		return err
	}
	stream, source, err := openInput(r.ctx, r.piece.File, r.o.Stdin)
	if err != nil {
		return fmt.Errorf("reading documents: %w", err)
	}
	r.piece.File = objects.Clean(r.piece.File) // for documents and messages
	if source != nil {
		r.file = source
		if source.object != nil {
			r.version = source.object.Info().Version
		}
		if rows, err := r.openRows(source); rows || err != nil {
			return err
		}
		if stream, err = source.stream(r.ctx, r.piece); err != nil {
			return fmt.Errorf("reading documents: %w", err)
		}
	}
	r.file = stream
	return r.openStream(stream)
}

// openRows sets up reading of a Parquet file or an Arrow file, which needs random access. It
// reports whether the file has such a format.
func (r *Reader) openRows(s *source) (bool, error) {
	head := make([]byte, 8)
	n, err := s.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return false, fmt.Errorf("reading documents: %w", err)
	}
	if magic := byMagic(head[:n]); magic == Auto || magic == Arrow && head[0] == 0xff {
		return false, nil
	}
	if r.format, err = formatOf(r.piece.File, head[:n], plain, r.o.Format); err != nil {
		return false, r.faultAt(0, 0, BadStream, err)
	}
	if s.object != nil {
		r.sum = nil // the columns that are not needed are not read
	}
	if r.format == Parquet {
		r.rows, err = newParquetReader(r, s)
	} else {
		r.rows, err = newArrowFileReader(r, s)
	}
	if err != nil {
		return false, err
	}
	r.next = r.rows.next
	return true, nil
}

// openStream sets up sequential reading.
func (r *Reader) openStream(file io.Reader) error {
	limit := int64(-1)
	if r.piece.End >= 0 {
		limit = r.piece.End - r.piece.Start
	}
	r.offset = r.piece.Start
	r.raw.onRead = func(n int64) { r.read.Add(n) }
	r.raw.startFile(file, r.sum, limit)
	r.in = buffer(&r.rawBuf, r.raw)
	head, err := r.rawBuf.Peek(4)
	if err != nil && err != io.EOF {
		return r.broken(1, r.offset, err)
	}
	c := plain
	if r.piece.Start == 0 && r.piece.End < 0 {
		c = compressionOf(head)
	}
	if c != plain {
		if c == inZstd {
			head, _ = r.rawBuf.Peek(min(r.rawBuf.Buffered(), zstd.HeaderMaxSize))
			_ = r.header.Decode(head) // the decoder reports errors
		}
		decoder, err := r.decoders.open(c, r.rawBuf, func() int64 { return r.raw.handed - int64(r.rawBuf.Buffered()) })
		if err != nil {
			return r.broken(1, 0, err)
		}
		r.decoded.startDecoder(decoder, r.raw)
		r.in = buffer(&r.decodedBuf, r.decoded)
	}
	if r.piece.Start == 0 && !r.o.KeepMark {
		if head, _ := r.in.Peek(len(byteOrderMark)); string(head) == byteOrderMark {
			// an error is returned again after all data before it
			r.in.Discard(len(byteOrderMark))
			r.offset += int64(len(byteOrderMark))
		}
	}
	if r.piece.End >= 0 { // it was inspected when it was cut
		r.format = r.o.Format
		if named, _ := byName(r.piece.File); r.format == Auto {
			r.format = JSONLines
			if named == Text {
				r.format = Text
			}
		}
	} else {
		head, err := r.in.Peek(8)
		if err == nil && r.o.Format == Auto && byMagic(head) == Auto {
			head, err = r.firstLine()
		}
		// otherwise the error is returned again after all data before it
		if err != nil && err != io.EOF && len(head) == 0 {
			return r.broken(1, 0, err)
		}
		if r.format, err = formatOf(r.piece.File, head, c, r.o.Format); err != nil {
			return r.faultAt(0, 0, BadStream, err)
		}
	}
	switch {
	case r.format == Parquet:
		return r.faultAt(0, 0, BadStream,
			errors.New("a Parquet file is read from its end, so it cannot be a pipe or a "+
				"compressed file; save it uncompressed and name the file"))
	case r.format == Arrow:
		rows, err := newArrowStreamReader(r)
		if err != nil {
			return err
		}
		r.rows, r.next = rows, rows.next
	case r.format == JSON:
		r.next = r.nextJSON
		return r.startJSON()
	case r.format == Text && r.o.Unit == wholeFile:
		r.next = r.nextFile
	default:
		r.next = r.nextLine
		return r.startLines()
	}
	return nil
}

// firstLine peeks at the first line, or a full buffer of it.
func (r *Reader) firstLine() ([]byte, error) {
	for {
		n := r.in.Buffered()
		head, err := r.in.Peek(n)
		if err != nil || n == r.in.Size() || bytes.IndexByte(bytes.TrimLeft(head, " \t\r\n"), '\n') >= 0 {
			return head, err
		}
		// reads once: a pipe may block for a long time
		if head, err = r.in.Peek(n + 1); err != nil {
			return head, err
		}
	}
}

// Next returns the next document. At the end of the piece the error is [io.EOF]. After a
// [*DocumentError] of any kind except [BadStream] the next call continues with the next document.
// Any other error is final.
func (r *Reader) Next() (Document, error) {
	if r.err != nil {
		return Document{}, r.err
	}
	if err := r.ctx.Err(); err != nil {
		r.err = r.stopped(err)
		return Document{}, r.err
	}
	doc, err := r.next()
	if err != nil && !recoverable(err) {
		r.err = err
	}
	return doc, err
}

// recoverable reports whether reading can continue after an error.
func recoverable(err error) bool {
	bad, ok := err.(*DocumentError)
	return ok && bad.Kind != BadStream
}

// Lines returns the number of lines (rows) of the piece that were read so far, including bad and
// blank ones. For JSON over several lines it is the number of line feeds before the end of the last
// object.
func (r *Reader) Lines() int64 { return r.lines }

// BytesRead returns the number of bytes of the file that were read so far, before decompression.
// Any goroutine may call it.
func (r *Reader) BytesRead() int64 {
	n := r.read.Load()
	if r.piece.End >= 0 && r.rows == nil {
		n = min(n, r.piece.End-r.piece.Start)
	}
	return n
}

// SHA256 returns the hash of the piece's bytes on disk in hexadecimal after Next has returned
// [io.EOF], and "" before that. The pieces of a file together have all bytes of the file: a line is
// hashed with the piece that holds its bytes. Bytes around row groups and record batches are hashed
// with the first piece or with the previous piece. Of objects of Parquet and Arrow it returns "":
// not all of their bytes are read.
func (r *Reader) SHA256() string {
	if r.err != io.EOF || r.sum == nil {
		return ""
	}
	return hex.EncodeToString(r.sum.Sum(nil))
}

// Skip continues after a document, valid or not, that another reader of the same piece returned.
// offset is the document's Offset, and lines is the value of Lines at that time. Skip must be
// called before the first Next. The skipped bytes are read for the hash but not parsed.
func (r *Reader) Skip(offset, lines int64) error {
	var err error
	switch {
	case r.rows != nil:
		err = r.rows.skip(offset)
		r.lines = lines
	case r.format == JSON:
		err = r.skipJSON(offset, lines)
	case r.format == Text && r.o.Unit == wholeFile:
		r.next = func() (Document, error) { return Document{}, r.finish() }
		r.lines = lines
	default:
		err = r.skipLine(offset, lines)
	}
	if err != nil {
		r.err = err
	}
	return err
}

// Version returns the ETag or generation of the object that is read, and "" for other inputs.
func (r *Reader) Version() string { return r.version }

// Close ends reading and releases the reader's memory and file.
func (r *Reader) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	r.cancel() // ends a blocked Read
	if r.hashed != nil {
		<-r.hashed
	}
	m := r.machine
	m.decoded.stop()
	m.raw.stop()
	if r.in != nil && r.in == m.decodedBuf {
		m.decoders.release(r.header)
	}
	m.dropLong()
	r.machine, r.in = nil, nil
	machines.Put(m)
	if r.err == nil {
		r.err = fmt.Errorf("reading %s: %w", r.piece.File, os.ErrClosed)
	}
	if r.file != nil {
		return r.file.Close()
	}
	return nil
}

// finish reads the rest of the file for the hash, and returns io.EOF.
func (r *Reader) finish() error {
	if err := r.waitForHash(); err != nil {
		return err
	}
	if r.in != nil && r.offset < r.piece.End {
		return r.broken(r.lines+1, r.offset, advise("the file ends here, but had %d bytes when it was split into "+
			"pieces; it was changed since then; start again", r.piece.End))
	}
	if r.in != nil && r.piece.End < 0 {
		if _, err := io.Copy(io.Discard, r.in); err != nil {
			return r.broken(r.number, r.offset, err)
		}
	}
	return io.EOF
}

func (r *Reader) stopped(err error) error { return fmt.Errorf("reading %s: %w", r.piece.File, err) }

// faultAt returns an error of a document, or of the rest of the file.
func (r *Reader) faultAt(line, offset int64, kind Kind, err error) error {
	return &DocumentError{File: r.piece.File, Line: line, Offset: offset, Kind: kind, Err: err}
}

// broken is the error of an input that cannot be read beyond a position.
func (r *Reader) broken(line, offset int64, err error) error {
	if stop := r.ctx.Err(); stop != nil {
		return r.stopped(stop)
	}
	return r.faultAt(line, offset, BadStream, explain(err))
}

// tooLong is the error of a document above the limit.
func (r *Reader) tooLong(what string, length int64) error {
	err := fmt.Errorf("the %s has %d bytes, and the limit is %d", what, length, r.o.MaxLine)
	return r.faultAt(r.number, r.start, LineTooLong, err)
}

// buffered returns the available content, at least one byte; nothing at the end.
func (r *Reader) buffered() ([]byte, error) {
	if r.in.Buffered() == 0 {
		if err := r.ctx.Err(); err != nil {
			return nil, r.stopped(err)
		}
		if _, err := r.in.Peek(1); err == io.EOF {
			return nil, nil
		} else if err != nil {
			return nil, r.broken(r.number, r.offset, err)
		}
	}
	return r.in.Peek(r.in.Buffered())
}

// discardTo advances to a byte of the content.
func (r *Reader) discardTo(offset int64) error {
	for r.offset < offset {
		b, err := r.buffered()
		if err != nil {
			return err
		}
		if len(b) == 0 {
			return fmt.Errorf("reading %s: the file ends at byte %d, but an earlier run read up to byte %d; the file "+
				"was changed since then", r.piece.File, r.offset, offset)
		}
		n, _ := r.in.Discard(int(min(int64(len(b)), offset-r.offset)))
		r.offset += int64(n)
	}
	return nil
}

// document returns the document of a line or object. Its text and its id share newly allocated
// memory.
func (r *Reader) document(line []byte) (Document, error) {
	id, text, bad := r.scanner.scan(line)
	if bad != nil {
		// within the line, even if that is truncated: see Skip
		at := min(bad.at, max(0, len(line)-1))
		return Document{}, &DocumentError{File: r.piece.File, Line: r.number, Offset: r.start + int64(at),
			ID: string(id), Kind: bad.kind, Err: bad.err}
	}
	// a very large text keeps the memory that it was read into
	if len(r.long) > 0 && len(text) > cap(r.long)/2 {
		r.long = nil
		return Document{ID: string(id), Text: text[:len(text):len(text)], File: r.piece.File, Line: r.number,
			Offset: r.start}, nil
	}
	return r.own(id, text), nil
}

// own returns a document with copies of an id and a text in temporary memory.
func (r *Reader) own(id, text []byte) Document {
	memory := r.slab.take(len(id) + len(text))
	memory = append(append(memory, id...), text...)
	doc := Document{Text: memory[len(id):], File: r.piece.File, Line: r.number, Offset: r.start}
	if len(id) > 0 {
		// these bytes never change; the text, which may change, is after them
		doc.ID = unsafe.String(&memory[0], len(id))
	}
	return doc
}

// dropLong empties long, so that the memory of one very large document is not kept to the end of a
// corpus.
func (m *machine) dropLong() {
	if cap(m.long) > 16*readBuffer {
		m.long = nil
	}
	m.long = m.long[:0]
}

// addLong appends to long. It grows by doubling, which leaves less garbage than append for large
// slices.
func (m *machine) addLong(part []byte) {
	if n := len(m.long) + len(part); n > cap(m.long) {
		m.long = append(make([]byte, 0, max(n, 2*cap(m.long))), m.long...)
	}
	m.long = append(m.long, part...)
}

// A slab is memory for many documents, which avoids an allocation for each.
type slab []byte

const slabSize = 128 << 10

// take returns n bytes of memory that have no other user.
func (s *slab) take(n int) []byte {
	if n > slabSize/8 {
		return make([]byte, 0, n)
	}
	if n > len(*s) {
		*s = make([]byte, slabSize)
	}
	memory := (*s)[:0:n]
	*s = (*s)[n:]
	return memory
}
