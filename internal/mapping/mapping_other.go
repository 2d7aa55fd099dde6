//go:build !unix

package mapping

import (
	"errors"
	"io/fs"
	"os"
)

// Open fails: mapping is implemented for Unix systems only.
func Open(path string) (File, error) {
	return File{}, &fs.PathError{Op: "map", Path: path, Err: errors.ErrUnsupported}
}

// Of fails, too.
func Of(f *os.File) (File, error) { return Open(f.Name()) }

// Scattered announces random access to Data.
func (f *File) Scattered() {}

// Usual revokes Scattered and InSequence.
func (f *File) Usual() {}

// InSequence announces a sequential read of a part of Data.
func (f *File) InSequence([]byte) {}

// Forget releases the memory of a part of Data.
func (f *File) Forget([]byte) {}

// Close unmaps the file.
func (f *File) Close() error { return nil }
