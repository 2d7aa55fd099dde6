//go:build !unix

package shards

import (
	"errors"
	"io/fs"
)

// mapping stands for a file mapped for reading. Systems other than Unix have no mapping here yet: shards can be written and hashed on
// them, not opened.
type mapping struct {
	data []byte
	info fs.FileInfo
}

func mapFile(path string) (mapping, error) {
	return mapping{}, &fs.PathError{Op: "map", Path: path, Err: errors.ErrUnsupported}
}

func (m *mapping) unmap() error { return nil }
