// Package atomicfile writes files atomically: a file appears under its final name complete or not
// at all.
//
// A file is written under a temporary name in the directory of its final name, so that the rename
// that publishes it stays within one file system. The file is synced (fsync) before the rename, and
// its directory after the rename. A process that dies before the rename leaves a file whose name
// starts with a dot and ends in [TempSuffix]. No command of mula reads such a file, and [Clean]
// removes it.
//
// Files that belong together are sealed first and then published in order. The file that readers
// look for is published last:
//
//	data.Seal(); index.Seal(); data.Publish(); index.Publish()
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"mula/internal/filesystem"
)

// TempSuffix ends the name of every file that is still being written.
const TempSuffix = ".tmp"

// Op names a file operation in [Fault].
type Op string

// The operations that [Fault] is called for. A file goes through the first five in this order.
const (
	OpCreate  Op = "create"
	OpWrite   Op = "write"
	OpSync    Op = "sync"
	OpRename  Op = "rename"
	OpSyncDir Op = "sync directory"
	OpRemove  Op = "remove"
)

// Fault, if a test sets it, is called before every operation. If it returns an error, the operation
// is skipped and fails with that error. path is the final name of the file. Fault is nil outside
// tests.
var Fault func(op Op, path string) error

// SkipSync, if a test sets it, skips fsync of files and directories. A killed process loses nothing
// without fsync; a machine that crashes may lose data. [Fault] is called as usual. SkipSync is
// false outside tests.
var SkipSync bool

func toDisk(f filesystem.File) error {
	if SkipSync {
		return nil
	}
	return f.Sync()
}

// Injected calls [Fault] for an operation. Code that changes files without this package calls it
// before each operation, too.
func Injected(op Op, path string) error {
	if Fault == nil {
		return nil
	}
	if err := Fault(op, path); err != nil {
		return &fs.PathError{Op: string(op), Path: path, Err: err}
	}
	return nil
}

// Files writes files on a file system. The zero value writes on the file system of the machine, as
// the functions of this package do.
type Files struct{ fsys filesystem.FS }

// On returns the Files of a file system; nil is the file system of the machine.
func On(fsys filesystem.FS) Files { return Files{fsys} }

// FS returns the file system.
func (w Files) FS() filesystem.FS { return filesystem.Default(w.fsys) }

// A pending file does not have its final name yet. It is the common part of [File] and [Image].
type pending struct {
	fsys   filesystem.FS
	path   string // the final name
	f      filesystem.File
	direct filesystem.File // a second descriptor that bypasses the page cache (O_DIRECT), or nil
	sealed bool
	done   bool // published or aborted
}

// File is a file that is written sequentially and then renamed to its final name. It is not safe
// for concurrent use.
type File struct{ pending }

// Create creates a file that will be published at path. The directory must exist.
func Create(path string) (*File, error) { return Files{}.Create(path) }

// Create is [Create] on the file system.
func (w Files) Create(path string) (*File, error) { return w.CreateAs(path, filepath.Base(path)) }

// CreateAs is Create with a temporary name made from name instead of the final name. Use it in a
// folder whose readers match a part of the final name.
func (w Files) CreateAs(path, name string) (*File, error) {
	p, err := w.create(path, name)
	if err != nil {
		return nil, err
	}
	return &File{p}, nil
}

func (w Files) create(path, name string) (pending, error) {
	fsys := w.FS()
	if err := Injected(OpCreate, path); err != nil {
		return pending{}, err
	}
	if info, err := fsys.Stat(path); err == nil && !info.Mode().IsRegular() {
		// A rename over a device or a pipe would replace it by a regular file.
		return pending{}, fmt.Errorf("creating %s: the path is %s; name another output", path, kind(info.Mode()))
	}
	// os.CreateTemp is not used because only the owner can read its files. A published file has the
	// permissions that follow from the user's umask.
	for {
		temp := TempName(filepath.Join(filepath.Dir(path), name))
		f, err := fsys.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return pending{}, fmt.Errorf("creating %s: %w", path, cause(err))
		}
		return pending{fsys: fsys, path: path, f: f}, nil
	}
}

// kind names the type of a file that is not a regular file.
func kind(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a folder"
	case mode&fs.ModeNamedPipe != 0:
		return "a pipe"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return "not a regular file"
}

// cause returns the error of the operating system without the temporary name, which is useless to
// the user.
func cause(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	var link *os.LinkError
	if errors.As(err, &link) {
		return link.Err
	}
	return err
}

// Path returns the final name of the file.
func (p *pending) Path() string { return p.path }

// Write appends p to the file.
func (f *File) Write(p []byte) (int, error) {
	if err := Injected(OpWrite, f.path); err != nil {
		return 0, err
	}
	n, err := f.f.Write(p)
	if err != nil {
		return n, fmt.Errorf("writing %s: %w", f.path, cause(err))
	}
	return n, nil
}

// Seal syncs the file to disk and closes it. The file keeps its temporary name until Rename or
// Publish.
func (p *pending) Seal() error {
	if p.sealed || p.done {
		return nil
	}
	if err := Injected(OpSync, p.path); err != nil {
		return err
	}
	if err := toDisk(p.f); err != nil {
		return fmt.Errorf("writing %s: %w", p.path, cause(err))
	}
	p.sealed = true
	if err := p.close(); err != nil {
		return fmt.Errorf("writing %s: %w", p.path, cause(err))
	}
	return nil
}

// Rename seals the file if necessary and renames it to its final name, replacing an existing file.
// The new name survives a crash of the machine only after [SyncDir] of the directory. One call of
// SyncDir is enough for many files of one directory.
func (p *pending) Rename() error {
	if p.done {
		return errors.New("atomicfile: " + p.path + " has already been published or aborted")
	}
	if err := p.Seal(); err != nil {
		return err
	}
	if err := Injected(OpRename, p.path); err != nil {
		return err
	}
	if err := p.fsys.Rename(p.f.Name(), p.path); err != nil {
		return fmt.Errorf("publishing %s: %w", p.path, cause(err))
	}
	p.done = true
	return nil
}

// Publish renames the file as Rename does and then syncs its directory with [SyncDir].
func (p *pending) Publish() error {
	if err := p.Rename(); err != nil {
		return err
	}
	return On(p.fsys).SyncDir(filepath.Dir(p.path))
}

// Abort removes the temporary file. It does nothing after Rename or Publish, so it can be deferred
// right after the file is created.
func (p *pending) Abort() {
	if p.done {
		return
	}
	p.done = true
	if !p.sealed {
		p.close()
	}
	_ = p.fsys.Remove(p.f.Name())
}

func (p *pending) close() error {
	var first error
	if p.direct != nil {
		first = p.direct.Close()
	}
	if err := p.f.Close(); err != nil {
		return err
	}
	return first
}

// WriteFile atomically writes data to the file at path.
func WriteFile(path string, data []byte) error { return Files{}.WriteFile(path, data) }

// WriteFile is [WriteFile] on the file system.
func (w Files) WriteFile(path string, data []byte) error {
	f, err := w.Create(path)
	if err != nil {
		return err
	}
	defer f.Abort()
	if _, err := f.Write(data); err != nil {
		return err
	}
	return f.Publish()
}

// Remove removes the file at path. It returns nil if the file does not exist. The removal survives
// a crash of the machine only after [SyncDir].
func (w Files) Remove(path string) error {
	if err := Injected(OpRemove, path); err != nil {
		return err
	}
	if err := w.FS().Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// SyncDir syncs the entries of a directory to disk. Renames and removals in it survive a crash of
// the machine after SyncDir returns.
func SyncDir(dir string) error { return Files{}.SyncDir(dir) }

// SyncDir is [SyncDir] on the file system.
func (w Files) SyncDir(dir string) error {
	if err := Injected(OpSyncDir, dir); err != nil {
		return err
	}
	if SkipSync {
		return nil
	}
	if err := w.FS().SyncDir(dir); err != nil {
		return fmt.Errorf("syncing directory: %w", err)
	}
	return nil
}
