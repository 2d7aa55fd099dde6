// Package layout has the common code of the layout packages below shards: ids in arrays without a
// header, and the files of one shard, which are written together and published in order.
package layout

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// Width is the element type of an array of ids: unsigned little-endian integers of 1, 2 or 4 bytes.
type Width int

// String returns the numpy name of the type.
func (w Width) String() string { return fmt.Sprintf("uint%d", 8*w) }

// Valid reports whether w is 1, 2 or 4.
func (w Width) Valid() bool { return w == 1 || w == 2 || w == 4 }

// IDs returns the number of ids that the type can hold.
func (w Width) IDs() int64 { return 1 << (8 * w) }

// DTypes lists the names that [ParseWidth] accepts.
func DTypes() []string { return []string{"uint8", "uint16", "uint32", "int32"} }

// ParseWidth returns the width of a type from its numpy name. int32 is accepted as uint32, because
// ids are never negative.
func ParseWidth(dtype string) (Width, error) {
	switch dtype {
	case "uint8":
		return 1, nil
	case "uint16":
		return 2, nil
	case "uint32", "int32":
		return 4, nil
	}
	return 0, fmt.Errorf("ids cannot be %q; element types are %s", dtype, strings.Join(DTypes(), ", "))
}

// Append appends the bytes of ids to dst. Each id must be below w.IDs().
func (w Width) Append(dst []byte, ids []uint32) []byte {
	switch w {
	case 1:
		for _, id := range ids {
			dst = append(dst, byte(id))
		}
	case 2:
		for _, id := range ids {
			dst = binary.LittleEndian.AppendUint16(dst, uint16(id))
		}
	default:
		for _, id := range ids {
			dst = binary.LittleEndian.AppendUint32(dst, id)
		}
	}
	return dst
}

// AppendIDs appends the ids encoded in src to dst. The length of src must be a multiple of w.
func (w Width) AppendIDs(dst []uint32, src []byte) []uint32 {
	switch w {
	case 1:
		for _, b := range src {
			dst = append(dst, uint32(b))
		}
	case 2:
		for ; len(src) >= 2; src = src[2:] {
			dst = append(dst, uint32(binary.LittleEndian.Uint16(src)))
		}
	default:
		for ; len(src) >= 4; src = src[4:] {
			dst = append(dst, binary.LittleEndian.Uint32(src))
		}
	}
	return dst
}

// AppendNumbers appends the whole numbers encoded in src, of size 1, 2, 4 or 8 bytes each, to dst.
// It stops at the first number that is not a valid id and returns an error about it.
func AppendNumbers(dst []uint32, src []byte, size int, signed bool) ([]uint32, error) {
	dst = slices.Grow(dst, len(src)/size)
	for ; len(src) >= size; src = src[size:] {
		var v uint64
		switch size {
		case 1:
			v = uint64(src[0])
		case 2:
			v = uint64(binary.LittleEndian.Uint16(src))
		case 4:
			v = uint64(binary.LittleEndian.Uint32(src))
		default:
			v = binary.LittleEndian.Uint64(src)
		}
		if signed && v>>(8*size-1) != 0 {
			return dst, errors.New("a negative number is not an id")
		}
		if v > math.MaxUint32 {
			return dst, fmt.Errorf("%d is not an id; the largest is 2^32-1", v)
		}
		dst = append(dst, uint32(v))
	}
	return dst, nil
}

// Write writes the bytes of ids, a few thousand at a time. *scratch is a buffer that is reused
// between calls.
func (w Width) Write(to io.Writer, ids []uint32, scratch *[]byte) error {
	for len(ids) > 0 {
		part := ids[:min(len(ids), 1<<13)]
		ids = ids[len(part):]
		*scratch = w.Append((*scratch)[:0], part)
		if _, err := to.Write(*scratch); err != nil {
			return err
		}
	}
	return nil
}
