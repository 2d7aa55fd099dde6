//go:build unix && !linux

package atomicfile

import "syscall"

// realm is empty: on these systems the host's name is all that tells one machine from another.
func realm() string { return "" }

// processStart tells only whether the process is there.
func processStart(pid int) (started int64, alive bool) {
	return 0, syscall.Kill(pid, 0) != syscall.ESRCH
}
