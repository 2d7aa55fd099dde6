package documents

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// DefaultMaxLine is the length of the longest line that is read unless [ReadOptions.MaxLine] says otherwise, in bytes after decompression.
const DefaultMaxLine = 256 << 20

// maxWindow is the largest window of a zstd stream that is read, and with it about the memory that reading one takes. It is the limit of the
// zstd program as well, which beyond it must be asked with --long.
const maxWindow = 128 << 20

// readBuffer is the size of the pieces in which files are read and decompressed.
const readBuffer = 1 << 20

// ReadOptions are the choices for [ReadDocuments]; the zero value is good.
type ReadOptions struct {
	// MaxLine is the length of the longest line that is read, in bytes after decompression; 0 means [DefaultMaxLine].
	MaxLine int
	// Stdin is what the input "-" reads; nil means os.Stdin.
	Stdin io.Reader
	// OnRead, if not nil, is called with the number of bytes that were just read from an input, before decompression. It is called by the
	// goroutine that iterates.
	OnRead func(bytes int64)
}

// ReadDocuments reads documents from files of JSON lines: each line is an object (RFC 8259, UTF-8) with the document in its string field
// "text" and a string or number "id", which may be absent; other fields are ignored. Lines of white space alone are passed over. A file may be
// plain, gzip (of one or many members) or zstd (of one or many frames, windows up to 128 MiB); its first bytes tell. The input "-" is
// standard input. Inputs are read in their order, one after the other.
//
// A line that gives no document yields a [*DocumentError]; iteration goes on with the next line, so that the caller can count it and
// continue. After an error of kind [BadStream], and after any other error (a file that cannot be opened, ctx), iteration ends: how many
// documents are missing then cannot be known.
func ReadDocuments(ctx context.Context, inputs []string, opts ReadOptions) iter.Seq2[Document, error] {
	if opts.MaxLine <= 0 {
		opts.MaxLine = DefaultMaxLine
	}
	if opts.Stdin == nil {
		opts.Stdin = os.Stdin
	}
	return func(yield func(Document, error) bool) {
		r := &documentReader{ctx: ctx, opts: opts, ahead: newAhead()}
		defer r.close()
		for _, input := range inputs {
			if !r.readInput(input, yield) {
				return
			}
		}
	}
}

// documentReader reads one input after the other. Its decoders and buffers serve all of them.
type documentReader struct {
	ctx     context.Context
	opts    ReadOptions
	raw     *bufio.Reader // the input as it is
	lines   *bufio.Reader // the input decompressed; the same as raw if there is nothing to decompress
	inflate *bufio.Reader // what lines is when there is; it reads from ahead
	ahead   *ahead
	gzip    *gzip.Reader // of one member
	zstd    *zstd.Decoder
	scanner lineScanner
	long    []byte // a line longer than the buffer of lines

	file   string
	number int64 // of the line
	offset int64 // of the line, in bytes
}

func (r *documentReader) close() {
	if r.zstd != nil {
		r.zstd.Close()
	}
}

// readInput yields the documents of one input. It reports whether to go on with the next.
func (r *documentReader) readInput(input string, yield func(Document, error) bool) bool {
	r.file, r.number, r.offset = input, 1, 0
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	source, err := r.open(ctx, input)
	if err != nil {
		yield(Document{}, fmt.Errorf("reading documents: %w", err))
		return false
	}
	defer source.Close()
	defer func() {
		cancel() // ends a Read that waits
		r.ahead.stop()
	}()
	if err := r.start(&counted{Reader: source, report: r.opts.OnRead}); err != nil {
		yield(Document{}, err)
		return false
	}
	for {
		line, err := r.readLine()
		if err == io.EOF {
			return true
		}
		var doc Document
		if err == nil {
			if len(bytes.TrimLeft(line, " \t\r\n")) == 0 {
				r.next(len(line))
				continue
			}
			doc, err = r.document(line)
		}
		if !yield(doc, err) {
			return false
		}
		if bad, ok := err.(*DocumentError); err != nil && (!ok || bad.Kind == BadStream) {
			return false
		}
		r.next(len(line))
	}
}

// open opens an input for reading that ends when ctx does.
func (r *documentReader) open(ctx context.Context, input string) (io.ReadCloser, error) {
	if input == "-" {
		return io.NopCloser(&interruptible{ctx: ctx, r: r.opts.Stdin}), nil
	}
	f, err := os.Open(input)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case info.IsDir():
		err = fmt.Errorf("%s is a directory; name the files in it", input)
	case info.Mode().IsRegular():
		return f, nil
	default: // such as a named pipe, which may have nothing to read for long
		return struct {
			io.Reader
			io.Closer
		}{&interruptible{ctx: ctx, r: f}, f}, nil
	}
	f.Close()
	return nil, err
}

// next moves on to the line after one of n bytes.
func (r *documentReader) next(n int) {
	r.number++
	r.offset += int64(n)
}

// start finds out how source is compressed and sets up r.lines.
func (r *documentReader) start(source *counted) error {
	if r.raw == nil {
		r.raw = bufio.NewReaderSize(source, readBuffer)
	} else {
		r.raw.Reset(source)
	}
	r.lines = r.raw
	head, err := r.raw.Peek(6)
	if err != nil && err != io.EOF {
		return r.broken(0, err)
	}
	magic := func(s string) bool { return bytes.HasPrefix(head, []byte(s)) }
	var decoder io.Reader
	switch {
	case magic("\x1f\x8b"):
		if r.gzip == nil {
			r.gzip = new(gzip.Reader)
		}
		members := &gzipMembers{z: r.gzip, raw: r.raw, input: source}
		if err := members.next(); err != nil {
			return r.broken(0, err)
		}
		decoder = members
	case magic("\x28\xb5\x2f\xfd"), len(head) >= 4 && head[0]&0xf0 == 0x50 && string(head[1:4]) == "\x2a\x4d\x18": // a frame, a skippable frame
		if r.zstd == nil {
			// One goroutine: more of them make a single stream slower, and files can be read side by side.
			r.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderMaxMemory(maxWindow))
			if err != nil {
				return err
			}
		}
		if err := r.zstd.Reset(r.raw); err != nil {
			return r.broken(0, err)
		}
		decoder = r.zstd
	case magic("PAR1"), magic("ARROW1"):
		return fmt.Errorf("%s is a Parquet or Arrow file; documents are read from JSON lines, plain, gzip or zstd", r.file)
	case strings.HasSuffix(r.file, ".gz"), strings.HasSuffix(r.file, ".zst"):
		err := fmt.Errorf("the file begins with %q, which is neither gzip nor zstd; if it is plain, rename it", head)
		if len(head) == 0 {
			err = errors.New("the file is empty, which no compressed file is; fetch it again, or leave it out")
		}
		return &DocumentError{File: r.file, Line: r.number, Kind: BadStream, Err: err}
	default:
		return nil
	}
	if r.inflate == nil {
		r.inflate = bufio.NewReaderSize(r.ahead, readBuffer)
	} else {
		r.inflate.Reset(r.ahead)
	}
	r.ahead.start(decoder, source)
	r.lines = r.inflate
	return nil
}

// broken is the error of an input that cannot be read beyond n bytes after the start of the line.
func (r *documentReader) broken(n int, err error) error {
	if ctxErr := r.ctx.Err(); ctxErr != nil {
		return fmt.Errorf("reading %s: %w", r.file, ctxErr)
	}
	var trailing trailingError
	switch {
	case errors.As(err, &trailing):
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = fmt.Errorf("the compressed stream is cut short here; fetch the file again: %w", err)
	case errors.Is(err, zstd.ErrWindowSizeExceeded), errors.Is(err, zstd.ErrDecoderSizeExceeded):
		err = fmt.Errorf("the zstd window is above %d MiB; compress the file again with --long=27 or less: %w", maxWindow>>20, err)
	default:
		err = fmt.Errorf("the file cannot be read beyond this place; fetch it again: %w", err)
	}
	return &DocumentError{File: r.file, Line: r.number, Offset: r.offset + int64(n), Kind: BadStream, Err: err}
}

// readLine gives the next line with the line feed that ends it, valid until the next call. A line above the limit is passed over, which
// moves r.offset; the error says so.
func (r *documentReader) readLine() ([]byte, error) {
	if cap(r.long) > 16*readBuffer { // one giant in a corpus should not be carried along to its end
		r.long = nil
	}
	r.long = r.long[:0]
	passed := int64(0) // bytes of a line above the limit
	for {
		if err := r.ctx.Err(); err != nil {
			return nil, fmt.Errorf("reading %s: %w", r.file, err)
		}
		part, err := r.lines.ReadSlice('\n')
		length := int64(len(r.long)+len(part)) + passed
		if err != nil && err != bufio.ErrBufferFull && err != io.EOF {
			return nil, r.broken(int(length), err)
		}
		if err == io.EOF && length == 0 {
			return nil, io.EOF
		}
		whole := err == nil || err == io.EOF
		if content := length - int64(len(part)-len(bytes.TrimSuffix(part, []byte("\n")))); content > int64(r.opts.MaxLine) {
			passed, r.long = length, r.long[:0]
			if whole {
				bad := &DocumentError{File: r.file, Line: r.number, Offset: r.offset, Kind: LineTooLong,
					Err: fmt.Errorf("the line has %d bytes, at most %d are read; split the document or raise the limit", content, r.opts.MaxLine)}
				r.offset += passed
				return nil, bad
			}
			continue
		}
		if whole && len(r.long) == 0 {
			return part, nil
		}
		r.long = append(r.long, part...)
		if whole {
			return r.long, nil
		}
	}
}

// document makes a document of a line. Its text and its id lie in one piece of memory of their own.
func (r *documentReader) document(line []byte) (Document, error) {
	id, text, bad := r.scanner.scan(line)
	if bad != nil {
		return Document{}, &DocumentError{File: r.file, Line: r.number, Offset: r.offset + int64(bad.at), ID: string(id), Kind: bad.kind, Err: bad.err}
	}
	var memory []byte
	if len(id) > 0 {
		memory = append(append(make([]byte, 0, len(id)+len(text)), id...), text...)
	} else {
		base := filepath.Base(r.file)
		memory = make([]byte, 0, len(base)+len(":9223372036854775807")+len(text))
		memory = strconv.AppendInt(append(append(memory, base...), ':'), r.number, 10)
		id = memory
		memory = append(memory, text...)
	}
	n := len(id)
	return Document{
		ID:     unsafe.String(&memory[0], n), // nobody changes these bytes: the text, which may be, lies behind them
		Text:   memory[n:len(memory):len(memory)],
		File:   r.file,
		Line:   r.number,
		Offset: r.offset,
	}, nil
}

// gzipMembers reads the members of a gzip file one after the other. A gzip.Reader could do that by itself, but it does not tell a member
// that is cut short from a few bytes that belong to no member.
type gzipMembers struct {
	z     *gzip.Reader
	raw   *bufio.Reader // what z reads, which it does not read beyond the end of a member
	input *counted      // what raw reads
}

// next begins a member.
func (g *gzipMembers) next() error {
	err := g.z.Reset(g.raw)
	g.z.Multistream(false)
	if err == io.EOF { // in the middle of its header
		return io.ErrUnexpectedEOF
	}
	return err
}

func (g *gzipMembers) Read(p []byte) (int, error) {
	for {
		n, err := g.z.Read(p)
		if err != io.EOF {
			return n, err
		}
		magic, err := g.raw.Peek(2)
		switch {
		case err != nil && err != io.EOF:
			return n, err
		case len(magic) == 0:
			return n, io.EOF
		case !strings.HasPrefix("\x1f\x8b", string(magic)):
			return n, trailingError(g.input.read - int64(g.raw.Buffered()))
		}
		if err := g.next(); n > 0 || err != nil {
			return n, err
		}
	}
}

// A trailingError says from which byte of a file on something follows the gzip members that is no member.
type trailingError int64

func (e trailingError) Error() string {
	return fmt.Sprintf("something that is no gzip follows the compressed data, from byte %d of the file on; fetch the file again, or cut it off there", int64(e))
}

// counted counts and reports how much is read.
type counted struct {
	io.Reader
	report func(bytes int64) // may be nil
	read   int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.read += int64(n)
	if c.report != nil && n > 0 {
		c.report(int64(n))
	}
	return n, err
}

// interruptible makes reads of r end when ctx does, as those of a terminal or a pipe do not by themselves. The goroutine of a read that was
// given up ends when r has something to read.
type interruptible struct {
	ctx  context.Context
	r    io.Reader
	buf  []byte
	rest []byte // read and not yet handed on
}

func (i *interruptible) Read(p []byte) (int, error) {
	if len(i.rest) == 0 {
		if i.buf == nil {
			i.buf = make([]byte, readBuffer)
		}
		type result struct {
			n   int
			err error
		}
		done := make(chan result, 1)
		go func() {
			n, err := i.r.Read(i.buf)
			done <- result{n, err}
		}()
		select {
		case <-i.ctx.Done():
			return 0, i.ctx.Err()
		case got := <-done:
			i.rest = i.buf[:got.n]
			if got.err != nil && got.n == 0 {
				return 0, got.err
			}
		}
	}
	n := copy(p, i.rest)
	i.rest = i.rest[n:]
	return n, nil
}
