package atomicfile

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"mula/internal/filesystem"
)

// allocate allocates the space of the whole file. If the file system cannot do that, it only sets
// the size.
func allocate(f filesystem.File, size int64) error {
	if size == 0 {
		return nil
	}
	for {
		switch err := unix.Fallocate(int(f.Fd()), 0, 0, size); {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return extend(f, size)
		default:
			return err
		}
	}
}

// openDirect opens a file for writing past the page cache. It returns nil if the file system cannot
// write in blocks of directAlign.
func openDirect(fsys filesystem.FS, name string) filesystem.File {
	f, err := fsys.OpenFile(name, os.O_WRONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil
	}
	// Linux 6.1 and newer report the alignment. On older kernels the first write shows whether
	// direct writes work.
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err == nil &&
		st.Mask&unix.STATX_DIOALIGN != 0 {
		fits := func(align uint32) bool { return align != 0 && directAlign%align == 0 }
		if !fits(st.Dio_mem_align) || !fits(st.Dio_offset_align) {
			f.Close()
			return nil
		}
	}
	return f
}
