//go:build (linux || darwin) && !static

package sharedlib

import (
	"runtime"

	"github.com/ebitengine/purego"
)

// everything is the handle of [Loaded].
const everything uintptr = purego.RTLD_DEFAULT

func open(name string, global bool) (uintptr, error) {
	mode := purego.RTLD_NOW | purego.RTLD_LOCAL
	if global {
		mode = purego.RTLD_NOW | purego.RTLD_GLOBAL
	}
	runtime.LockOSThread() // dlerror is per thread
	defer runtime.UnlockOSThread()
	return purego.Dlopen(name, mode)
}

// symbol returns 0 if the library does not define the name.
func symbol(library uintptr, name string) (uintptr, error) {
	address, _ := purego.Dlsym(library, name)
	return address, nil
}
