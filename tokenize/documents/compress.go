package documents

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// maxWindow is the maximum window of a zstd stream, which zstd --long=31 uses. Reading needs about
// as much memory as the window.
const maxWindow = 2 << 30

// keptWindow is the maximum window whose memory is kept for the next file.
const keptWindow = 16 << 20

// A compression is the compression format of a file.
type compression uint8

const (
	plain compression = iota
	inGzip
	inZstd
)

func (c compression) String() string { return [...]string{"plain", "gzip", "zstd"}[c] }

// compressionOf detects the compression from the first bytes of a file.
func compressionOf(head []byte) compression {
	switch {
	case strings.HasPrefix(string(head), "\x1f\x8b"):
		return inGzip
	case strings.HasPrefix(string(head), "\x28\xb5\x2f\xfd"):
		return inZstd
	case len(head) >= 4 && head[0]&0xf0 == 0x50 && string(head[1:4]) == "\x2a\x4d\x18": // a skippable frame
		return inZstd
	}
	return plain
}

// decoders decompress. They are reused for later files.
type decoders struct {
	gzip *gzip.Reader // of one member
	zstd *zstd.Decoder
}

// open starts to decompress raw. position returns the offset of raw's next byte in the file. Errors
// concern raw's contents.
func (d *decoders) open(c compression, raw *bufio.Reader, position func() int64) (io.Reader, error) {
	if c == inGzip {
		if d.gzip == nil {
			d.gzip = new(gzip.Reader)
		}
		members := &gzipMembers{z: d.gzip, raw: raw, position: position}
		return members, members.next()
	}
	if d.zstd == nil {
		// One goroutine: more goroutines make a single stream slower, and files can be read in
		// parallel.
		z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow),
			zstd.WithDecoderMaxMemory(maxWindow))
		if err != nil {
			return nil, err
		}
		d.zstd = z
	}
	tail := &tailReader{r: raw}
	return zstdFrames{d.zstd, tail, position}, d.zstd.Reset(tail)
}

// release frees the memory of a file with a large window. It decides by the next file's header; raw
// has not been read yet.
func (d *decoders) release(header zstd.Header) {
	if d.zstd == nil {
		return
	}
	if header.WindowSize > keptWindow || header.SingleSegment && header.FrameContentSize > keptWindow {
		d.zstd.Close()
		d.zstd = nil
		return
	}
	_ = d.zstd.Reset(nil) // releases the file; a decoder without a file is ready for the next
}

// gzipMembers reads the members of a gzip file. A gzip.Reader alone also reads several members, but
// it does not distinguish a truncated member from trailing bytes that do not belong to a member.
type gzipMembers struct {
	z        *gzip.Reader
	raw      *bufio.Reader // the input of z, which does not read beyond the end of a member
	position func() int64  // of the next byte of raw in the file
}

// next starts a member.
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
			return n, follows(inGzip, g.position())
		}
		if err := g.next(); n > 0 || err != nil {
			return n, err
		}
	}
}

// zstdFrames reads the frames of a zstd file.
type zstdFrames struct {
	z        *zstd.Decoder // reads no more than needed
	raw      *tailReader   // the input of z
	position func() int64
}

func (f zstdFrames) Read(p []byte) (int, error) {
	n, err := f.z.Read(p)
	if errors.Is(err, zstd.ErrMagicMismatch) {
		// the four bytes were read; the bytes at the start of the file belong to a frame
		err = follows(inZstd, f.position()-4)
	}
	// The decoder returns these errors for a window that is too large and for blocks that exceed
	// their frame.
	if errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded) {
		if f.raw.endsInLargeFrame() {
			err = advise("the zstd window is above %d GiB; compress the file again with --long=31 or less",
				maxWindow>>30)
		} else {
			err = advise("the zstd data is damaged; fetch the file again")
		}
	}
	return n, err
}

// A tailReader keeps the last bytes read from r, up to the size of a zstd frame header.
type tailReader struct {
	r    io.Reader
	tail []byte
}

func (t *tailReader) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	t.tail = append(t.tail, p[max(0, n-zstd.HeaderMaxSize):n]...)
	t.tail = append(t.tail[:0], t.tail[max(0, len(t.tail)-zstd.HeaderMaxSize):]...)
	return n, err
}

// endsInLargeFrame reports whether the last bytes that were read are the header of a frame whose
// window is too large.
func (t *tailReader) endsInLargeFrame() bool {
	for i := range t.tail {
		var h zstd.Header
		if err := h.Decode(t.tail[i:]); err == nil && !h.Skippable && h.HeaderSize == len(t.tail)-i {
			return h.WindowSize > maxWindow || h.SingleSegment && h.FrameContentSize > maxWindow
		}
	}
	return false
}

// follows is the error of compressed data followed by other data.
func follows(c compression, at int64) error {
	return advise("data that is not %s follows the compressed data at byte %d of the file; fetch the file "+
		"again, or truncate it there", c, at)
}

// An advice is a fault of a file whose message includes the remedy.
type advice struct{ error }

func advise(format string, args ...any) error { return advice{fmt.Errorf(format, args...)} }

func (a advice) Unwrap() error { return a.error }

// explain adds the meaning and the remedy to a fault of a file.
func explain(err error) error {
	switch {
	case errors.As(err, new(advice)):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("the file is truncated here; fetch it again: %w", err)
	case errors.Is(err, gzip.ErrChecksum), errors.Is(err, zstd.ErrCRCMismatch):
		return fmt.Errorf("the checksum of the compressed data is wrong, so the file is damaged; fetch it again: %w",
			err)
	}
	return fmt.Errorf("the file cannot be read beyond this point; fetch it again: %w", err)
}
