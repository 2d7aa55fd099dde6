package documents

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"mula/internal/objects"
)

// A source is an input with random access: a regular file, or an object.
type source struct {
	io.ReaderAt
	file   *os.File        // nil for an object
	object *objects.Object // nil for a file
	size   int64
}

// openInput opens an input for reading until ctx ends. An input without random access is a stream,
// and others are a source.
func openInput(ctx context.Context, input string, stdin io.Reader) (stream io.ReadCloser, s *source, err error) {
	if input == "-" {
		return io.NopCloser(&interruptible{ctx: ctx, r: stdin}), nil, nil
	}
	if objects.IsURL(input) {
		o, err := objects.Open(ctx, input)
		if err != nil {
			return nil, nil, err
		}
		size := o.Info().Size
		if size < 0 {
			return o.Reader(ctx), nil, nil
		}
		return nil, &source{newObjectReader(ctx, o, smallReads, size), nil, o, size}, nil
	}
	f, err := os.Open(input)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case info.IsDir():
		err = fmt.Errorf("%s is a folder; name the files in it", input)
	case info.Mode().IsRegular():
		return nil, &source{f, f, nil, info.Size()}, nil
	default: // such as a named pipe, which may block for a long time
		return struct {
			io.Reader
			io.Closer
		}{&interruptible{ctx: ctx, r: f}, f}, nil, nil
	}
	f.Close()
	return nil, nil, err
}

// stream returns the bytes from the start of a piece, to the end of the input. A line of the piece
// may end after the piece.
func (s *source) stream(ctx context.Context, p Piece) (io.ReadCloser, error) {
	if s.file != nil {
		_, err := s.file.Seek(p.Start, io.SeekStart)
		return s.file, err
	}
	end := s.size
	if p.End >= 0 {
		end = min(end, p.End+smallReads)
	}
	// The bytes that showed the format are not requested again.
	begin := s.ReaderAt.(*objectReader).beginning(p.Start, end)
	return &objectStream{ctx, begin, s.object, s.object.Range(ctx, p.Start+int64(len(begin)), end), end, s.size}, nil
}

// Close closes a file.
func (s *source) Close() error {
	if s.file != nil {
		return s.file.Close()
	}
	return nil
}

// An objectStream reads a range of an object, and then the rest of the object if it is needed.
type objectStream struct {
	ctx    context.Context
	begin  []byte // the first bytes, which are known
	object *objects.Object
	io.ReadCloser
	end, size int64 // the end of the range and of the object
}

func (s *objectStream) Read(p []byte) (int, error) {
	if len(s.begin) > 0 {
		n := copy(p, s.begin)
		s.begin = s.begin[n:]
		return n, nil
	}
	n, err := s.ReadCloser.Read(p)
	if err == io.EOF && s.end < s.size {
		s.ReadCloser.Close()
		s.ReadCloser, s.end = s.object.Range(s.ctx, s.end, s.size), s.size
		err = nil
	}
	return n, err
}

// smallReads is the size of a request for the small reads of a file's metadata.
const smallReads = 64 << 10

// maxReads is the size of a request for a column.
const maxReads = 8 << 20

// An objectReader joins small reads into requests.
type objectReader struct {
	ctx    context.Context
	object *objects.Object
	size   int64
	want   int64 // bytes of a request
	limit  int64 // up to which more bytes are requested than are read

	mutex  sync.Mutex
	window []byte // of the last request
	at     int64  // its first byte
}

func newObjectReader(ctx context.Context, o *objects.Object, want, limit int64) *objectReader {
	return &objectReader{ctx: ctx, object: o, size: o.Info().Size, want: want, limit: limit}
}

// beginning returns the bytes of the window from an offset, up to end.
func (r *objectReader) beginning(off, end int64) []byte {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	end = min(end, r.at+int64(len(r.window)))
	if off < r.at || off >= end {
		return nil
	}
	return slices.Clone(r.window[off-r.at : end-r.at])
}

// ReadAt reads from the window of the last request, or sends a request.
func (r *objectReader) ReadAt(p []byte, off int64) (n int, err error) {
	if off >= r.size {
		return 0, io.EOF
	}
	if off+int64(len(p)) > r.size {
		p, err = p[:r.size-off], io.EOF
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	end := off + int64(len(p))
	if off < r.at || end > r.at+int64(len(r.window)) {
		if int64(len(p)) >= r.want {
			if err := r.object.ReadAt(r.ctx, p, off); err != nil {
				return 0, err
			}
			return len(p), err
		}
		from, to := off, max(end, min(off+r.want, r.limit))
		if to == r.size { // metadata is at the end, and read from its end
			from = max(0, min(from, to-r.want))
		}
		if int64(cap(r.window)) < to-from {
			r.window = make([]byte, to-from)
		}
		r.window, r.at = r.window[:to-from], from
		if err := r.object.ReadAt(r.ctx, r.window, from); err != nil {
			r.window = r.window[:0]
			return 0, err
		}
	}
	return copy(p, r.window[off-r.at:]), err
}

// interruptible makes reads of r end when ctx ends, which reads of a terminal or a pipe do not. The
// goroutine of an abandoned read ends when r has data.
type interruptible struct {
	ctx  context.Context
	r    io.Reader
	buf  []byte
	rest []byte // read but not returned yet
}

func (i *interruptible) Read(p []byte) (int, error) {
	if len(i.rest) == 0 {
		if i.buf == nil {
			i.buf = make([]byte, aheadBytes)
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
