//go:build !linux

package tokenize

// newTable returns n zero values of a type without pointers.
func newTable[T any](n int) []T { return make([]T, n) }
