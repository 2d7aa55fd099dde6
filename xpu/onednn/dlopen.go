//go:build !windows

package onednn

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

// anywhere stands for all libraries that the process has loaded.
var anywhere uintptr = purego.RTLD_DEFAULT
