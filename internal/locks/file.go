package locks

import (
	"errors"
	"fmt"
	"os"

	"mula/internal/filesystem"
)

// ErrHeld is the error of [Hold] if another process has locked the file.
var ErrHeld = errors.New("locked by another process")

// A File is an open file that only this process has locked. Unlike a [Lock] it works on one machine
// only, and the system releases it as soon as the process ends. The file itself stays and blocks no
// process.
type File struct{ filesystem.File }

// Hold opens a file for reading and writing, creates it if necessary, and locks it until Close. The
// error wraps [ErrHeld] if another process has locked the file, and [errors.ErrUnsupported] if the
// system cannot lock files.
func Hold(path string) (*File, error) { return HoldOn(filesystem.OS{}, path) }

// HoldOn is [Hold] on a file system.
func HoldOn(fsys filesystem.FS, path string) (*File, error) {
	f, err := fsys.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if l, ok := f.(locker); !ok {
		err = hold(f)
	} else if !l.TryLock() {
		err = ErrHeld
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return &File{f}, nil
}

// A locker is a file of a test's file system. TryLock reports whether it has locked the file until
// Close.
type locker interface{ TryLock() bool }

// Close unlocks and closes the file.
func (f *File) Close() error {
	if _, ok := f.File.(locker); !ok {
		unlock(f.File)
	}
	return f.File.Close()
}
