package verifier

import (
	"golang.org/x/sys/unix"
)

// lowestPriority gives this thread the lowest priority: nice 19, and the idle class of disk
// schedulers that support classes (ioprio_set(2)). Errors are ignored.
func lowestPriority() {
	const processes, idle = 1, 3 << 13             // IOPRIO_WHO_PROCESS; IOPRIO_CLASS_IDLE, above the bits of the level
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, 19) // 0 is the calling thread
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, processes, 0, idle)
}
