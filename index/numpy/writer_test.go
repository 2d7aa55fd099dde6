package numpy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"unsafe"
)

// pieces is a file in memory that wants what a Writer promises.
type pieces struct {
	data []byte
	size int
	err  error
}

func (f *pieces) WriteAt(p []byte, off int64) (int, error) {
	if f.err != nil {
		return 0, f.err
	}
	if int(off) != len(f.data) || off%pieceBytes != 0 || len(p) != min(pieceBytes, f.size-len(f.data)) ||
		uintptr(unsafe.Pointer(&p[0]))%4096 != 0 {
		f.err = fmt.Errorf("a piece of %d bytes at %d, memory %p, of a file of %d", len(p), off, &p[0], f.size)
		return 0, f.err
	}
	f.data = append(f.data, p...)
	return len(p), nil
}

func TestWriter(t *testing.T) {
	for _, n := range []int{0, 1, 1000, pieceBytes/2 - HeaderSize/2 - 1, pieceBytes/2 - HeaderSize/2,
		pieceBytes/2 - HeaderSize/2 + 1, 3*pieceBytes/2 + 17} {
		for _, block := range []int{999, 1 << 16, 1 << 30} {
			if block == 999 && n > 1e6 {
				block = 99_999
			}
			write(t, "<i2", n, block, func(i int) int16 { return int16(i * 7) })
			write(t, "<i8", n/4, block, func(i int) int64 { return -int64(i) * 1e10 })
		}
	}
}

func write[T int16 | int64](t *testing.T, descr string, n, block int, value func(int) T) {
	t.Helper()
	v := make([]T, n)
	for i := range v {
		v[i] = value(i)
	}
	header := Header(descr, int64(n))
	want := bytes.NewBuffer(header[:])
	if err := binary.Write(want, binary.LittleEndian, v); err != nil {
		t.Fatal(err)
	}
	f := &pieces{size: want.Len()}
	w := NewWriter[T](f, int64(n))
	defer w.Release()
	for len(v) > 0 {
		k := min(block, len(v))
		if err := w.Append(v[:k]); err != nil {
			t.Fatal(err)
		}
		v = v[k:]
	}
	if err := errors.Join(w.Append(nil), w.Flush(), w.Flush()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(f.data, want.Bytes()) {
		t.Errorf("%s, %d numbers in blocks of %d: the file differs", descr, n, block)
	}
}

func TestWriterErrors(t *testing.T) {
	full := errors.New("full")
	w := NewWriter[int64](&pieces{err: full}, 1<<20)
	defer w.Release()
	if err := w.Append(make([]int64, 1<<20)); !errors.Is(err, full) {
		t.Errorf("append: %v", err)
	}
	if err := w.Flush(); !errors.Is(err, full) {
		t.Errorf("flush: %v", err)
	}
	unwanted := NewWriter[int64](nil, 1<<40)
	if err := errors.Join(unwanted.Append(make([]int64, 3)), unwanted.Flush()); err != nil {
		t.Errorf("a file that is not wanted: %v", err)
	}
	unwanted.Release()
	w.Release()
	w.Release()
}
