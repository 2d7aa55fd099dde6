//go:build amd64 || arm64

package signals

import (
	"syscall"
	"unsafe"
)

// count is the number of signals that are not real-time signals. Signal numbers start at 1.
const count = 31

// An action is the kernel's struct sigaction. Its first word is the handler's address: 0 is the
// default action (SIG_DFL), 1 ignores the signal (SIG_IGN).
type action [8]uint64

// setBytes is the size of the kernel's signal set in bytes.
const setBytes = 8

func getAction(signal syscall.Signal, a *action) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(signal), 0, uintptr(unsafe.Pointer(a)), setBytes, 0, 0)
}

func setAction(signal syscall.Signal, a *action) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(signal), uintptr(unsafe.Pointer(a)), 0, setBytes, 0, 0)
}

// Handlers are the actions of all signals at one time.
type Handlers struct{ kept [count + 1]action }

// Keep saves the current action of each signal. Call it before a library is opened.
func Keep() *Handlers {
	h := new(Handlers)
	for s := 1; s <= count; s++ {
		getAction(syscall.Signal(s), &h.kept[s])
	}
	return h
}

// Taken lists the signals whose handler was Go's at [Keep] and is a handler of C code now. Changes
// by Go itself do not count: Go sets only its own handler, the default or ignore.
func (h *Handlers) Taken() (taken []syscall.Signal) {
	goHandler := h.kept[syscall.SIGSEGV][0]
	for s := 1; s <= count; s++ {
		var now action
		getAction(syscall.Signal(s), &now)
		if now[0] > 1 && now[0] != goHandler && h.kept[s][0] == goHandler {
			taken = append(taken, syscall.Signal(s))
		}
	}
	return taken
}

// Restore restores Go's handlers of the signals that [Handlers.Taken] lists.
func (h *Handlers) Restore() {
	for _, s := range h.Taken() {
		setAction(s, &h.kept[s])
	}
}

// RestoreIfFaults calls [Handlers.Restore] if the handler of SIGSEGV has changed. A library usually
// replaces all handlers of faults together, and checking one signal is cheap.
func (h *Handlers) RestoreIfFaults() {
	var now action
	if getAction(syscall.SIGSEGV, &now); now[0] != h.kept[syscall.SIGSEGV][0] {
		h.Restore()
	}
}
