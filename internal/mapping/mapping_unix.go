//go:build unix

package mapping

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Open maps a regular file. The mapping outlives the file's name.
func Open(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close() // the mapping outlives the descriptor
	info, err := f.Stat()
	if err != nil {
		return File{}, err
	}
	if !info.Mode().IsRegular() {
		return File{}, &fs.PathError{Op: "map", Path: path, Err: errors.New("it is not a regular file")}
	}
	size := info.Size()
	if size == 0 {
		return File{Info: info, path: path}, nil // it cannot be mapped
	}
	if int64(int(size)) != size {
		return File{}, &fs.PathError{Op: "map", Path: path,
			Err: fmt.Errorf("%d bytes do not fit this machine's address space", size)}
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if errors.Is(err, unix.ENOMEM) {
		err = fmt.Errorf("%w: the system limits the mappings or the address space of a process; see "+
			"vm.max_map_count and ulimit -v", err)
	}
	if err != nil {
		return File{}, &fs.PathError{Op: "map", Path: path, Err: err}
	}
	opened := File{data, info, path}
	register(opened)
	return opened, nil
}

// Scattered says that Data will be read here and there: a look at one entry of a large file is not
// to read megabytes around it.
func (f *File) Scattered() { advise(f.Data, unix.MADV_RANDOM) }

// Usual takes back what Scattered and InSequence said.
func (f *File) Usual() { advise(f.Data, unix.MADV_NORMAL) }

// InSequence says that a part of Data will be read from its beginning to its end.
func (f *File) InSequence(part []byte) { advise(part, unix.MADV_SEQUENTIAL) }

// Forget gives back the memory of a part of Data; reading it again reads the file again.
func (f *File) Forget(part []byte) { advise(part, unix.MADV_DONTNEED) }

// advise is about the pages that hold part of a mapping. It is advice: where the system does not
// take it, reading is only slower.
func advise(part []byte, advice int) {
	if len(part) == 0 {
		return
	}
	page := uintptr(os.Getpagesize())
	start := uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	ahead := start % page
	_ = unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(part)), -int(ahead))),
		len(part)+int(ahead)), advice)
}

// Close ends the mapping: Data must not be read afterwards. A second call does nothing.
func (f *File) Close() error {
	if f.Data == nil {
		return nil
	}
	data := f.Data
	f.Data = nil
	forget(data)
	return unix.Munmap(data)
}
