//go:build !windows

package onednn

import "github.com/ebitengine/purego"

// openFile opens a shared library for this package alone.
func openFile(name string) (uintptr, error) {
	return purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

// symbol is the address of a library's function.
func symbol(library uintptr, name string) (uintptr, error) { return purego.Dlsym(library, name) }

// anywhere stands for all libraries that the process has loaded.
var anywhere uintptr = purego.RTLD_DEFAULT
