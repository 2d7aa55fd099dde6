//go:build static

package sharedlib

// Builds with the tag static are not linked to the C library and cannot open libraries, so there is
// no address to call.

func Call(uintptr, ...uintptr) (result, second, errno uintptr) {
	panic("sharedlib: call in a static build")
}

func Register(any, uintptr) { panic("sharedlib: function registered in a static build") }
