package flatbuffer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	flatbuffers "github.com/google/flatbuffers/go"
)

// example is a table as Google's library writes it: a number, a string, a vector of two numbers, a
// vector of two tables with one number each, and a table. Field 5 is absent.
func example() []byte {
	b := flatbuffers.NewBuilder(0)
	text := b.CreateString("tokens")
	b.StartVector(8, 2, 8)
	b.PrependUint64(12)
	b.PrependUint64(11)
	numbers := b.EndVector(2)
	var children [2]flatbuffers.UOffsetT
	for i := range children {
		b.StartObject(1)
		b.PrependUint32Slot(0, uint32(21+i), 0)
		children[i] = b.EndObject()
	}
	b.StartVector(4, 2, 4)
	b.PrependUOffsetT(children[1])
	b.PrependUOffsetT(children[0])
	tables := b.EndVector(2)
	b.StartObject(6)
	b.PrependInt16Slot(0, 7, 0)
	b.PrependUOffsetTSlot(1, text, 0)
	b.PrependUOffsetTSlot(2, numbers, 0)
	b.PrependUOffsetTSlot(3, tables, 0)
	b.PrependUOffsetTSlot(4, children[0], 0)
	b.Finish(b.EndObject())
	return b.FinishedBytes()
}

// values reads everything that [example] has.
func values(data []byte) (list []uint64, text string, err error) {
	t, err := Root(data)
	if err != nil {
		return nil, "", err
	}
	number := func(t Table, n, size uint32) {
		v, e := t.Number(n, size, 99)
		list, err = append(list, v), errors.Join(err, e)
	}
	number(t, 0, 2)
	number(t, 5, 8)
	number(t, 60, 8)
	text, e := t.Text(1)
	err = errors.Join(err, e)
	v, e := t.Vector(2, 8)
	err = errors.Join(err, e)
	for i := range v.Len() {
		list = append(list, binary.LittleEndian.Uint64(v.Bytes()[8*i:]))
	}
	if v, e = t.Vector(3, 4); e != nil {
		return nil, "", errors.Join(err, e)
	}
	for i := range v.Len() {
		child, e := v.Table(i)
		if err = errors.Join(err, e); e == nil {
			number(child, 0, 4)
		}
	}
	child, ok, e := t.Child(4)
	if err = errors.Join(err, e); ok {
		number(child, 0, 4)
	}
	if _, ok, e := t.Child(5); ok || e != nil {
		err = errors.Join(err, e, errors.New("an absent table exists"))
	}
	return list, text, err
}

func TestRead(t *testing.T) {
	got, text, err := values(example())
	want := []uint64{7, 99, 99, 11, 12, 21, 22, 21}
	if err != nil || text != "tokens" || len(got) != len(want) {
		t.Fatalf("got %d, %q, %v; want %d", got, text, err, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("got %d, want %d", got, want)
		}
	}
}

// A buffer that was cut short is an error: the example needs all its bytes except the last two,
// which pad its string.
func TestTruncated(t *testing.T) {
	data := example()
	for n := range len(data) - 2 {
		if got, text, err := values(data[:n]); err == nil {
			t.Errorf("%d of %d bytes: got %d, %q", n, len(data), got, text)
		}
	}
}

// Damage is an error or other values, never a panic.
func FuzzRead(f *testing.F) {
	f.Add(example())
	f.Add(bytes.Repeat([]byte{255}, 64))
	f.Fuzz(func(t *testing.T, data []byte) {
		values(data)
	})
}
