// Package atomicfile writes files that appear under their final name whole or not at all.
//
// A file is written under a temporary name in the directory of its final name, so that the rename
// that publishes it stays within one file system. Before the rename its bytes are on disk (fsync),
// after it the directory entry is (fsync of the directory). A process that dies on the way leaves a
// file whose name starts with a dot and ends in [TempSuffix]; no command of mula reads such a file,
// and [Clean] removes it.
//
// Files that belong together are sealed first and published in order, the one that readers look for
// last:
//
//	data.Seal(); index.Seal(); data.Publish(); index.Publish()
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// TempSuffix ends the name of every file that is still being written.
const TempSuffix = ".tmp"

// Op names a file operation in [Fault].
type Op string

// The operations that [Fault] is asked about; the first five in the order in which a file goes
// through them.
const (
	OpCreate  Op = "create"
	OpWrite   Op = "write"
	OpSync    Op = "sync"
	OpRename  Op = "rename"
	OpSyncDir Op = "sync directory"
	OpRemove  Op = "remove"
)

// Fault, when a test sets it, is asked before every operation; what it returns stands for the error
// that the operating system would have given, and the operation is not carried out. path is the
// final name of the file. It is nil outside tests.
var Fault func(op Op, path string) error

// SkipSync, when a test sets it, leaves files and directories to the operating system instead of
// waiting for the disk. A process that is killed loses nothing by that, only a machine that
// crashes. [Fault] is asked as ever. It is false outside tests.
var SkipSync bool

func toDisk(f *os.File) error {
	if SkipSync {
		return nil
	}
	return f.Sync()
}

func fault(op Op, path string) error {
	if Fault == nil {
		return nil
	}
	if err := Fault(op, path); err != nil {
		return &fs.PathError{Op: string(op), Path: path, Err: err}
	}
	return nil
}

// A pending file is on its way to its final name. What [File] and [Image] have in common.
type pending struct {
	path   string // the final name
	f      *os.File
	direct *os.File // a second descriptor that goes past the page cache, or nil
	sealed bool
	done   bool // published or aborted
}

// File is a file on its way to its final name, written from its beginning to its end. It is not
// safe for use by several goroutines.
type File struct{ pending }

// Create starts a file that is to appear at path. The directory must exist.
func Create(path string) (*File, error) { return CreateAs(path, filepath.Base(path)) }

// CreateAs is [Create] with a temporary name made of name instead of the final one, for a folder
// whose readers look for a part of the final name.
func CreateAs(path, name string) (*File, error) {
	p, err := create(path, name)
	if err != nil {
		return nil, err
	}
	return &File{p}, nil
}

func create(path, name string) (pending, error) {
	if err := fault(OpCreate, path); err != nil {
		return pending{}, err
	}
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		// To rename over a device or a pipe would put a file in its place.
		return pending{}, fmt.Errorf("creating %s: it is %s; name another output", path, kind(info.Mode()))
	}
	// Not os.CreateTemp, whose files only their owner can read: a published file has the
	// permissions that the user's umask gives.
	for {
		f, err := os.OpenFile(TempName(filepath.Join(filepath.Dir(path), name)), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return pending{}, fmt.Errorf("creating %s: %w", path, cause(err))
		}
		return pending{path: path, f: f}, nil
	}
}

// kind names what is no regular file.
func kind(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a folder"
	case mode&fs.ModeNamedPipe != 0:
		return "a pipe"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return "no regular file"
}

// cause is the error of the operating system without the temporary name, which tells the user
// nothing.
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

// Path is the final name of the file.
func (p *pending) Path() string { return p.path }

// Write appends p to the file.
func (f *File) Write(p []byte) (int, error) {
	if err := fault(OpWrite, f.path); err != nil {
		return 0, err
	}
	n, err := f.f.Write(p)
	if err != nil {
		return n, fmt.Errorf("writing %s: %w", f.path, cause(err))
	}
	return n, nil
}

// Seal brings the bytes to disk and closes the file, which stays under its temporary name until
// Rename or Publish.
func (p *pending) Seal() error {
	if p.sealed || p.done {
		return nil
	}
	if err := fault(OpSync, p.path); err != nil {
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

// Rename seals the file if that has not been done, and gives it its final name, replacing what
// stood there. The new name survives a crash of the machine only after [SyncDir] of its directory:
// for many files of one directory, one call serves them all.
func (p *pending) Rename() error {
	if p.done {
		return errors.New("atomicfile: " + p.path + " was published or aborted before")
	}
	if err := p.Seal(); err != nil {
		return err
	}
	if err := fault(OpRename, p.path); err != nil {
		return err
	}
	if err := os.Rename(p.f.Name(), p.path); err != nil {
		return fmt.Errorf("publishing %s: %w", p.path, cause(err))
	}
	p.done = true
	return nil
}

// Publish is Rename and [SyncDir] of the file's directory.
func (p *pending) Publish() error {
	if err := p.Rename(); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(p.path))
}

// Abort removes the temporary file. After Rename or Publish it does nothing, so it can be deferred
// right after the file is created.
func (p *pending) Abort() {
	if p.done {
		return
	}
	p.done = true
	if !p.sealed {
		p.close()
	}
	os.Remove(p.f.Name())
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

// WriteFile makes data the content of path, in one step for every reader.
func WriteFile(path string, data []byte) error {
	f, err := Create(path)
	if err != nil {
		return err
	}
	defer f.Abort()
	if _, err := f.Write(data); err != nil {
		return err
	}
	return f.Publish()
}

// Remove removes the file at path; that there is none is no error. The removal survives a crash of
// the machine after [SyncDir].
func Remove(path string) error {
	if err := fault(OpRemove, path); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// SyncDir brings the entries of a directory to disk: renames and removals in it survive a crash of
// the machine after it returns.
func SyncDir(dir string) error {
	if err := fault(OpSyncDir, dir); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("syncing directory: %w", err)
	}
	defer d.Close()
	if err := toDisk(d); err != nil {
		return fmt.Errorf("syncing directory: %w", err)
	}
	return nil
}
