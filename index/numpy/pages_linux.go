package numpy

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Aligned is zeroed memory of so many bytes outside Go's heap. It begins at a multiple of 2 MiB and
// asks for pages of that size, with which random access to large arrays is faster. release gives it
// back; the memory must not be used afterwards.
func Aligned(bytes int) (memory []byte, release func()) {
	const page = 2 << 20
	size := (max(bytes, 1) + page - 1) &^ (page - 1)
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(size+page), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		m := make([]byte, size+page) // out of address space or of mappings: Go's heap says so, or has room
		skip := -int(uintptr(unsafe.Pointer(&m[0]))) & (page - 1)
		return m[skip : skip+bytes : skip+bytes], func() {}
	}
	first := unsafe.Add(base, -int(uintptr(base))&(page-1))
	all := unsafe.Slice((*byte)(first), size)
	// Without huge pages the memory is only slower.
	_ = unix.Madvise(all, unix.MADV_HUGEPAGE)
	return all[:bytes:bytes], func() {
		if base != nil {
			_ = unix.MunmapPtr(base, uintptr(size+page))
			base = nil
		}
	}
}
