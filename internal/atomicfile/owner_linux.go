package atomicfile

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
)

// realm tells boots and process id namespaces (containers) apart: within one, a process id means
// one process at a time.
func realm() string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	space, _ := os.Readlink("/proc/self/ns/pid")
	return string(bytes.TrimSpace(boot)) + " " + space
}

// processStart is the time at which a process started, in clock ticks since the machine did, 0 if
// unknown, and whether the process is there at all. One that has ended but whose parent has not
// asked for its status yet (a zombie) is not there: it cannot write.
func processStart(pid int) (started int64, alive bool) {
	if err := syscall.Kill(pid, 0); err == syscall.ESRCH {
		return 0, false
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, true // hidden, or no /proc
	}
	// The second field, the name in parentheses, may hold anything; the state is the third, the
	// start time the 22nd (proc(5)).
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
