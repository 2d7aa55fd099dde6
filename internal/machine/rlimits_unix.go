//go:build linux || darwin || freebsd

package machine

import (
	"math"

	"golang.org/x/sys/unix"
)

// readResourceLimits sets the limits that the user sees with ulimit.
func (l *Limits) readResourceLimits() {
	for resource, to := range map[int]*int64{unix.RLIMIT_AS: &l.AddressSpace, unix.RLIMIT_MEMLOCK: &l.LockedMemory,
		unix.RLIMIT_NOFILE: &l.OpenFiles, unix.RLIMIT_NPROC: &l.Processes} {
		var limit unix.Rlimit
		if err := unix.Getrlimit(resource, &limit); err == nil && uint64(limit.Cur) < math.MaxInt64 {
			*to = int64(limit.Cur)
		}
	}
}
