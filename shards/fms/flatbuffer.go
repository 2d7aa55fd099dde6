package fms

import (
	"encoding/binary"
	"errors"
)

// errOutside is the error about an offset in a flatbuffer that points outside of it.
var errOutside = errors.New("an offset in the metadata is out of range")

// A table is a table of a flatbuffer, the encoding of Arrow's metadata (flatbuffers.dev,
// "Internals"). Its first word is the distance back to its vtable. From byte 4 on, the vtable has
// the offset of each field from the table, 0 for an absent field.
type table struct {
	data []byte
	at   uint32
}

// root returns the root table of a flatbuffer.
func root(data []byte) (table, error) {
	at, err := u32At(data, 0)
	return table{data, at}, err
}

func u32At(data []byte, at uint32) (uint32, error) {
	if uint64(at)+4 > uint64(len(data)) {
		return 0, errOutside
	}
	return binary.LittleEndian.Uint32(data[at:]), nil
}

// field returns the position of field n in t.data, 0 if the field is absent.
func (t table) field(n uint32) (uint32, error) {
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

// number returns field n, an unsigned number of size bytes, or absent if the field is absent.
func (t table) number(n uint32, size uint32, absent uint64) (uint64, error) {
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

// child returns field n, a table. ok is false if the field is absent.
func (t table) child(n uint32) (c table, ok bool, err error) {
	at, err := t.field(n)
	if err != nil || at == 0 {
		return table{}, false, err
	}
	at, err = t.follow(at)
	return table{t.data, at}, err == nil, err
}

// follow returns the target of the offset at a position.
func (t table) follow(at uint32) (uint32, error) {
	offset, err := u32At(t.data, at)
	if err == nil && uint64(at)+uint64(offset)+4 > uint64(len(t.data)) {
		err = errOutside
	}
	return at + offset, err
}

// vector returns the position of the first element and the number of elements of field n, a vector
// of elements of size bytes each.
func (t table) vector(n uint32, size uint32) (first, count uint32, err error) {
	at, err := t.field(n)
	if err != nil || at == 0 {
		return 0, 0, err
	}
	if at, err = t.follow(at); err != nil {
		return 0, 0, err
	}
	if count, err = u32At(t.data, at); err != nil {
		return 0, 0, err
	}
	if uint64(at)+4+uint64(count)*uint64(size) > uint64(len(t.data)) {
		return 0, 0, errOutside
	}
	return at + 4, count, nil
}

// text returns field n, a string.
func (t table) text(n uint32) (string, error) {
	first, count, err := t.vector(n, 1)
	if err != nil || first == 0 {
		return "", err
	}
	return string(t.data[first : first+count]), nil
}
