//go:build static

package sharedlib

// Builds with the tag static do not link to the C library. No library opens, so there is no address
// that can be called.

func Call(uintptr, ...uintptr) (result, second, errno uintptr) {
	panic("sharedlib: call in a static build")
}

func Register(any, uintptr) { panic("sharedlib: function registered in a static build") }
