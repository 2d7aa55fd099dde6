//go:build !linux

package machine

// TotalMemory returns the size of the machine's memory in bytes, 0 if it is not known.
func TotalMemory() int64 { return 0 }

// AvailableMemory returns the number of bytes that the machine can allocate without swapping, 0 if
// it is not known.
func AvailableMemory() int64 { return 0 }
