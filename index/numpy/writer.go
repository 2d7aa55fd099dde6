package numpy

import (
	"io"
	"unsafe"
)

// pieceBytes is the size of the writes of a Writer.
const pieceBytes = 4 << 20

// A Writer writes a one-dimensional .npy file sequentially to an io.WriterAt that may use direct
// I/O: in pieces of 4 MiB (the last may be shorter), at offsets that are multiples of 4 MiB, from
// page-aligned memory.
type Writer[T int16 | int64] struct {
	to      io.WriterAt // nil to discard the file
	piece   []byte
	fill    int
	at      int64 // of the piece in the file
	release func()
}

// NewWriter starts a file of n numbers. If to is nil, the Writer discards everything.
// [Writer.Release] must be called after use.
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

// Append appends numbers. It returns the first write error.
func (w *Writer[T]) Append(v []T) error {
	if w.to == nil || len(v) == 0 {
		return nil
	}
	// The memory is little-endian, like the files.
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

// Flush writes the appended numbers. It must be called only after the last number, because it
// writes a shorter piece.
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

// Release frees the memory, written or not. A second call does nothing.
func (w *Writer[T]) Release() {
	w.release()
	w.to, w.piece, w.release = nil, nil, func() {}
}
