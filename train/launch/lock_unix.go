//go:build unix

package launch

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// tryLock locks a file for this process until it is closed, or returns errLocked if another one has done so.
func tryLock(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return errLocked
	}
	return err
}
