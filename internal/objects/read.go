package objects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Sizes of the requests of [Object.Reader]: chunks grow from the first size to the last, and
// chunksAhead of them are requested before they are needed.
const (
	firstChunk  = 256 << 10
	lastChunk   = 4 << 20
	chunksAhead = 4
)

// An Object is an object opened for reading. Its methods may be called by several goroutines.
type Object struct {
	at       location
	info     Info
	noRanges atomic.Bool // the server sends complete objects only
}

// Open returns an object for reading. It reads the object's facts, with one request.
func Open(ctx context.Context, address string) (*Object, error) {
	info, err := Stat(ctx, address)
	if err != nil {
		return nil, err
	}
	return OpenVersion(ctx, address, info)
}

// OpenVersion returns an object for reading whose facts are known. It sends no request. Reading
// fails if the object has another version or size.
func OpenVersion(ctx context.Context, address string, info Info) (*Object, error) {
	l, err := locateObject(ctx, address)
	if err != nil {
		return nil, err
	}
	return &Object{at: l, info: info}, nil
}

// Info returns the facts about the object when it was opened.
func (o *Object) Info() Info { return o.info }

// HasRanges returns false after a read from a server that sends complete objects only.
func (o *Object) HasRanges() bool { return !o.noRanges.Load() }

// ReadAt reads len(p) bytes from byte off. It returns an error unless it has read all of them. A
// broken response is resumed at the first byte that is missing.
func (o *Object) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || o.info.Size >= 0 && off+int64(len(p)) > o.info.Size {
		return fmt.Errorf("%s: bytes %d to %d are outside the object's %d bytes", o.at.name(), off, off+int64(len(p)),
			o.info.Size)
	}
	r := newRetrier()
	for len(p) > 0 {
		n, err := o.readOnce(ctx, p, off)
		p, off = p[n:], off+int64(n)
		if n > 0 {
			r.progress()
		}
		if len(p) == 0 {
			break
		}
		if err == nil {
			err = temporary(io.ErrUnexpectedEOF)
		}
		if err = r.again(ctx, err); err != nil {
			return fmt.Errorf("%s: reading byte %d: %w", o.at.name(), off, err)
		}
	}
	return nil
}

// readOnce sends one request for p and returns how many bytes of it arrived.
func (o *Object) readOnce(ctx context.Context, p []byte, off int64) (int, error) {
	b, err := o.at.open(ctx, off, int64(len(p)), o.info)
	if err != nil {
		return 0, err
	}
	defer b.Close()
	if !b.partial {
		o.noRanges.Store(true)
		if off > 0 {
			return 0, errNoRanges
		}
	}
	n, err := io.ReadFull(b, p)
	if err != nil {
		err = temporary(err)
	}
	return n, err
}

var errNoRanges = errors.New("the server does not send parts of files; download the file and name the local one")

// A body is the content of a response, checked against the request.
type body struct {
	io.ReadCloser
	cancel  context.CancelFunc
	partial bool  // the content is the requested range
	start   int64 // of the content in the object; 0 if the server does not send ranges
	info    Info

	// A read without data for this time fails.
	stall time.Duration
	timer *time.Timer
}

func (b *body) Read(p []byte) (int, error) {
	if b.timer == nil {
		b.timer = time.AfterFunc(b.stall, b.cancel)
	} else {
		b.timer.Reset(b.stall)
	}
	n, err := b.ReadCloser.Read(p)
	counters.read.Add(int64(n))
	if !b.timer.Stop() && err != nil {
		err = fmt.Errorf("no data in %v", b.stall)
	}
	return n, err
}

func (b *body) Close() error {
	if b.timer != nil {
		b.timer.Stop()
	}
	err := b.ReadCloser.Close()
	b.cancel()
	return err
}

// open sends one request for n bytes from off, or all bytes from off if n is -1. It compares the
// response with the request and with the wanted facts: Size -1 and Version "" are unknown.
func (l location) open(ctx context.Context, off, n int64, want Info) (*body, error) {
	stall := patience(ctx) / 6
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	waiting := time.AfterFunc(2*stall, cancel)
	resp, err := l.get(ctx, l.key, off, n, want.Version)
	if !waiting.Stop() && outer.Err() == nil {
		if resp != nil {
			resp.Body.Close()
		}
		err = temporary(fmt.Errorf("no response in %v", 2*stall))
	}
	if err != nil {
		cancel()
		if f := (*failure)(nil); errors.As(err, &f) && f.status == http.StatusRequestedRangeNotSatisfiable {
			return nil, fmt.Errorf("%w: it does not have byte %d", ErrChanged, off)
		}
		return nil, err
	}
	b := &body{ReadCloser: resp.Body, cancel: cancel, info: l.info(resp), stall: stall}
	b.info.Size = resp.ContentLength
	if b.partial = resp.StatusCode == http.StatusPartialContent; b.partial {
		b.start, b.info.Size, err = contentRange(resp.Header.Get("Content-Range"), off, n, resp.ContentLength)
	}
	switch {
	case err != nil:
		err = temporary(err)
	case want.Version != "" && b.info.Version != want.Version:
		err = fmt.Errorf("%w: its version was %s, and is %s", ErrChanged, want.Version, b.info.Version)
	case want.Size >= 0 && b.info.Size >= 0 && b.info.Size != want.Size:
		err = fmt.Errorf("%w: its size was %d, and is %d", ErrChanged, want.Size, b.info.Size)
	}
	if err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// contentRange reads the header Content-Range and compares it with the requested range. The result
// is the first byte, and the size of the object or -1.
func contentRange(header string, off, n, length int64) (start, size int64, err error) {
	bad := fmt.Errorf("the server sent the range %q instead of %d bytes from byte %d", header, n, off)
	text, ok := strings.CutPrefix(header, "bytes ")
	span, total, ok2 := strings.Cut(text, "/")
	from, to, ok3 := strings.Cut(span, "-")
	if !ok || !ok2 || !ok3 {
		return 0, 0, bad
	}
	start, err = strconv.ParseInt(from, 10, 64)
	last, err2 := strconv.ParseInt(to, 10, 64)
	size, err3 := int64(-1), error(nil)
	if total != "*" {
		size, err3 = strconv.ParseInt(total, 10, 64)
	}
	end := off + n
	if n < 0 || size >= 0 && end > size {
		end = size
	}
	if err != nil || err2 != nil || err3 != nil || start != off || end >= 0 && last+1 != end ||
		length >= 0 && length != last+1-start {
		return 0, 0, bad
	}
	return start, size, nil
}

// setRange asks for n bytes from off.
func setRange(h http.Header, off, n int64) {
	switch {
	case n >= 0:
		h.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+n-1))
	case off > 0:
		h.Set("Range", fmt.Sprintf("bytes=%d-", off))
	}
}

// Reader returns the content from the first byte to the last, until ctx ends. It requests several
// ranges ahead, and resumes broken responses. If the server does not send ranges, it reads one
// response, and repeats it from the start if it breaks.
func (o *Object) Reader(ctx context.Context) io.ReadCloser { return o.Range(ctx, 0, o.info.Size) }

// Range is [Object.Reader] for the bytes [from, to).
func (o *Object) Range(ctx context.Context, from, to int64) io.ReadCloser {
	ctx, cancel := context.WithCancel(ctx)
	r := &reader{o: o, ctx: ctx, cancel: cancel, at: from, end: to, tries: newRetrier()}
	if to >= 0 {
		r.chunks = make(chan chan chunk, chunksAhead-1)
		r.memory = make(chan []byte, chunksAhead+1)
		go r.request(from)
	}
	return r
}

type reader struct {
	o      *Object
	ctx    context.Context
	cancel context.CancelFunc
	at     int64 // the next byte to return
	end    int64 // -1: unknown

	// Ranges that were requested ahead, in order; nil if ranges are not used.
	chunks chan chan chunk
	memory chan []byte // to use again
	chunk  chunk
	rest   []byte // of chunk.data

	// The single response, if ranges are not used.
	body  *body
	tries *retrier
	err   error
}

type chunk struct {
	data []byte
	err  error
}

// request sends the requests of all chunks.
func (r *reader) request(from int64) {
	defer close(r.chunks)
	want := int64(firstChunk)
	for off := from; off < r.end; {
		n := min(want, r.end-off)
		result := make(chan chunk, 1)
		select {
		case r.chunks <- result:
		case <-r.ctx.Done():
			return
		}
		fetch := func(off int64) chunk {
			var memory []byte
			select {
			case memory = <-r.memory:
			default:
			}
			if int64(cap(memory)) < n {
				memory = make([]byte, n)
			}
			err := r.o.ReadAt(r.ctx, memory[:n], off)
			return chunk{memory[:n], err}
		}
		if _, web := r.o.at.store.(webStore); web && off == from { // the server may not have ranges
			first := fetch(off)
			if errors.Is(first.err, errNoRanges) {
				first = chunk{}
			}
			if result <- first; r.o.noRanges.Load() {
				return // Read continues with a single response
			}
		} else {
			go func(off int64) { result <- fetch(off) }(off)
		}
		off += n
		want = min(2*want, lastChunk)
	}
}

func (r *reader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 && r.err == nil {
		if r.chunks == nil {
			return r.readBody(p)
		}
		if r.chunk.data != nil {
			select {
			case r.memory <- r.chunk.data[:0]:
			default:
			}
			r.chunk = chunk{}
		}
		next, ok := <-r.chunks
		switch {
		case !ok && r.ctx.Err() != nil:
			r.err = r.ctx.Err()
		case !ok && r.at < r.end: // no ranges
			r.chunks = nil
		case !ok:
			r.err = io.EOF
		default:
			r.chunk = <-next
			r.rest, r.err = r.chunk.data, r.chunk.err
			if r.err != nil {
				r.rest = nil
			}
		}
	}
	if len(r.rest) == 0 {
		return 0, r.err
	}
	n := copy(p, r.rest)
	r.rest, r.at = r.rest[n:], r.at+int64(n)
	return n, nil
}

// readBody reads from a single response.
func (r *reader) readBody(p []byte) (int, error) {
	for r.err == nil && len(p) > 0 {
		n, err := 0, error(nil)
		if r.body == nil {
			err = r.openBody()
		}
		if err == nil {
			if r.end >= 0 {
				p = p[:min(int64(len(p)), r.end-r.at)]
			}
			n, err = r.body.Read(p)
			r.at += int64(n)
			if n > 0 {
				r.tries.progress()
			}
			size := r.body.info.Size
			switch {
			case r.at == r.end || err == io.EOF && (size < 0 || r.at == size):
				r.err = io.EOF
			case err != nil:
				err = temporary(err)
			}
		}
		if err != nil && r.err == nil {
			r.closeBody()
			if n > 0 {
				return n, nil
			}
			if err = r.tries.again(r.ctx, err); err != nil {
				r.err = fmt.Errorf("%s: reading byte %d: %w", r.o.at.name(), r.at, err)
			}
			continue
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, r.err
}

// openBody requests the content from the current byte.
func (r *reader) openBody() error {
	want := r.o.info
	if r.at > 0 && want.Version == "" && want.Size < 0 {
		return errors.New("the connection broke, and the server sends neither the size nor the version of the file, " +
			"so the download cannot be resumed; start again")
	}
	b, err := r.o.at.open(r.ctx, r.at, -1, want)
	if err != nil {
		return err
	}
	if _, err := io.CopyN(io.Discard, b, r.at-b.start); err != nil {
		b.Close()
		return temporary(err)
	}
	r.body = b
	return nil
}

func (r *reader) closeBody() {
	if r.body != nil {
		r.body.Close()
		r.body = nil
	}
}

// Close ends the requests.
func (r *reader) Close() error {
	r.cancel()
	r.closeBody()
	if r.chunks != nil {
		for result := range r.chunks {
			<-result
		}
	}
	if r.err == nil {
		r.err = errors.New("reading after Close")
	}
	return nil
}
