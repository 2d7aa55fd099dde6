//go:build !unix

package facts

import "io/fs"

// inode returns 0, because the system has no inode numbers.
func inode(fs.FileInfo) uint64 { return 0 }
