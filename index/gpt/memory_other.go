//go:build !linux

package gpt

// availableMemory is how many bytes the machine can give without swapping, 0 if it is not known.
func availableMemory() int64 { return 0 }
