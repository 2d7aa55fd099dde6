//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package locks

import (
	"os"

	"golang.org/x/sys/unix"
)

// Alone waits until no other process of this machine is between Alone and the function it returned, for the same directory. The system
// ends that for a process that dies. Where the file system does not offer it, it does nothing.
func Alone(dir string) (done func()) {
	d, err := os.Open(dir)
	if err != nil {
		return func() {}
	}
	for {
		// In bursts of a few microseconds: nobody holds it while doing anything else.
		if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != unix.EINTR {
			break
		}
	}
	return func() { d.Close() }
}
