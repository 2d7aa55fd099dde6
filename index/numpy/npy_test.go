package numpy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
)

// latin1 gives back the bytes that text.py wrote as characters.
func latin1(s string) []byte {
	var out []byte
	for _, r := range s {
		out = append(out, byte(r))
	}
	return out
}

func TestHeadersOfNumpy(t *testing.T) {
	for _, h := range readGolden(t).Headers {
		want := latin1(h.Text)
		got := Header(h.Descr, h.Shape...)
		if !bytes.Equal(got[:], want) {
			t.Errorf("%s %v:\n%q\nwant\n%q", h.Descr, h.Shape, got, want)
		}
		n := NPY{Descr: h.Descr, Shape: h.Shape, Offset: HeaderSize}
		if h.Shape[0] > 1<<60 {
			if _, err := ReadHeader(bytes.NewReader(want), 1<<62); err == nil ||
				!strings.Contains(err.Error(), "exceeds the largest file size") {
				t.Errorf("%s %v: %v", h.Descr, h.Shape, err)
			}
			continue
		}
		read, err := ReadHeader(bytes.NewReader(want), n.bytes())
		if err != nil || read.Descr != h.Descr || !slices.Equal(read.Shape, h.Shape) || read.Offset != HeaderSize {
			t.Errorf("%s %v: read as %v, %v", h.Descr, h.Shape, read, err)
		}
		if _, err := ReadHeader(bytes.NewReader(want), n.bytes()-1); err == nil {
			t.Errorf("%s %v: a file one byte short is read", h.Descr, h.Shape)
		}
	}
}

// npy makes a file of version 1 or 2 with any text for a header.
func npy(version byte, text string, data int) []byte {
	b := []byte("\x93NUMPY")
	b = append(b, version, 0)
	if version == 1 {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(text)))
	} else {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
	}
	return append(append(b, text...), make([]byte, data)...)
}

func TestReadHeader(t *testing.T) {
	for _, test := range []struct {
		name  string
		file  []byte
		descr string
		shape []int64
		size  int64
	}{
		{"version 2", npy(2, "{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }      \n", 24), "<i4",
			[]int64{3, 2}, 102},
		{"version 3", npy(3, "{'descr': '<f8', 'fortran_order': False, 'shape': (), }\n", 8), "<f8", nil, 76},
		{"Python 2", npy(1, "{'descr': '<i8', 'fortran_order': False, 'shape': (2L,), }\n", 16), "<i8", []int64{2}, 85},
		{"another order, double quotes", npy(1, `{"shape":(1,),"fortran_order":False,"descr":"|u1"}`, 1), "|u1",
			[]int64{1}, 61},
		{"more than promised", npy(1, "{'descr': '<u2', 'fortran_order': False, 'shape': (0, 5)}", 9), "<u2",
			[]int64{0, 5}, 67},
	} {
		h, err := ReadHeader(bytes.NewReader(test.file), int64(len(test.file)))
		if err != nil || h.Descr != test.descr || !slices.Equal(h.Shape, test.shape) || h.bytes() != test.size {
			t.Errorf("%s: %+v of %d bytes, %v", test.name, h, h.bytes(), err)
		}
	}
	for _, test := range []struct {
		name string
		file []byte
		want string
	}{
		{"empty", nil, "not a .npy file"},
		{"magic", []byte("\x93NUMPX\x01\x00v\x00          "), "not a .npy file"},
		{"version 4", npy(4, "{}", 0), "version 4.0"},
		{"long header", append([]byte("\x93NUMPY\x02\x00"), 255, 255, 255, 255), "at most 65536"},
		{"cut off in the header", npy(1, "{'descr': '<i4'", 0)[:20], "truncated in its .npy header"},
		{"cut off in the data", npy(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }", 11),
			"is truncated"},
		{"Fortran", npy(1, "{'descr': '<i4', 'fortran_order': True, 'shape': (3,), }", 12), "C order"},
		{"structured", npy(1, "{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (3,), }", 12),
			"want a string"},
		{"big endian", npy(1, "{'descr': '>i4', 'fortran_order': False, 'shape': (3,), }", 12), `">i4"`},
		{"objects", npy(1, "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", 12), `"|O"`},
		{"no shape", npy(1, "{'descr': '<i4', 'fortran_order': False, }", 12), `"shape" is missing`},
		{"twice", npy(1, "{'descr': '<i4', 'descr': '<i4', 'fortran_order': False, 'shape': (3,), }", 12), "duplicate"},
		{"other key", npy(1, "{'descr': '<i4', 'order': False, 'shape': (3,), }", 12), `"order"`},
		{"no tuple", npy(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (3), }", 12), "comma"},
		{"negative", npy(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (-3,), }", 12), "want an integer"},
		{"2^63", npy(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (9223372036854775808,), }", 12),
			"want an integer"},
		{"2^64 bytes", npy(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904,2), }", 12),
			"exceeds the largest"},
		{"rest", npy(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (3,), } x", 12), "text after the dict"},
		{"escape", npy(1, `{'descr': '<\x69', 'fortran_order': False, 'shape': (3,), }`, 12), "without escapes"},
	} {
		if _, err := ReadHeader(bytes.NewReader(test.file), int64(len(test.file))); err == nil ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want an error with %q", test.name, err, test.want)
		}
	}
	broken := errors.New("broken disk")
	if _, err := ReadHeader(failing{broken}, 1000); !errors.Is(err, broken) {
		t.Errorf("an error of the file: %v", err)
	}
}

type failing struct{ err error }

func (f failing) ReadAt([]byte, int64) (int, error) { return 0, f.err }

// Whatever is read keeps within the file; and what Header writes, ReadHeader reads.
func FuzzReadHeader(f *testing.F) {
	for _, text := range []string{"{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }  \n",
		"{'descr': '<i8', 'fortran_order': False, 'shape': (), }"} {
		f.Add(npy(1, text, 24), int64(3), int64(2))
		f.Add(npy(2, text, 24), int64(0), int64(1)<<40)
	}
	f.Fuzz(func(t *testing.T, file []byte, rows, columns int64) {
		h, err := ReadHeader(bytes.NewReader(file), int64(len(file)))
		if err == nil {
			if h.Offset < 10 || h.bytes() < h.Offset || h.bytes() > int64(len(file)) {
				t.Errorf("%+v, %d bytes, of a file of %d", h, h.bytes(), len(file))
			}
			if len(h.Shape) == 1 || len(h.Shape) == 2 {
				again := Header(h.Descr, h.Shape...)
				if back, err := ReadHeader(bytes.NewReader(again[:]), 1<<62); err != nil || back.Descr != h.Descr ||
					!slices.Equal(back.Shape, h.Shape) {
					t.Errorf("%+v becomes %+v, %v", h, back, err)
				}
			}
		}
		rows, columns = rows&(1<<40-1), columns&0xffff
		made := Header("<i8", rows, columns)
		if h, err := ReadHeader(bytes.NewReader(made[:]), 1<<62); err != nil || h.bytes() != HeaderSize+8*rows*columns {
			t.Errorf("(%d, %d): %+v, %v", rows, columns, h, err)
		}
	})
}

// bytes is the size of the whole file that the header promises.
func (h NPY) bytes() int64 {
	n := h.Item()
	for _, d := range h.Shape {
		n *= d
	}
	return h.Offset + n
}
