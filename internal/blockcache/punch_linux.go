package blockcache

import (
	"os"

	"golang.org/x/sys/unix"
)

// punch releases the disk space of a part of a file, which then reads as zeros.
func punch(f *os.File, from, n int64) error {
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, n)
}
