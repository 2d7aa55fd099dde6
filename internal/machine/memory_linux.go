package machine

import (
	"bytes"
	"os"
	"strconv"
)

// TotalMemory returns the size of the machine's memory in bytes, 0 if it is not known.
func TotalMemory() int64 { return field("/proc/meminfo", "MemTotal:") << 10 }

// AvailableMemory returns the number of bytes that the machine can allocate without swapping, 0 if
// it is not known. It does not include limits of the process.
func AvailableMemory() int64 { return field("/proc/meminfo", "MemAvailable:") << 10 }

// field returns the number after a key of a file of the kernel, 0 if there is none.
func field(path, key string) int64 {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(text) {
		if fields := bytes.Fields(line); len(fields) >= 2 && string(fields[0]) == key {
			n, _ := strconv.ParseInt(string(fields[1]), 10, 64)
			return n
		}
	}
	return 0
}
