package numpy

import (
	"io"
	"unsafe"
)

// pieceBytes is the size of the pieces in which a Writer writes.
const pieceBytes = 4 << 20

// A Writer writes a .npy file of one dimension from its beginning to its end, for an io.WriterAt
// that takes bytes past the page cache: in pieces of 4 MiB, except for the last, at offsets that
// are multiples of that, from memory that begins at a page.
type Writer[T int16 | int64] struct {
	to      io.WriterAt // nil if the file is not wanted
	piece   []byte
	fill    int
	at      int64 // of the piece in the file
	release func()
}

// NewWriter begins a file of n numbers. Where to is nil the Writer takes everything and writes
// nothing. [Writer.Release] must be called when it is not used any more.
func NewWriter[T int16 | int64](to io.WriterAt, n int64) *Writer[T] {
	w := &Writer[T]{to: to, release: func() {}}
	if to == nil {
		return w
	}
	item, descr := int64(unsafe.Sizeof(T(0))), "<i2"
	if item == 8 {
		descr = "<i8"
	}
	w.piece, w.release = Aligned(int(min(pieceBytes, HeaderSize+item*n)))
	header := Header(descr, n)
	w.fill = copy(w.piece, header[:])
	return w
}

// Append appends numbers. The error is that of the file.
func (w *Writer[T]) Append(v []T) error {
	if w.to == nil || len(v) == 0 {
		return nil
	}
	// As they lie in memory, which is little-endian as the files are.
	p := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(v[0])))
	for len(p) > 0 {
		if w.fill == len(w.piece) {
			if err := w.Flush(); err != nil {
				return err
			}
		}
		n := copy(w.piece[w.fill:], p)
		w.fill += n
		p = p[n:]
	}
	return nil
}

// Flush writes what has been appended. It is called after the last number; in between it would make
// a shorter piece.
func (w *Writer[T]) Flush() error {
	if w.to == nil || w.fill == 0 {
		return nil
	}
	if _, err := w.to.WriteAt(w.piece[:w.fill], w.at); err != nil {
		return err
	}
	w.at += int64(w.fill)
	w.fill = 0
	return nil
}

// Release gives the memory back, written or not. A second call does nothing.
func (w *Writer[T]) Release() {
	w.release()
	w.to, w.piece, w.release = nil, nil, func() {}
}
