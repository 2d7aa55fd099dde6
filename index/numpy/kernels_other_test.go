//go:build !amd64 || purego

package numpy

// setVectors switches the assembly on or off. It returns whether it is on: there is none.
func setVectors(bool) bool { return false }
