//go:build unix

package shards

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// mapping is a file mapped for reading; data is nil for an empty file, which cannot be mapped.
type mapping struct {
	data []byte
	info fs.FileInfo
}

func mapFile(path string) (mapping, error) {
	f, err := os.Open(path)
	if err != nil {
		return mapping{}, err
	}
	defer f.Close() // the mapping outlives the descriptor
	info, err := f.Stat()
	if err != nil {
		return mapping{}, err
	}
	if !info.Mode().IsRegular() {
		return mapping{}, &fs.PathError{Op: "map", Path: path, Err: fmt.Errorf("it is not a regular file")}
	}
	size := info.Size()
	if size == 0 {
		return mapping{info: info}, nil
	}
	if int64(int(size)) != size {
		return mapping{}, &fs.PathError{Op: "map", Path: path, Err: fmt.Errorf("%d bytes do not fit this machine's address space", size)}
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if errors.Is(err, unix.ENOMEM) {
		err = fmt.Errorf("%w: the system limits the mappings or the address space of a process; see vm.max_map_count and ulimit -v", err)
	}
	if err != nil {
		return mapping{}, &fs.PathError{Op: "map", Path: path, Err: err}
	}
	return mapping{data, info}, nil
}

func (m *mapping) unmap() error {
	if m.data == nil {
		return nil
	}
	data := m.data
	m.data = nil
	return unix.Munmap(data)
}
