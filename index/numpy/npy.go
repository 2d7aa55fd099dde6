package numpy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// HeaderSize is the length in bytes of the headers that [Header] returns.
const HeaderSize = 128

// Header returns the header that numpy.save writes for an array in C order, in numpy 1.14 and
// newer: the .npy format, version 1.0. The descr is a type such as "<i2", "<i4", "<i8" or "<u4".
// The shape has one or two numbers, both below 2^63, so that 128 bytes always suffice.
func Header(descr string, shape ...int64) [HeaderSize]byte {
	dims := make([]string, len(shape))
	for i, n := range shape {
		dims[i] = strconv.FormatInt(n, 10)
	}
	tuple := strings.Join(dims, ", ")
	if len(shape) == 1 {
		tuple += ","
	}
	var h [HeaderSize]byte
	for i := range h {
		h[i] = ' '
	}
	copy(h[:], "\x93NUMPY\x01\x00")
	binary.LittleEndian.PutUint16(h[8:], HeaderSize-10)
	copy(h[10:], "{'descr': '"+descr+"', 'fortran_order': False, 'shape': ("+tuple+"), }")
	h[HeaderSize-1] = '\n'
	return h
}

// An NPY is a parsed header of a .npy file.
type NPY struct {
	Descr  string  // the element type, as "<i4"
	Shape  []int64 // empty for a single value
	Offset int64   // of the first element in the file
}

// Item returns the size of an element in bytes.
func (h NPY) Item() int64 {
	n, _ := itemSize(h.Descr)
	return n
}

// maxHeader bounds the size of headers. The headers of plain arrays are a few hundred bytes.
const maxHeader = 1 << 16

// ReadHeader reads the header of a .npy file of version 1.0, 2.0 or 3.0. size is the size of the
// file in bytes. ReadHeader supports plain little-endian elements ("<i4", "|u1", …) in C order, and
// rejects all other types and orders, and truncated files. Like numpy, it ignores bytes after the
// data.
func ReadHeader(r io.ReaderAt, size int64) (NPY, error) {
	var start [12]byte
	n := min(int64(len(start)), max(size, 0))
	if _, err := r.ReadAt(start[:n], 0); err != nil && !(errors.Is(err, io.EOF)) {
		return NPY{}, fmt.Errorf("read the .npy header: %w", err)
	}
	if n < 10 || string(start[:6]) != "\x93NUMPY" {
		return NPY{}, errors.New("not a .npy file: it does not start with \\x93NUMPY")
	}
	var offset, length int64
	switch start[6] {
	case 1:
		offset, length = 10, int64(binary.LittleEndian.Uint16(start[8:]))
	case 2, 3:
		offset, length = 12, int64(binary.LittleEndian.Uint32(start[8:]))
	default:
		return NPY{}, fmt.Errorf("byte 6: .npy version %d.%d is not supported; use version 1.0 to 3.0", start[6],
			start[7])
	}
	if length > maxHeader {
		return NPY{}, fmt.Errorf("byte 8: the header has %d bytes; at most %d are supported", length, maxHeader)
	}
	if offset+length > size {
		return NPY{}, fmt.Errorf("the file is truncated in its .npy header: it has %d bytes, the header %d", size,
			offset+length)
	}
	text := make([]byte, length)
	if _, err := r.ReadAt(text, offset); err != nil && !(errors.Is(err, io.EOF)) {
		return NPY{}, fmt.Errorf("read the .npy header: %w", err)
	}
	d := dictReader{text: text}
	h, err := d.header()
	if err != nil {
		return NPY{}, fmt.Errorf("byte %d of the .npy header: %w", offset+int64(d.at), err)
	}
	h.Offset = offset + length
	item, err := itemSize(h.Descr)
	if err != nil {
		return NPY{}, err
	}
	need := item
	for _, d := range h.Shape {
		if d != 0 && need > (math.MaxInt64-h.Offset)/d {
			return NPY{}, fmt.Errorf("the shape %v exceeds the largest file size", h.Shape)
		}
		need *= d
	}
	if h.Offset+need > size {
		return NPY{}, fmt.Errorf("the file is truncated: its header requires %d bytes, but it has %d; delete it and "+
			"build it again", h.Offset+need, size)
	}
	return h, nil
}

// itemSize returns the size of an element from its type.
func itemSize(descr string) (int64, error) {
	if len(descr) == 3 && strings.IndexByte("biuf", descr[1]) >= 0 {
		switch n := descr[2]; {
		case n == '1' && strings.IndexByte("<|", descr[0]) >= 0:
			return 1, nil
		case (n == '2' || n == '4' || n == '8') && descr[0] == '<' && descr[1] != 'b':
			return int64(n - '0'), nil
		}
	}
	return 0, fmt.Errorf("elements of type %q are not supported; use little-endian integers or floats, such as <i4",
		descr)
}

// A dictReader parses the literal of a Python dict in a .npy header.
type dictReader struct {
	text []byte
	at   int
}

// next skips blanks and then s, if it follows.
func (d *dictReader) next(s string) bool {
	for d.at < len(d.text) && strings.IndexByte(" \t\r\n", d.text[d.at]) >= 0 {
		d.at++
	}
	if !bytes.HasPrefix(d.text[d.at:], []byte(s)) {
		return false
	}
	d.at += len(s)
	return true
}

func (d *dictReader) header() (NPY, error) {
	var h NPY
	seen := make(map[string]bool)
	if !d.next("{") {
		return h, errors.New("want {")
	}
	for !d.next("}") {
		if len(seen) > 0 && !d.next(",") {
			return h, errors.New("want , or }")
		}
		if d.next("}") {
			break
		}
		key, err := d.str()
		if err != nil {
			return h, err
		}
		if seen[key] {
			return h, fmt.Errorf("%q is duplicate", key)
		}
		seen[key] = true
		if !d.next(":") {
			return h, errors.New("want a colon")
		}
		switch key {
		case "descr":
			h.Descr, err = d.str()
		case "fortran_order":
			if !d.next("False") {
				err = errors.New("want False: only arrays in C order are supported")
			}
		case "shape":
			h.Shape, err = d.tuple()
		default:
			err = fmt.Errorf("%q is not a key of a .npy header", key)
		}
		if err != nil {
			return h, err
		}
	}
	d.next("")
	if d.at < len(d.text) {
		return h, errors.New("text after the dict")
	}
	for _, key := range []string{"descr", "fortran_order", "shape"} {
		if !seen[key] {
			return h, fmt.Errorf("%q is missing", key)
		}
	}
	return h, nil
}

// str reads a string without escapes in single or double quotes.
func (d *dictReader) str() (string, error) {
	for _, quote := range []string{"'", `"`} {
		if !d.next(quote) {
			continue
		}
		end := bytes.IndexByte(d.text[d.at:], quote[0])
		if end < 0 || bytes.IndexByte(d.text[d.at:d.at+end], '\\') >= 0 {
			return "", errors.New("want a string without escapes, in quotes")
		}
		s := string(d.text[d.at : d.at+end])
		d.at += end + 1
		return s, nil
	}
	return "", errors.New("want a string in quotes")
}

// tuple reads the shape. Python 2 wrote an L after long numbers.
func (d *dictReader) tuple() ([]int64, error) {
	if !d.next("(") {
		return nil, errors.New("want ( before the shape")
	}
	var shape []int64
	comma := true
	for !d.next(")") {
		if !comma {
			return nil, errors.New("want , or ) in the shape")
		}
		if len(shape) == 32 {
			return nil, errors.New("more than 32 dimensions")
		}
		from := d.at
		for d.at < len(d.text) && '0' <= d.text[d.at] && d.text[d.at] <= '9' {
			d.at++
		}
		n, err := strconv.ParseInt(string(d.text[from:d.at]), 10, 64)
		if err != nil {
			d.at = from
			return nil, errors.New("want an integer below 2^63 in the shape")
		}
		if d.at < len(d.text) && d.text[d.at] == 'L' {
			d.at++
		}
		shape = append(shape, n)
		comma = d.next(",")
	}
	if len(shape) == 1 && !comma {
		return nil, errors.New("want a comma after the single number of the shape")
	}
	return shape, nil
}
