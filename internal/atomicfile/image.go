package atomicfile

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"mula/internal/filesystem"
)

const (
	// directAlign is the alignment of offset, length and memory address that a direct write
	// (O_DIRECT) needs. Common disks need 512 or 4096.
	directAlign = 4096

	// directFrom is the size in bytes of the smallest file that uses direct writes. A smaller file
	// is written to disk in one go when it is sealed, which needs fewer round trips.
	directFrom = 1 << 20
)

// Image is a file of known size that is written in chunks in any order and then renamed to its
// final name.
//
// A chunk bypasses the page cache (O_DIRECT) if its offset and memory address are multiples of 4096
// bytes and the file system supports direct writes. The last len % 4096 bytes of a chunk, and all
// other chunks, go through the page cache. For gigabytes that are written once, direct writes are
// several times faster and leave the page cache to other programs.
type Image struct {
	pending
	size     int64
	written  atomic.Int64
	indirect atomic.Bool // the file system opened the descriptor for direct writing, but refused a write

	// Linux keeps direct and cached writes coherent only if they do not access the same page at the
	// same time, and a page may be larger than a block. So direct writes share this lock, and a
	// write through the page cache holds it exclusively.
	ways sync.RWMutex
}

// CreateImage creates a file of size bytes that will be published at path. The space is allocated
// at once if the file system supports that, so that a full disk is reported here. The directory
// must exist.
func CreateImage(path string, size int64) (*Image, error) { return Files{}.CreateImage(path, size) }

// CreateImage is [CreateImage] on the file system.
func (w Files) CreateImage(path string, size int64) (*Image, error) {
	if size < 0 {
		return nil, fmt.Errorf("creating %s: negative size %d", path, size)
	}
	p, err := w.create(path, filepath.Base(path))
	if err != nil {
		return nil, err
	}
	m := &Image{pending: p, size: size}
	if err := allocate(p.f, size); err != nil {
		m.Abort()
		return nil, fmt.Errorf("allocating %d bytes for %s: %w", size, path, cause(err))
	}
	if size >= directFrom {
		m.direct = openDirect(p.fsys, p.f.Name())
	}
	return m, nil
}

// Size returns the size that [CreateImage] was called with.
func (m *Image) Size() int64 { return m.size }

// WriteAt writes p at byte off. Several goroutines may write ranges that do not overlap at the same
// time. WriteAt does not retain p.
func (m *Image) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || int64(len(p)) > m.size-off {
		return 0, fmt.Errorf("writing %s: %d bytes at offset %d exceed the file size of %d bytes", m.path, len(p),
			off, m.size)
	}
	if err := Injected(OpWrite, m.path); err != nil {
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

// writeDirect writes the longest prefix of p that can bypass the page cache and returns its length.
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
		m.indirect.Store(true) // larger blocks needed, or not supported: use the page cache
		return n, nil
	}
	return n, err
}

// Seal syncs the file to disk and closes it. The file keeps its temporary name until Rename or
// Publish. It fails if fewer bytes than the file's size were written.
func (m *Image) Seal() error {
	if err := m.whole(); err != nil {
		return err
	}
	return m.pending.Seal()
}

// Rename seals the file if necessary and renames it to its final name, as Rename of [File] does.
func (m *Image) Rename() error {
	if err := m.whole(); err != nil {
		return err
	}
	return m.pending.Rename()
}

// Publish renames the file as Rename does and then syncs its directory with [SyncDir].
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

// extend sets the size of the file without allocating space.
func extend(f filesystem.File, size int64) error { return f.Truncate(size) }
