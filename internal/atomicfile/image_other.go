//go:build !linux

package atomicfile

import "os"

// allocate sets the size of the file.
func allocate(f *os.File, size int64) error { return extend(f, size) }

// openDirect returns nil: direct writes are not supported on this system.
func openDirect(string) *os.File { return nil }
