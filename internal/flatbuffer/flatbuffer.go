// Package flatbuffer reads FlatBuffers, the encoding of Arrow's metadata (flatbuffers.dev,
// "Internals"). Every offset is checked: an offset in a damaged file is an error, and reading
// allocates nothing.
package flatbuffer

import (
	"encoding/binary"
	"errors"
)

// errOutside is the error about an offset that points outside of the buffer.
var errOutside = errors.New("an offset in the metadata is out of range")

// A Table is a table of a buffer. Its first word is the distance back to its vtable. From byte 4
// on, the vtable has the offset of each field from the table, 0 for an absent field.
type Table struct {
	data []byte
	at   uint32
}

// A Vector is a vector of elements of equal size.
type Vector struct {
	data        []byte
	first, size uint32
	count       uint32
}

// Root returns the root table of a buffer.
func Root(data []byte) (Table, error) {
	at, err := follow(data, 0)
	return Table{data, at}, err
}

func u32At(data []byte, at uint32) (uint32, error) {
	if uint64(at)+4 > uint64(len(data)) {
		return 0, errOutside
	}
	return binary.LittleEndian.Uint32(data[at:]), nil
}

// follow returns the target of the offset at a position. The target has at least four bytes.
func follow(data []byte, at uint32) (uint32, error) {
	offset, err := u32At(data, at)
	if err == nil && uint64(at)+uint64(offset)+4 > uint64(len(data)) {
		err = errOutside
	}
	return at + offset, err
}

// field returns the position of field n in t.data, 0 if the field is absent.
func (t Table) field(n uint32) (uint32, error) {
	back, err := u32At(t.data, t.at)
	if err != nil {
		return 0, err
	}
	list := int64(t.at) - int64(int32(back))
	if list < 0 || list+4 > int64(len(t.data)) {
		return 0, errOutside
	}
	entry := list + 4 + 2*int64(n)
	if size := int64(binary.LittleEndian.Uint16(t.data[list:])); entry+2 > list+size {
		return 0, nil
	}
	if entry+2 > int64(len(t.data)) {
		return 0, errOutside
	}
	offset := uint32(binary.LittleEndian.Uint16(t.data[entry:]))
	if offset == 0 {
		return 0, nil
	}
	if uint64(t.at)+uint64(offset) >= uint64(len(t.data)) {
		return 0, errOutside
	}
	return t.at + offset, nil
}

// Number returns field n, an unsigned number of size bytes, or absent if the field is absent.
func (t Table) Number(n, size uint32, absent uint64) (uint64, error) {
	at, err := t.field(n)
	if err != nil || at == 0 {
		return absent, err
	}
	if uint64(at)+uint64(size) > uint64(len(t.data)) {
		return 0, errOutside
	}
	var b [8]byte
	copy(b[:], t.data[at:at+size])
	return binary.LittleEndian.Uint64(b[:]), nil
}

// Child returns field n, a table. ok is false if the field is absent.
func (t Table) Child(n uint32) (c Table, ok bool, err error) {
	at, err := t.field(n)
	if err != nil || at == 0 {
		return Table{}, false, err
	}
	at, err = follow(t.data, at)
	return Table{t.data, at}, err == nil, err
}

// Vector returns field n, a vector of elements of size bytes each. An absent field is an empty
// vector.
func (t Table) Vector(n, size uint32) (Vector, error) {
	at, err := t.field(n)
	if err != nil || at == 0 {
		return Vector{}, err
	}
	if at, err = follow(t.data, at); err != nil {
		return Vector{}, err
	}
	count, err := u32At(t.data, at)
	if err != nil {
		return Vector{}, err
	}
	if uint64(at)+4+uint64(count)*uint64(size) > uint64(len(t.data)) {
		return Vector{}, errOutside
	}
	return Vector{t.data, at + 4, size, count}, nil
}

// Text returns field n, a string, "" if it is absent.
func (t Table) Text(n uint32) (string, error) {
	v, err := t.Vector(n, 1)
	return string(v.Bytes()), err
}

// Len returns the number of elements.
func (v Vector) Len() int { return int(v.count) }

// Bytes returns the elements.
func (v Vector) Bytes() []byte { return v.data[v.first : v.first+v.count*v.size] }

// Table returns element i of a vector of tables, whose elements have four bytes.
func (v Vector) Table(i int) (Table, error) {
	at, err := follow(v.data, v.first+4*uint32(i))
	return Table{v.data, at}, err
}
