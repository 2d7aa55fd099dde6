//go:build !static

package sharedlib

import "github.com/ebitengine/purego"

// Call calls the function at address and returns its results and the C variable errno.
//
//go:uintptrescapes
func Call(address uintptr, args ...uintptr) (result, second, errno uintptr) {
	return purego.SyscallN(address, args...)
}

// Register sets the Go function variable that f points to, so that it calls the function at
// address.
func Register(f any, address uintptr) { purego.RegisterFunc(f, address) }
