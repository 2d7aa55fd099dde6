package tokenize

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is the size of a huge page on most machines.
const hugePage = 2 << 20

// newTable returns n zero values of a type without pointers, on huge pages if the kernel has some
// to give: a new table then needs far fewer page faults.
func newTable[T any](n int) []T {
	size := n * int(unsafe.Sizeof(*new(T)))
	if size < hugePage {
		return make([]T, n)
	}
	b := make([]uint64, (size+hugePage)/8) // aligned like every T
	start := unsafe.Pointer(&b[0])
	aligned := unsafe.Add(start, -uintptr(start)%hugePage)
	_ = unix.Madvise(unsafe.Slice((*byte)(aligned), size), unix.MADV_HUGEPAGE) // only a hint
	return unsafe.Slice((*T)(aligned), n)
}
