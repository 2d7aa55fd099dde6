//go:build unix

package facts

import (
	"io/fs"
	"syscall"
)

// inode returns the inode number of a file, 0 if it is unknown.
func inode(info fs.FileInfo) uint64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(s.Ino)
	}
	return 0
}
