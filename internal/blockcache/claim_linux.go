package blockcache

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// lockRange locks n bytes of an open file for this opening of the file. It does not wait: locked is
// false if another opening has locked a part of them.
func lockRange(f *os.File, off, n int64) (locked bool, err error) {
	err = lock(f, unix.F_WRLCK, off, n)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	return err == nil, err
}

func unlockRange(f *os.File, off, n int64) { _ = lock(f, unix.F_UNLCK, off, n) }

func lock(f *os.File, kind int16, off, n int64) error {
	part := unix.Flock_t{Type: kind, Whence: io.SeekStart, Start: off, Len: n}
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &part)
}
