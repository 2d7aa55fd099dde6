//go:build !linux

package numpy

import "unsafe"

// Aligned is zeroed memory of so many bytes that begins at a multiple of 4096. release gives it
// back; the memory must not be used afterwards.
func Aligned(bytes int) (memory []byte, release func()) {
	const page = 4096
	m := make([]byte, bytes+page)
	skip := -int(uintptr(unsafe.Pointer(&m[0]))) & (page - 1)
	return m[skip : skip+bytes : skip+bytes], func() {}
}
