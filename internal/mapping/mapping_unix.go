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

// Open maps a regular file. The mapping stays valid if the file is renamed or removed.
func Open(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close() // the mapping does not need the descriptor
	return Of(f)
}

// Of maps an open regular file. The mapping does not need f any more.
func Of(f *os.File) (File, error) {
	path := f.Name()
	info, err := f.Stat()
	if err != nil {
		return File{}, err
	}
	if !info.Mode().IsRegular() {
		return File{}, &fs.PathError{Op: "map", Path: path, Err: errors.New("not a regular file")}
	}
	size := info.Size()
	if size == 0 {
		return File{Info: info, path: path}, nil // an empty file cannot be mapped
	}
	if int64(int(size)) != size {
		return File{}, &fs.PathError{Op: "map", Path: path,
			Err: fmt.Errorf("%d bytes do not fit the address space of this machine", size)}
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

// Scattered announces random access to Data. It disables readahead, so that a read of one entry of
// a large file does not read megabytes around it.
func (f *File) Scattered() { advise(f.Data, unix.MADV_RANDOM) }

// Usual revokes Scattered and InSequence.
func (f *File) Usual() { advise(f.Data, unix.MADV_NORMAL) }

// InSequence announces a sequential read of a part of Data.
func (f *File) InSequence(part []byte) { advise(part, unix.MADV_SEQUENTIAL) }

// Forget releases the memory of a part of Data. A later access reads the file again.
func (f *File) Forget(part []byte) { advise(part, unix.MADV_DONTNEED) }

// advise calls madvise for the pages that hold part of a mapping. If the system ignores the advice,
// reads are slower but correct.
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

// Close unmaps the file. Data must not be read afterwards. A second call does nothing.
func (f *File) Close() error {
	if f.Data == nil {
		return nil
	}
	data := f.Data
	f.Data = nil
	forget(data)
	return unix.Munmap(data)
}
