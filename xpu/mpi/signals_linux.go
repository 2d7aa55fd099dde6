//go:build amd64 || arm64

package mpi

import (
	"runtime"
	"syscall"
	"unsafe"
)

// taken are the signals that MPI libraries and what they load take over: faults, to print where a program has crashed (UCX does), which in Go are
// panics, may be recovered from, and belong to its runtime; and those that ask a program to stop (the LLVM of an OpenCL, which hwloc loads).
var taken = [...]syscall.Signal{syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV,
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2}

// handlers are the kernel's descriptions of what is done at each of the signals taken.
type handlers [len(taken)][64]byte

// keepHandlers returns a function that puts back the handlers of those signals as they are now.
func keepHandlers() func() {
	const setBytes = 8 // of the kernel's sigset_t
	kept := new(handlers)
	action := func(i int, set, get uintptr) {
		syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(taken[i]), set, get, setBytes, 0, 0)
	}
	for i := range taken {
		action(i, 0, uintptr(unsafe.Pointer(&kept[i])))
	}
	return func() {
		for i := range taken {
			action(i, uintptr(unsafe.Pointer(&kept[i])), 0)
		}
		runtime.KeepAlive(kept)
	}
}
