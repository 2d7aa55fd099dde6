// Package safetensors reads and writes Hugging Face's tensor files.
//
// A file contains
//
//	8 bytes  little-endian length n of the header
//	n bytes  JSON, padded with spaces: {"__metadata__": {"format": "pt", …},
//	         "name": {"dtype": "F32", "shape": […], "data_offsets": [begin, end]}, …}
//	         the tensors' data, row-major and little-endian, without gaps; offsets count from here
//
// as defined by https://github.com/huggingface/safetensors. The reader accepts what that library
// accepts: every byte of the data belongs to exactly one tensor, and a header has at most 100 MB.
// The package works on machines of either byte order.
package safetensors

import (
	"errors"
	"fmt"
	"math"
)

// errCorrupt is wrapped by every error about a file that is inconsistent or violates the format.
var errCorrupt = errors.New("corrupt safetensors file")

// DType names an element type as in the header.
type DType string

// The element types that this package converts from and to float32.
const (
	F32  DType = "F32"
	F16  DType = "F16"
	BF16 DType = "BF16"
)

// U8 is the type of bytes, which [File.Bytes] reads.
const U8 DType = "U8"

// sizes holds the element size, in bytes, of every type with whole-byte elements. Tensors of types
// other than those above are listed, but cannot be read.
var sizes = map[DType]int{
	F32: 4, F16: 2, BF16: 2, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1,
	U8: 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
}

// Size returns the number of bytes of an element, 0 for an unknown type.
func (d DType) Size() int { return sizes[d] }

// A Tensor is one entry of a header.
type Tensor struct {
	Name  string
	DType DType
	Shape []int

	begin, end int64 // offsets of its data
}

// Elements returns the number of elements.
func (t Tensor) Elements() int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= int64(d)
	}
	return n
}

// bytes returns the size of the tensor's data, or an error if the header entry is invalid.
func (t Tensor) bytes() (int64, error) {
	size := t.DType.Size()
	if size == 0 {
		return 0, fmt.Errorf("tensor %q: unknown element type %q", t.Name, t.DType)
	}
	n := int64(size)
	for _, d := range t.Shape {
		if d < 0 {
			return 0, fmt.Errorf("tensor %q: shape %v has a negative size", t.Name, t.Shape)
		}
		if d > 0 && n > math.MaxInt64/int64(d) {
			return 0, fmt.Errorf("tensor %q: shape %v is too large", t.Name, t.Shape)
		}
		n *= int64(d)
	}
	return n, nil
}
