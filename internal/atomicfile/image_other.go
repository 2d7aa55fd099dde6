//go:build !linux

package atomicfile

import "mula/internal/filesystem"

// allocate sets the size of the file.
func allocate(f filesystem.File, size int64) error { return extend(f, size) }

// openDirect returns nil: direct writes are not supported on this system.
func openDirect(filesystem.FS, string) filesystem.File { return nil }
