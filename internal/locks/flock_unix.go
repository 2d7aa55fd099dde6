//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package locks

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"mula/internal/filesystem"
)

// Alone waits until no other process of this machine holds Alone's lock on the same directory, and
// locks it until the caller calls done. The system unlocks the directory if the process dies. Alone
// does nothing if the file system does not support flock.
func Alone(dir string) (done func()) {
	d, err := os.Open(dir)
	if err != nil {
		return func() {}
	}
	// This does not wait long: every process holds the lock for a few microseconds only.
	_ = flock(d, unix.LOCK_EX)
	return func() { unlock(d); d.Close() }
}

// hold locks an open file. It returns [ErrHeld] if another process has locked it.
func hold(f filesystem.File) error {
	err := flock(f, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrHeld
	}
	return err
}

// unlock unlocks an open file. Closing the file is not enough: a child process that was just forked
// shares the open file until exec, and the lock lasts until the last descriptor is closed.
func unlock(f filesystem.File) { _ = flock(f, unix.LOCK_UN) }

func flock(f filesystem.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); err != unix.EINTR {
			return err
		}
	}
}
