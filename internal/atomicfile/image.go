package atomicfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

const (
	// directAlign is what a piece's offset, length and memory must be multiples of to go past the
	// page cache. Common disks want 512 or 4096.
	directAlign = 4096

	// directFrom is the size of the smallest file whose pieces go past the page cache. A smaller
	// one reaches the disk in one go when it is sealed, which takes fewer round trips.
	directFrom = 1 << 20
)

// Image is a file of known size on its way to its final name, written in pieces in any order.
//
// A piece whose offset and memory are multiples of 4096 bytes goes straight to the disk as far as
// its length is one too, where the file system can do that: for gigabytes written once this is
// several times faster than the page cache, and leaves that to others. All other bytes, in
// particular those after the last multiple of 4096, go through the page cache.
type Image struct {
	pending
	size     int64
	written  atomic.Int64
	indirect atomic.Bool // the file system took the descriptor for direct writing, but not the writes

	// Linux keeps the two ways coherent as long as they do not run at the same time on one page,
	// and a page may be larger than a block. So direct writes share this lock, and those through
	// the page cache exclude them.
	ways sync.RWMutex
}

// CreateImage starts a file of size bytes that is to appear at path. The space is taken at once
// where the file system can do that, so that a full disk shows here. The directory must exist.
func CreateImage(path string, size int64) (*Image, error) {
	if size < 0 {
		return nil, fmt.Errorf("creating %s: a size of %d bytes", path, size)
	}
	p, err := create(path, filepath.Base(path))
	if err != nil {
		return nil, err
	}
	m := &Image{pending: p, size: size}
	if err := allocate(p.f, size); err != nil {
		m.Abort()
		return nil, fmt.Errorf("taking %d bytes for %s: %w", size, path, cause(err))
	}
	if size >= directFrom {
		m.direct = openDirect(p.f.Name())
	}
	return m, nil
}

// Size is the size given to [CreateImage].
func (m *Image) Size() int64 { return m.size }

// WriteAt writes p at byte off. Several goroutines may write at once, pieces that do not overlap; p
// is not kept.
func (m *Image) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || int64(len(p)) > m.size-off {
		return 0, fmt.Errorf("writing %s: %d bytes at %d end behind its %d bytes", m.path, len(p), off, m.size)
	}
	if err := fault(OpWrite, m.path); err != nil {
		return 0, err
	}
	n, err := m.writeDirect(p, off)
	if err == nil && n < len(p) {
		var k int
		if m.direct != nil {
			m.ways.Lock()
			defer m.ways.Unlock()
		}
		k, err = m.f.WriteAt(p[n:], off+int64(n))
		n += k
	}
	m.written.Add(int64(n))
	if err != nil {
		return n, fmt.Errorf("writing %s: %w", m.path, cause(err))
	}
	return n, nil
}

// writeDirect writes the beginning of p, as much of it as may go past the page cache, and returns
// how much that was.
func (m *Image) writeDirect(p []byte, off int64) (int, error) {
	if m.direct == nil || m.indirect.Load() || off%directAlign != 0 {
		return 0, nil
	}
	p = p[:len(p)&^(directAlign-1)]
	if len(p) == 0 || uintptr(unsafe.Pointer(unsafe.SliceData(p)))%directAlign != 0 {
		return 0, nil
	}
	m.ways.RLock()
	defer m.ways.RUnlock()
	n, err := m.direct.WriteAt(p, off)
	if errors.Is(err, syscall.EINVAL) {
		m.indirect.Store(true) // a disk that wants larger blocks, or none at all: the rest goes the other way
		return n, nil
	}
	return n, err
}

// Seal brings the bytes to disk and closes the file, which stays under its temporary name until
// Rename or Publish. It fails if fewer bytes were written than the file has.
func (m *Image) Seal() error {
	if err := m.whole(); err != nil {
		return err
	}
	return m.pending.Seal()
}

// Rename seals the file if that has not been done, and gives it its final name, as [File] does.
func (m *Image) Rename() error {
	if err := m.whole(); err != nil {
		return err
	}
	return m.pending.Rename()
}

// Publish is Rename and [SyncDir] of the file's directory.
func (m *Image) Publish() error {
	if err := m.whole(); err != nil {
		return err
	}
	return m.pending.Publish()
}

func (m *Image) whole() error {
	if n := m.written.Load(); n < m.size {
		return fmt.Errorf("writing %s: only %d of its %d bytes were written", m.path, n, m.size)
	}
	return nil
}

// extend gives the file its size without taking the space.
func extend(f *os.File, size int64) error { return f.Truncate(size) }
