//go:build amd64 || arm64

package opencl

import (
	"sync"
	"syscall"
	"unsafe"
)

// Drivers take signals over: LLVM, in PoCL and others, those that end a program, to remove its files, and SIGUSR1, which is then lost; PoCL SIGFPE.
// With PoCL 3.1 that happens when devices are listed first. In Go they are panics and requests to stop, and belong to its runtime. So its handlers
// are put back after that, and after every call that may compile.

// An action is the kernel's description of what is done at a signal. Its first word is the handler's address: 0 is what the kernel does by itself, 1
// is nothing.
type action [8]uint64

const signals = 31 // those that are not real-time

// kept are the actions before the first driver was loaded.
var (
	keepOnce sync.Once
	kept     [signals + 1]action
)

func getAction(signal syscall.Signal, a *action) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(signal), 0, uintptr(unsafe.Pointer(a)), 8, 0, 0)
}

func setAction(signal syscall.Signal, a *action) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(signal), uintptr(unsafe.Pointer(a)), 0, 8, 0, 0)
}

// keepSignals notes the actions as they are.
func keepSignals() {
	keepOnce.Do(func() {
		for s := 1; s <= signals; s++ {
			getAction(syscall.Signal(s), &kept[s])
		}
	})
}

// restoreSignals puts back Go's handlers where another's are. What Go itself has changed meanwhile stays: it has one handler, or none.
func restoreSignals() {
	goHandler := kept[syscall.SIGSEGV][0]
	for s := 1; s <= signals; s++ {
		var now action
		getAction(syscall.Signal(s), &now)
		if now[0] > 1 && now[0] != goHandler && kept[s][0] == goHandler {
			setAction(syscall.Signal(s), &kept[s])
		}
	}
}

// restoreTakenSignals does so if SIGSEGV has been taken over: drivers take what they take together, and one question costs little.
func restoreTakenSignals() {
	var now action
	if getAction(syscall.SIGSEGV, &now); now[0] != kept[syscall.SIGSEGV][0] {
		restoreSignals()
	}
}
