package main

import (
	"os"

	"golang.org/x/sys/unix"

	"mula/internal/machine"
)

// memory is the file system in memory that Linux has by default.
const memory = "/dev/shm"

// enough is the number of bytes that must be free: what the go command and the tests write, with
// room to spare.
const enough = 4 << 30

// inMemory makes a folder in memory for the files of tests. It returns "" if TMPDIR is set, or if
// the machine has no such file system, with enough room, from which programs can be started.
func inMemory() (folder string, err error) {
	var s unix.Statfs_t
	if os.Getenv("TMPDIR") != "" || unix.Statfs(memory, &s) != nil || s.Type != unix.TMPFS_MAGIC ||
		s.Flags&unix.ST_NOEXEC != 0 || unix.Access(memory, unix.W_OK) != nil ||
		min(int64(s.Bavail)*s.Bsize, machine.AvailableMemory()) < enough {
		return "", nil
	}
	return os.MkdirTemp(memory, "mula-test-")
}
