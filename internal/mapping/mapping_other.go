//go:build !unix

package mapping

import (
	"errors"
	"io/fs"
)

// Open fails: systems other than Unix have no mapping here yet.
func Open(path string) (File, error) {
	return File{}, &fs.PathError{Op: "map", Path: path, Err: errors.ErrUnsupported}
}

// Scattered says that Data will be read here and there.
func (f *File) Scattered() {}

// Usual takes back what Scattered and InSequence said.
func (f *File) Usual() {}

// InSequence says that a part of Data will be read from its beginning to its end.
func (f *File) InSequence([]byte) {}

// Forget gives back the memory of a part of Data.
func (f *File) Forget([]byte) {}

// Close ends the mapping.
func (f *File) Close() error { return nil }
