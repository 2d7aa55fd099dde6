package objects

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"golang.org/x/sync/errgroup"
)

// Sizes of the parts of a large object. S3 accepts 10,000 parts, so parts double every 1,000 parts.
const (
	firstPart  = 16 << 20
	lastPart   = 512 << 20
	partsEqual = 1000
)

// abortTime is how long an upload that failed is aborted at most.
const abortTime = 10 * time.Second

// A Writer writes an object, which appears when Close returns nil. Only one goroutine may use it.
type Writer struct {
	ctx    context.Context // ends when a part could not be written
	at     location
	buf    []byte
	off    int64 // bytes that were sent before buf
	parts  int
	up     upload
	group  *errgroup.Group
	memory chan []byte // to use again
	err    error       // the final error
}

var errClosed = errors.New("the object was closed or aborted before")

// Create returns a writer of a new object, or of a new version of an existing one. Until Close
// returns nil, readers get the earlier object, if there is one. The caller must call Close or
// Abort.
func Create(ctx context.Context, address string) (*Writer, error) {
	l, err := locateObject(ctx, address)
	if err != nil {
		return nil, err
	}
	return &Writer{ctx: ctx, at: l, memory: make(chan []byte, 1)}, nil
}

// Write appends p. Large objects are sent in parts of 16 MiB or more while they are written.
func (w *Writer) Write(p []byte) (int, error) {
	written := 0
	for w.err == nil && len(p) > 0 {
		size := partSize(w.parts)
		n := min(len(p), size-len(w.buf))
		if need := len(w.buf) + n; need > cap(w.buf) { // the first part grows, the others have their size
			capacity := min(max(need, 2*cap(w.buf)), size)
			if w.parts > 0 {
				capacity = size
			}
			w.buf = append(make([]byte, 0, capacity), w.buf...)
		}
		w.buf = append(w.buf, p[:n]...)
		p, written = p[n:], written+n
		if len(w.buf) == size && len(p) > 0 {
			w.send()
		}
	}
	return written, w.err
}

func partSize(part int) int { return min(firstPart<<(part/partsEqual), lastPart) }

// send sends the buffer as a part, and starts the upload before the first one.
func (w *Writer) send() {
	if w.up == nil {
		var up upload
		w.err = retry(w.ctx, w.at, func(ctx context.Context) error {
			return limited(ctx, 0, func(ctx context.Context) (err error) {
				up, err = w.at.upload(ctx, w.at.key)
				return err
			})
		})
		if w.err != nil {
			return
		}
		w.up = up
		w.group, w.ctx = errgroup.WithContext(w.ctx)
		w.group.SetLimit(w.up.parallel())
	}
	data, n, off := w.buf, w.parts, w.off
	w.group.Go(func() error {
		err := retry(w.ctx, w.at, func(ctx context.Context) error {
			return limited(ctx, len(data), func(ctx context.Context) error { return w.up.part(ctx, n, off, data) })
		})
		if err == nil {
			counters.written.Add(int64(len(data)))
		}
		select {
		case w.memory <- data[:0]:
		default:
		}
		return err
	})
	if w.ctx.Err() != nil {
		w.err = w.group.Wait()
	}
	w.off, w.parts = w.off+int64(len(w.buf)), w.parts+1
	select {
	case w.buf = <-w.memory:
	default:
		w.buf = nil
	}
}

// Close makes the object appear with all bytes that were written. After an error there is no new
// object, and what was sent has been discarded.
func (w *Writer) Close() error {
	if w.err != nil {
		return w.abort(w.err)
	}
	if w.up == nil {
		w.err = errClosed
		_, err := write(w.ctx, w.at, w.buf, condition{})
		return err
	}
	if w.send(); w.err != nil {
		return w.abort(w.err)
	}
	outer := context.WithoutCancel(w.ctx) // errgroup cancels its context after Wait
	stopped := context.Cause(w.ctx)
	if err := w.group.Wait(); err != nil {
		return w.abort(err)
	}
	if stopped != nil {
		return w.abort(stopped)
	}
	err := retry(outer, w.at, func(ctx context.Context) error {
		return limited(ctx, 0, func(ctx context.Context) error { return w.up.finish(ctx, w.parts, w.off) })
	})
	if err != nil {
		return w.abort(err)
	}
	w.up, w.err, w.buf = nil, errClosed, nil
	info, err := Stat(outer, w.at.base+w.at.key)
	if err == nil && info.Size != w.off {
		err = fmt.Errorf("%s: has %d bytes after %d were written; did another program write it?", w.at.name(),
			info.Size, w.off)
	}
	return err
}

// Abort discards what was written. After Close it does nothing.
func (w *Writer) Abort() {
	if !errors.Is(w.err, errClosed) {
		_ = w.abort(errClosed) // the upload has an error already, or the caller has
	}
}

// abort discards the parts that were sent, and returns why.
func (w *Writer) abort(why error) error {
	if w.up != nil {
		_ = w.group.Wait() // why is its error, or more important
		ctx, cancel := context.WithTimeout(context.WithoutCancel(w.ctx), abortTime)
		defer cancel()
		err := retry(WithPatience(ctx, abortTime), w.at, func(ctx context.Context) error { return w.up.abort(ctx) })
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(why, errClosed) {
			why = fmt.Errorf("%w; the incomplete upload could not be removed either: %w", why, err)
		}
	}
	w.up, w.err, w.buf = nil, errClosed, nil
	return why
}

// Upload writes an object with all bytes of r. check, if not nil, is called after r is read and
// before the object appears. An error keeps it from that.
func Upload(ctx context.Context, address string, r io.Reader, check func() error) error {
	w, err := Create(ctx, address)
	if err != nil {
		return err
	}
	defer w.Abort()
	if _, err := io.Copy(w, r); err != nil {
		return err
	}
	if check != nil {
		if err := check(); err != nil {
			return err
		}
	}
	return w.Close()
}

// WriteFile writes an object.
func WriteFile(ctx context.Context, address string, data []byte) error {
	_, err := writeIf(ctx, address, data, condition{})
	return err
}

// WriteNew writes an object that does not exist, and returns its facts. If it exists, the error
// wraps [io/fs.ErrExist]. Only one of several writers succeeds, even at the same time.
func WriteNew(ctx context.Context, address string, data []byte) (Info, error) {
	info, err := writeIf(ctx, address, data, condition{absent: true})
	if errors.Is(err, ErrChanged) {
		err = fmt.Errorf("%s: %w", Clean(address), fs.ErrExist)
	}
	return info, err
}

// Replace writes an object if its version is still the one of was, and returns its facts. Otherwise
// the error wraps [ErrChanged].
func Replace(ctx context.Context, address string, data []byte, was Info) (Info, error) {
	if was.Version == "" {
		return Info{}, fmt.Errorf("%s: the version to replace is unknown", Clean(address))
	}
	info, err := writeIf(ctx, address, data, condition{version: was.Version})
	if errors.Is(err, fs.ErrNotExist) { // as S3 says of an object that was removed
		err = fmt.Errorf("%w: %w", ErrChanged, err)
	}
	return info, err
}

func writeIf(ctx context.Context, address string, data []byte, c condition) (Info, error) {
	l, err := locateObject(ctx, address)
	if err != nil {
		return Info{}, err
	}
	return write(ctx, l, data, c)
}

// write sends one request with the data. If the response to an earlier try was lost, the condition
// may fail because of that try: then the object has the data.
func write(ctx context.Context, l location, data []byte, c condition) (Info, error) {
	info := Info{Size: int64(len(data))}
	tries := 0
	err := retry(ctx, l, func(ctx context.Context) error {
		tries++
		return limited(ctx, len(data), func(ctx context.Context) (err error) {
			info.Version, err = l.put(ctx, l.key, data, c)
			return err
		})
	})
	if errors.Is(err, ErrChanged) && tries > 1 {
		now, found, readErr := ReadFile(ctx, l.base+l.key, int64(len(data)))
		if readErr == nil && bytes.Equal(now, data) {
			info, err = found, nil
		}
	}
	if err != nil {
		return Info{}, err
	}
	counters.written.Add(int64(len(data)))
	return info, nil
}
