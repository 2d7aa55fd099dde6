package train

import (
	"io/fs"
	"path/filepath"
	"strings"
	"sync"

	"mula/internal/filesystem"
)

// planted adds the planted bug to the file system of a process.
func (c *cluster) planted(fsys filesystem.FS) filesystem.FS {
	switch c.plant {
	case lostSync:
		return unsyncedFS{fsys}
	case manifestFirst:
		return lateFS{fsys, c.late}
	}
	return fsys
}

// unsyncedFS does not sync files of the optimizer's state.
type unsyncedFS struct{ filesystem.FS }

func (f unsyncedFS) OpenFile(name string, flag int, perm fs.FileMode) (filesystem.File, error) {
	opened, err := f.FS.OpenFile(name, flag, perm)
	if err != nil || !strings.Contains(filepath.Base(name), "optimizer") {
		return opened, err
	}
	return unsyncedFile{opened}, nil
}

type unsyncedFile struct{ filesystem.File }

func (unsyncedFile) Sync() error { return nil }

// lateFS writes the content of weights after the checkpoint has its final name. Until then, the
// files have zeros.
type lateFS struct {
	filesystem.FS
	late *lateWrites
}

// lateWrites are writes of all processes.
type lateWrites struct {
	mu     sync.Mutex
	writes []func()
}

func (f lateFS) OpenFile(name string, flag int, perm fs.FileMode) (filesystem.File, error) {
	opened, err := f.FS.OpenFile(name, flag, perm)
	base := filepath.Base(name)
	if err != nil || !strings.HasPrefix(base, ".model") || !strings.HasSuffix(base, ".tmp") {
		return opened, err
	}
	return &lateFile{File: opened, late: f.late}, nil
}

func (f lateFS) Rename(from, to string) error {
	err := f.FS.Rename(from, to)
	if err == nil && strings.HasPrefix(filepath.Base(to), "step-") {
		f.late.mu.Lock()
		writes := f.late.writes
		f.late.writes = nil
		f.late.mu.Unlock()
		for _, write := range writes {
			write()
		}
	}
	return err
}

type lateFile struct {
	filesystem.File
	late *lateWrites
	at   int64
}

func (f *lateFile) Write(p []byte) (int, error) {
	p, at := append([]byte(nil), p...), f.at
	f.at += int64(len(p))
	f.late.mu.Lock()
	f.late.writes = append(f.late.writes, func() {
		_, _ = f.File.WriteAt(p, at) // a write that is lost is the planted bug
		_ = f.File.Sync()
	})
	f.late.mu.Unlock()
	return len(p), f.Truncate(f.at)
}
