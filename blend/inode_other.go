//go:build !unix

package blend

import "io/fs"

// inode is the number of a file in its file system, 0 where there are none.
func inode(fs.FileInfo) uint64 { return 0 }
