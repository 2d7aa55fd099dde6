package objectfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"sync"

	"mula/internal/objects"
)

// A file is an object that is open for reading.
type file struct {
	ctx context.Context
	url string
	o   *objects.Object

	mu     sync.Mutex
	at     int64         // of Read
	next   int64         // the byte after the last read
	follow int           // reads that began where the one before ended
	stream io.ReadCloser // from next; nil if none
}

// streamAfter is how many reads that follow each other start reading ahead.
const streamAfter = 2

// ReadAt reads ahead if reads follow each other. Otherwise it sends one request.
func (f *file) ReadAt(p []byte, off int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	size := f.o.Info().Size
	if off < 0 || off >= size {
		return 0, io.EOF
	}
	var end error
	if off+int64(len(p)) > size {
		p, end = p[:size-off], io.EOF
	}
	if off == f.next && off > 0 {
		f.follow++
	} else {
		f.follow = 0
		f.closeStream()
	}
	if f.stream == nil && f.follow >= streamAfter {
		f.stream = f.o.Range(f.ctx, off, size)
	}
	f.next = off + int64(len(p))
	if f.stream == nil {
		if err := f.o.ReadAt(f.ctx, p, off); err != nil {
			return 0, err
		}
		return len(p), end
	}
	n, err := io.ReadFull(f.stream, p)
	if err != nil {
		f.closeStream()
		f.next = -1
		return n, err
	}
	return n, end
}

func (f *file) closeStream() {
	if f.stream != nil {
		f.stream.Close()
		f.stream = nil
	}
}

// Read implements [io.Reader].
func (f *file) Read(p []byte) (int, error) {
	n, err := f.ReadAt(p, f.at)
	f.at += int64(n)
	return n, err
}

// Close implements [io.Closer].
func (f *file) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closeStream()
	return nil
}

func (f *file) Name() string { return f.url }

func (f *file) Stat() (fs.FileInfo, error) { return info{path.Base(f.url), f.o.Info()}, nil }

func (f *file) readOnly() error {
	return fmt.Errorf("%s: the object is open for reading: %w", f.url, errors.ErrUnsupported)
}

func (f *file) Write([]byte) (int, error)          { return 0, f.readOnly() }
func (f *file) WriteAt([]byte, int64) (int, error) { return 0, f.readOnly() }
func (f *file) Seek(int64, int) (int64, error)     { return 0, f.readOnly() }
func (f *file) Truncate(int64) error               { return f.readOnly() }
func (f *file) Sync() error                        { return nil }
func (f *file) Fd() uintptr                        { return ^uintptr(0) }
