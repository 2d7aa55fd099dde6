// Package filesystem is the interface between mula's packages and the file system.
//
// A package that reads or writes files has an option of type [FS]. Nil means [OS], the file system
// of the machine. Tests pass a file system whose operations fail (package faultfs).
package filesystem

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// FS opens, renames, removes and lists files. Its methods do what the functions of package os with
// the same names do.
type FS interface {
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	Mkdir(name string, perm fs.FileMode) error
	Rename(from, to string) error
	Link(from, to string) error // makes a hard link
	Chtimes(name string, accessed, modified time.Time) error
	Remove(name string) error
	Stat(name string) (fs.FileInfo, error)
	ReadDir(name string) ([]fs.DirEntry, error)

	// SyncDir syncs the entries of a directory to disk. Renames and removals in it survive a crash
	// of the machine after SyncDir returns.
	SyncDir(name string) error
}

// File is an open file. [os.File] implements it.
type File interface {
	io.Reader
	io.ReaderAt
	io.Writer
	io.WriterAt
	io.Seeker
	io.Closer
	Name() string
	Stat() (fs.FileInfo, error)
	Truncate(size int64) error
	Sync() error
	Fd() uintptr
}

// Default returns fsys, or [OS] if fsys is nil.
func Default(fsys FS) FS {
	if fsys == nil {
		return OS{}
	}
	return fsys
}

// Open opens a file for reading.
func Open(fsys FS, name string) (File, error) { return fsys.OpenFile(name, os.O_RDONLY, 0) }

// ReadFile returns the contents of a file. A file system may have a method for it, as in
// package io/fs.
func ReadFile(fsys FS, name string) ([]byte, error) {
	if f, ok := fsys.(interface{ ReadFile(string) ([]byte, error) }); ok {
		return f.ReadFile(name)
	}
	f, err := Open(fsys, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// WriteFile writes data to a file, and creates the file if necessary.
func WriteFile(fsys FS, name string, data []byte, perm fs.FileMode) error {
	f, err := fsys.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, perm)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}

// MkdirAll creates a directory and its parents, as [os.MkdirAll] does.
func MkdirAll(fsys FS, name string, perm fs.FileMode) error {
	if f, ok := fsys.(interface {
		MkdirAll(string, fs.FileMode) error
	}); ok {
		return f.MkdirAll(name, perm)
	}
	info, err := fsys.Stat(name)
	if err == nil && info.IsDir() {
		return nil
	}
	if err == nil {
		return &fs.PathError{Op: "mkdir", Path: name, Err: syscall.ENOTDIR}
	}
	if parent := filepath.Dir(name); parent != name {
		if err := MkdirAll(fsys, parent, perm); err != nil {
			return err
		}
	}
	if err := fsys.Mkdir(name, perm); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// RemoveAll removes a file, or a directory with its contents, as [os.RemoveAll] does.
func RemoveAll(fsys FS, name string) error {
	if f, ok := fsys.(interface{ RemoveAll(string) error }); ok {
		return f.RemoveAll(name)
	}
	err := fsys.Remove(name)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	entries, listErr := fsys.ReadDir(name)
	if listErr != nil { // not a directory
		return err
	}
	for _, e := range entries {
		if err := RemoveAll(fsys, filepath.Join(name, e.Name())); err != nil {
			return err
		}
	}
	if err := fsys.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// OS is the file system of the machine.
type OS struct{}

// OpenFile implements [FS].
func (OS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err // not a File that holds a nil pointer
	}
	return f, nil
}

// Mkdir implements [FS].
func (OS) Mkdir(name string, perm fs.FileMode) error { return os.Mkdir(name, perm) }

// Rename implements [FS].
func (OS) Rename(from, to string) error { return os.Rename(from, to) }

// Link implements [FS].
func (OS) Link(from, to string) error { return os.Link(from, to) }

// Chtimes implements [FS].
func (OS) Chtimes(name string, accessed, modified time.Time) error {
	return os.Chtimes(name, accessed, modified)
}

// Remove implements [FS].
func (OS) Remove(name string) error { return os.Remove(name) }

// Stat implements [FS].
func (OS) Stat(name string) (fs.FileInfo, error) { return os.Stat(name) }

// ReadDir implements [FS].
func (OS) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(name) }

// MkdirAll is [os.MkdirAll].
func (OS) MkdirAll(name string, perm fs.FileMode) error { return os.MkdirAll(name, perm) }

// RemoveAll is [os.RemoveAll].
func (OS) RemoveAll(name string) error { return os.RemoveAll(name) }

// SyncDir implements [FS].
func (OS) SyncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
