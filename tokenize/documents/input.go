package documents

import (
	"context"
	"fmt"
	"io"
	"os"
)

// openInput opens an input for reading until ctx ends. regular is nil unless the input supports
// random access.
func openInput(ctx context.Context, input string, stdin io.Reader) (r io.ReadCloser, regular *os.File, err error) {
	if input == "-" {
		return io.NopCloser(&interruptible{ctx: ctx, r: stdin}), nil, nil
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
		return f, f, nil
	default: // such as a named pipe, which may block for a long time
		return struct {
			io.Reader
			io.Closer
		}{&interruptible{ctx: ctx, r: f}, f}, nil, nil
	}
	f.Close()
	return nil, nil, err
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
