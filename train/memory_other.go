//go:build !linux

package train

// machineMemory is the size of the machine's memory in bytes, 0 if it is not known.
func machineMemory() int64 { return 0 }
