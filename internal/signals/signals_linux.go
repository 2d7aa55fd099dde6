//go:build amd64 || arm64

package signals

import (
	"syscall"
	"unsafe"
)

// count is the number of signals that are not real-time; they begin with 1.
const count = 31

// An action is the kernel's description of what is done at a signal. Its first word is the
// handler's address: 0 is what the kernel does by itself, 1 is nothing.
type action [8]uint64

// setBytes is the size of the kernel's set of signals.
const setBytes = 8

func getAction(signal syscall.Signal, a *action) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(signal), 0, uintptr(unsafe.Pointer(a)), setBytes, 0, 0)
}

func setAction(signal syscall.Signal, a *action) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(signal), uintptr(unsafe.Pointer(a)), 0, setBytes, 0, 0)
}

// Handlers are what is done at each signal, as it was at some time.
type Handlers struct{ kept [count + 1]action }

// Keep notes what is done at each signal now: before a library is opened.
func Keep() *Handlers {
	h := new(Handlers)
	for s := 1; s <= count; s++ {
		getAction(syscall.Signal(s), &h.kept[s])
	}
	return h
}

// Taken lists the signals that had Go's handler and have another's now. What Go itself has changed
// meanwhile is not among them: it has one handler, or none.
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

// Restore puts Go's handlers back at the signals taken.
func (h *Handlers) Restore() {
	for _, s := range h.Taken() {
		setAction(s, &h.kept[s])
	}
}

// RestoreIfFaults does so if SIGSEGV has been taken: libraries take what they take together, and
// one question costs little.
func (h *Handlers) RestoreIfFaults() {
	var now action
	if getAction(syscall.SIGSEGV, &now); now[0] != h.kept[syscall.SIGSEGV][0] {
		h.Restore()
	}
}
