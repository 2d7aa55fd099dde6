package serve

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
)

// Limits of the number of slots. A client that keeps the previous batch while it processes the next
// needs two slots, and the server needs two to read ahead. Small records need more, to save
// switches between the processes.
const (
	leastSlots   = 6
	mostSlots    = 64
	smallRecords = 1 << 20 // bytes of records in slots from which leastSlots is enough
)

// slotsOf returns the number of slots of a stream, given the size of a record in bytes.
func slotsOf(record int64) int64 { return min(max(smallRecords/record, leastSlots), mostSlots) }

// errNoRoom reports that there is currently no memory for slots.
var errNoRoom = errors.New("no memory for slots")

// A slot is memory that holds one record at a time, one column after the other. It is the allocator
// of this record. The next record uses another part of the area.
type slot struct {
	area   *area // nil before the first record
	number int
	memory []byte
	used   int
}

// alignment is the alignment of Arrow's buffers. A record has fewer than mostBuffers buffers.
const (
	alignment   = 64
	mostBuffers = 16
)

// laidOut returns the size of a slot for a record of the given size, in bytes.
func laidOut(record int64) int64 { return pages(record + alignment*mostBuffers) }

// pages rounds up to complete pages.
func pages(bytes int64) int64 {
	page := int64(os.Getpagesize())
	return (bytes + page - 1) / page * page
}

// use sets the slot of an area that the next record is written to.
func (s *slot) use(a *area, number int) {
	s.area, s.number, s.memory, s.used = a, number, a.slot(number), 0
}

// taken returns the number of bytes of the pages that the record occupies.
func (s *slot) taken() int64 { return pages(int64(s.used)) }

// Allocate returns the next bytes of the slot. If the slot is full, it returns other memory, and
// place then fails.
func (s *slot) Allocate(size int) []byte {
	start := (s.used + alignment - 1) / alignment * alignment
	if size > len(s.memory)-start || s.area.back(s.number, start+size) != nil {
		return make([]byte, size)
	}
	s.used = start + size
	return s.memory[start:s.used:s.used]
}

// Reallocate returns size bytes that start with the bytes of b.
func (s *slot) Reallocate(size int, b []byte) []byte {
	if size <= len(b) {
		return b[:size]
	}
	bigger := s.Allocate(size)
	copy(bigger, b)
	return bigger
}

// Free does nothing. The memory is reused when the whole slot is.
func (s *slot) Free([]byte) {}

// place appends the location in the slot of each buffer of a record: offset and length, as
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
