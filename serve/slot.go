package serve

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
)

// Numbers of slots. A client that goes on while it holds the batch before needs two, and the server
// two to read ahead; small records want more, so that few of the messages about them cost a switch
// between the processes.
const (
	leastSlots   = 6
	mostSlots    = 64
	smallRecords = 1 << 20 // bytes of records that may be in slots before leastSlots is enough
)

// slotsOf is how many slots a stream has whose records have so many bytes.
func slotsOf(record int64) int64 { return min(max(smallRecords/record, leastSlots), mostSlots) }

// errNoRoom says that there is no memory for slots now.
var errNoRoom = errors.New("no memory for slots")

// A slot is memory that holds one record at a time, column behind column. It is the allocator of
// that record, and moves on to other memory for the next.
type slot struct {
	area   *area // nil before the first record
	number int
	memory []byte
	used   int
}

// alignment is that of Arrow's buffers, of which a record has fewer than mostBuffers.
const (
	alignment   = 64
	mostBuffers = 16
)

// laidOut gives the bytes of memory that a record of so many bytes takes in a slot.
func laidOut(record int64) int64 { return pages(record + alignment*mostBuffers) }

// pages rounds up to whole pages.
func pages(bytes int64) int64 {
	page := int64(os.Getpagesize())
	return (bytes + page - 1) / page * page
}

// use has the next record laid out in a slot of an area.
func (s *slot) use(a *area, number int) {
	s.area, s.number, s.memory, s.used = a, number, a.slot(number), 0
}

// taken is the number of bytes of the pages that the record lies in.
func (s *slot) taken() int64 { return pages(int64(s.used)) }

// Allocate gives the next bytes of the slot. Where it is full they are others, and place will say
// so.
func (s *slot) Allocate(size int) []byte {
	start := (s.used + alignment - 1) / alignment * alignment
	if size > len(s.memory)-start || s.area.back(s.number, start+size) != nil {
		return make([]byte, size)
	}
	s.used = start + size
	return s.memory[start:s.used:s.used]
}

// Reallocate gives size bytes that begin with those of b.
func (s *slot) Reallocate(size int, b []byte) []byte {
	if size <= len(b) {
		return b[:size]
	}
	bigger := s.Allocate(size)
	copy(bigger, b)
	return bigger
}

// Free does nothing: the next record has the slot, or another one, to itself.
func (s *slot) Free([]byte) {}

// place appends where in the slot the buffers of a record lie: offset and length of each,
// little-endian uint64.
func (s *slot) place(dst []byte, record arrow.RecordBatch) ([]byte, error) {
	var err error
	for _, c := range record.Columns() {
		if dst, err = s.placeData(dst, c.Data()); err != nil {
			return nil, err
		}
	}
	return dst, nil
}

func (s *slot) placeData(dst []byte, d arrow.ArrayData) (_ []byte, err error) {
	for i, b := range d.Buffers() {
		if i == 0 { // validity
			continue
		}
		offset, length := 0, 0
		if b != nil && b.Len() > 0 {
			bytes := b.Bytes()
			length = len(bytes)
			begin, at := uintptr(unsafe.Pointer(unsafe.SliceData(s.memory))),
				uintptr(unsafe.Pointer(unsafe.SliceData(bytes)))
			if at < begin || at-begin > uintptr(len(s.memory)-length) {
				return nil, fmt.Errorf("a record does not fit its slot of %d bytes", len(s.memory))
			}
			offset = int(at - begin)
		}
		dst = binary.LittleEndian.AppendUint64(dst, uint64(offset))
		dst = binary.LittleEndian.AppendUint64(dst, uint64(length))
	}
	for _, child := range d.Children() {
		if dst, err = s.placeData(dst, child); err != nil {
			return nil, err
		}
	}
	return dst, nil
}
