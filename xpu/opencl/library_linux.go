//go:build amd64 || arm64

package opencl

import (
	"runtime"

	"github.com/ebitengine/purego"
)

// openFile opens a shared library for this package alone.
func openFile(name string) (uintptr, error) {
	runtime.LockOSThread() // the reason of a failure is kept for the thread that met it
	defer runtime.UnlockOSThread()
	return purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

// symbol is the address of a library's function.
func symbol(library uintptr, name string) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return purego.Dlsym(library, name)
}
