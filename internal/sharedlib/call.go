//go:build !static

package sharedlib

import "github.com/ebitengine/purego"

// Call calls the function at an address, and returns its result, and the C variable errno.
//
//go:uintptrescapes
func Call(address uintptr, args ...uintptr) (result, second, errno uintptr) {
	return purego.SyscallN(address, args...)
}

// Register makes the Go function variable that f points to call the function at an address.
func Register(f any, address uintptr) { purego.RegisterFunc(f, address) }
