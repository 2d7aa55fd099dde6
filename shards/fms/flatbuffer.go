package fms

import (
	"encoding/binary"
	"errors"
)

// errOutside is the error about an offset in a flatbuffer that leads out of it.
var errOutside = errors.New("an offset in its metadata leads outside of it")

// A table is a table of a flatbuffer, the form of Arrow's metadata (flatbuffers.dev, "Internals"):
// at its position stands how far before it its list of fields begins, and that list has, from byte
// 4 on, how far behind the position each field is, 0 for one that is left out.
type table struct {
	data []byte
	at   uint32
}

// root is the table that a flatbuffer begins with.
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

// field is where field n is in t.data, 0 if it is left out.
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

// number is field n, an unsigned number of size bytes; one that is left out is absent.
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

// child is field n, a table. ok is false if it is left out.
func (t table) child(n uint32) (c table, ok bool, err error) {
	at, err := t.field(n)
	if err != nil || at == 0 {
		return table{}, false, err
	}
	at, err = t.follow(at)
	return table{t.data, at}, err == nil, err
}

// follow gives where the offset at a position leads.
func (t table) follow(at uint32) (uint32, error) {
	offset, err := u32At(t.data, at)
	if err == nil && uint64(at)+uint64(offset)+4 > uint64(len(t.data)) {
		err = errOutside
	}
	return at + offset, err
}

// vector is field n, a vector of elements of size bytes each: the position of the first, and how
// many there are.
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

// text is field n, a string.
func (t table) text(n uint32) (string, error) {
	first, count, err := t.vector(n, 1)
	if err != nil || first == 0 {
		return "", err
	}
	return string(t.data[first : first+count]), nil
}
