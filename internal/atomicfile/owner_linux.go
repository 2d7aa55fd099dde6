package atomicfile

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
)

// realm identifies the boot and the process id namespace (container). Within a realm, a process id
// identifies at most one process at a time.
func realm() string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	space, _ := os.Readlink("/proc/self/ns/pid")
	return string(bytes.TrimSpace(boot)) + " " + space
}

// processStart returns the start time of a process in clock ticks since boot, 0 if unknown, and
// whether the process is alive. A zombie, which has ended but whose parent has not waited for it,
// is not alive: it cannot write.
func processStart(pid int) (started int64, alive bool) {
	if err := syscall.Kill(pid, 0); err == syscall.ESRCH {
		return 0, false
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, true // hidden, or no /proc
	}
	// The second field, the name in parentheses, may contain any character. The state is field 3
	// and the start time field 22 (proc(5)).
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return 0, true
	}
	if s := fields[0][0]; s == 'Z' || s == 'X' {
		return 0, false
	}
	started, err = strconv.ParseInt(string(fields[19]), 10, 64)
	if err != nil || started < 0 {
		return 0, true
	}
	return started, true
}
