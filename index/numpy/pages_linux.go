package numpy

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Aligned allocates zeroed memory of the given size outside Go's heap. The memory is aligned to 2
// MiB. If it is at least that large, it uses huge pages if possible, which speeds up random access
// to large arrays. release frees the memory, which must not be used afterwards.
func Aligned(bytes int) (memory []byte, release func()) {
	const page = 2 << 20
	size := (max(bytes, 1) + page - 1) &^ (page - 1)
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(size+page), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		// out of address space or of mappings: the Go heap either reports the error or has memory
		m := make([]byte, size+page)
		skip := -int(uintptr(unsafe.Pointer(&m[0]))) & (page - 1)
		return m[skip : skip+bytes : skip+bytes], func() {}
	}
	first := unsafe.Add(base, -int(uintptr(base))&(page-1))
	all := unsafe.Slice((*byte)(first), size)
	if bytes >= page { // else the kernel would clear a whole huge page for a few bytes
		// Without huge pages the memory is only slower.
		_ = unix.Madvise(all, unix.MADV_HUGEPAGE)
	}
	return all[:bytes:bytes], func() {
		if base != nil {
			_ = unix.MunmapPtr(base, uintptr(size+page))
			base = nil
		}
	}
}
