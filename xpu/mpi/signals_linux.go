//go:build amd64 || arm64

package mpi

import (
	"runtime"
	"syscall"
	"unsafe"
)

// faults are the signals that MPI libraries and what they load (UCX does) take over to print where a program has crashed. In Go they are panics, which
// may be recovered from, and belong to its runtime.
var faults = [...]syscall.Signal{syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV}

// handlers are the kernel's descriptions of what is done at each of faults.
type handlers [len(faults)][64]byte

// keepHandlers returns a function that puts back the handlers of faults as they are now.
func keepHandlers() func() {
	const setBytes = 8 // of the kernel's sigset_t
	kept := new(handlers)
	action := func(i int, set, get uintptr) {
		syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(faults[i]), set, get, setBytes, 0, 0)
	}
	for i := range faults {
		action(i, 0, uintptr(unsafe.Pointer(&kept[i])))
	}
	return func() {
		for i := range faults {
			action(i, uintptr(unsafe.Pointer(&kept[i])), 0)
		}
		runtime.KeepAlive(kept)
	}
}
