//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package locks

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Alone waits until no other process of this machine is between Alone and the function it returned,
// for the same directory. The system ends that for a process that dies. Where the file system does
// not offer it, it does nothing.
func Alone(dir string) (done func()) {
	d, err := os.Open(dir)
	if err != nil {
		return func() {}
	}
	// In bursts of a few microseconds: nobody holds it while doing anything else.
	_ = flock(d, unix.LOCK_EX)
	return func() { unlock(d); d.Close() }
}

// hold takes the lock of an open file, or returns [ErrHeld] if another process has it.
func hold(f *os.File) error {
	err := flock(f, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrHeld
	}
	return err
}

// unlock gives the lock of an open file back. To close the file is not enough: a child process that
// was started this moment has the file open, too, until it becomes another program, and the lock
// goes with the last of them.
func unlock(f *os.File) { _ = flock(f, unix.LOCK_UN) }

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); err != unix.EINTR {
			return err
		}
	}
}
