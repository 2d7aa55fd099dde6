package shards

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"unsafe"
)

// encode writes ids to dst, which must have their size in bytes. The type must have 1, 2 or 4 bytes
// and hold the ids.
func (t DType) encode(dst []byte, ids []uint32) {
	le := binary.LittleEndian
	switch t.Size() {
	case 1:
		for i, id := range ids {
			dst[i] = byte(id)
		}
	case 2:
		for ; len(ids) >= 4 && len(dst) >= 8; ids, dst = ids[4:], dst[8:] { // four ids per store
			le.PutUint64(dst,
				uint64(uint16(ids[0]))|uint64(uint16(ids[1]))<<16|uint64(uint16(ids[2]))<<32|uint64(uint16(ids[3]))<<48)
		}
		for i, id := range ids {
			le.PutUint16(dst[2*i:], uint16(id))
		}
	default:
		if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 { // the ids are in memory as they are in files
			copy(dst, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(ids))), 4*len(ids)))
			return
		}
		for i, id := range ids {
			le.PutUint32(dst[4*i:], id)
		}
	}
}

// AppendEncoded appends the bytes of ids to dst, as encode writes them.
func (t DType) AppendEncoded(dst []byte, ids []uint32) []byte {
	from := len(dst)
	end := from + len(ids)*t.Size()
	dst = slices.Grow(dst, end-from)[:end]
	t.encode(dst[from:], ids)
	return dst
}

// decode reads len(dst) ids from src, which must have their size in bytes. The type must have 1, 2
// or 4 bytes. decode returns at least the bits that are set in any of the ids.
func (t DType) decode(dst []uint32, src []byte) (bits uint32) {
	le := binary.LittleEndian
	switch t.Size() {
	case 1:
		src = src[:len(dst)]
		for i, b := range src {
			dst[i] = uint32(b)
		}
		return 1<<8 - 1
	case 2:
		src = src[:2*len(dst)]
		for ; len(dst) >= 4 && len(src) >= 8; dst, src = dst[4:], src[8:] { // four ids per load
			four := le.Uint64(src)
			dst[0], dst[1], dst[2], dst[3] = uint32(uint16(four)), uint32(uint16(four>>16)), uint32(uint16(four>>32)),
				uint32(four>>48)
		}
		for i := range dst {
			dst[i] = uint32(le.Uint16(src[2*i:]))
		}
		return 1<<16 - 1
	}
	src = src[:4*len(dst)]
	var all uint64
	for ; len(dst) >= 4 && len(src) >= 16; dst, src = dst[4:], src[16:] {
		a, b := le.Uint64(src), le.Uint64(src[8:])
		dst[0], dst[1], dst[2], dst[3] = uint32(a), uint32(a>>32), uint32(b), uint32(b>>32)
		all |= a | b
	}
	for i := range dst {
		dst[i] = le.Uint32(src[4*i:])
		all |= uint64(dst[i])
	}
	return uint32(all | all>>32)
}

// AppendDecoded appends the ids in src to dst, as decode reads them. The length of src must
// be a multiple of the type's size.
func (t DType) AppendDecoded(dst []uint32, src []byte) []uint32 {
	from := len(dst)
	end := from + len(src)/t.Size()
	dst = slices.Grow(dst, end-from)[:end]
	t.decode(dst[from:], src)
	return dst
}

// AppendChecked is [DType.AppendDecoded] for integers of any size. It stops at the first number
// that is not an id and returns an error about it.
func (t DType) AppendChecked(dst []uint32, src []byte) ([]uint32, error) {
	from, size := len(dst), t.Size()
	if size < 8 {
		dst = t.AppendDecoded(dst, src)
		if t.signed() {
			for i, id := range dst[from:] {
				if id>>(8*size-1) != 0 {
					return dst[:from+i], errNegative
				}
			}
		}
		return dst, nil
	}
	dst = slices.Grow(dst, len(src)/size)
	for ; len(src) >= size; src = src[size:] {
		v := binary.LittleEndian.Uint64(src)
		if t.signed() && v>>63 != 0 {
			return dst, errNegative
		}
		if v > math.MaxUint32 {
			return dst, fmt.Errorf("%d is not an id; the largest is 2^32-1", v)
		}
		dst = append(dst, uint32(v))
	}
	return dst, nil
}

var errNegative = errors.New("a negative number is not an id")
