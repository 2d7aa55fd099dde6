//go:build unix && !linux

package atomicfile

import "syscall"

// realm is empty. Machines are told apart only by the host name on these systems.
func realm() string { return "" }

// processStart reports only whether the process is alive.
func processStart(pid int) (started int64, alive bool) {
	return 0, syscall.Kill(pid, 0) != syscall.ESRCH
}
