package locks

import (
	"errors"
	"fmt"
	"os"
)

// ErrHeld is that another process holds a [File].
var ErrHeld = errors.New("locked by another process")

// A File is an open file that this process alone holds. Unlike a [Lock] it is of one machine, and
// goes with the process at once, however it ends; the file itself stays and keeps nobody away.
type File struct{ *os.File }

// Hold opens a file for reading and writing, makes it if need be, and locks it until Close. The
// error wraps [ErrHeld] if another process holds it, and [errors.ErrUnsupported] where files cannot
// be locked.
func Hold(path string) (*File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := hold(f); err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return &File{f}, nil
}

// Close gives the file back.
func (f *File) Close() error {
	unlock(f.File)
	return f.File.Close()
}
