//go:build !linux

package numpy

import "unsafe"

// Aligned allocates zeroed memory of the given size, aligned to 4096 bytes. release frees the
// memory, which must not be used afterwards.
func Aligned(bytes int) (memory []byte, release func()) {
	const page = 4096
	m := make([]byte, bytes+page)
	skip := -int(uintptr(unsafe.Pointer(&m[0]))) & (page - 1)
	return m[skip : skip+bytes : skip+bytes], func() {}
}
