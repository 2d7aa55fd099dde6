// Package faultfs has a file system for tests. The test decides which operations fail, and files
// are not synced to disk.
//
// A test of every fault runs the code with an [Nth] for K = 1, 2, 3 and so on, until no operation
// failed:
//
//	nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC}
//	err := write(faultfs.New(nth.Fault))
package faultfs

import (
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
)

// Op is a kind of file operation.
type Op string

// The operations. A file that package atomicfile writes goes through the first five in this order.
const (
	Create  Op = "create" // of a file or a directory
	Write   Op = "write"
	Sync    Op = "sync"
	Rename  Op = "rename"
	SyncDir Op = "sync directory"
	Remove  Op = "remove"
	Link    Op = "link"
	Chtimes Op = "change times"

	Open    Op = "open" // for reading
	Read    Op = "read"
	Stat    Op = "stat"
	ReadDir Op = "read directory"
)

// Reads reports whether the operation only reads.
func (op Op) Reads() bool { return op == Open || op == Read || op == Stat || op == ReadDir }

// A Fault is called before an operation, from any goroutine. If it returns an error, the operation
// is skipped and fails with that error. path is the final name if the file has a temporary name,
// and the new name for [Rename].
type Fault func(op Op, path string) error

// New returns the file system of the machine with faults; fault may be nil. Two kinds of operations
// do nothing or are not reported to fault:
//
//   - Files and directories are not synced. A killed process loses nothing without that, and tests
//     take less time.
//   - The removal of this process's temporary file, which follows a fault, is not reported.
func New(fault Fault) filesystem.FS { return faulty{fault} }

// FailOn returns a file system on which one kind of operation fails with err, for paths that end in
// suffix.
func FailOn(op Op, suffix string, err error) filesystem.FS {
	return New(func(o Op, path string) error {
		if o == op && strings.HasSuffix(path, suffix) {
			return err
		}
		return nil
	})
}

// Nth fails the Kth operation, counted from 1.
type Nth struct {
	K     int64
	Err   error
	After bool // all later operations fail, too
	// Counts selects the operations that are counted; nil = operations that write
	Counts func(op Op, path string) bool

	count  atomic.Int64
	failed atomic.Pointer[string]
}

// Fault is a [Fault].
func (n *Nth) Fault(op Op, path string) error {
	if n.Counts == nil && op.Reads() || n.Counts != nil && !n.Counts(op, path) {
		return nil
	}
	if count := n.count.Add(1); count < n.K || count > n.K && !n.After {
		return nil
	}
	what := fmt.Sprintf("%s %s", op, path)
	n.failed.CompareAndSwap(nil, &what)
	return n.Err
}

// Failed returns the first operation that failed and its path, or "" if none failed.
func (n *Nth) Failed() string {
	if what := n.failed.Load(); what != nil {
		return *what
	}
	return ""
}

type faulty struct{ fault Fault }

// check calls the test's function.
func (f faulty) check(op Op, name string) error {
	if f.fault == nil {
		return nil
	}
	final, own, _ := atomicfile.Temporary(name)
	if op == Remove {
		if own {
			return nil
		}
		final = name // another process may have left it
	}
	if err := f.fault(op, final); err != nil {
		return &fs.PathError{Op: string(op), Path: final, Err: err}
	}
	return nil
}

func (f faulty) OpenFile(name string, flag int, perm fs.FileMode) (filesystem.File, error) {
	op := Open
	if flag&os.O_CREATE != 0 {
		op = Create
	}
	// A second descriptor of a file that is being written is not an operation of its own.
	if flag&os.O_WRONLY == 0 || op == Create {
		if err := f.check(op, name); err != nil {
			return nil, err
		}
	}
	opened, err := filesystem.OS{}.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &file{File: opened, fs: f}, nil
}

func (f faulty) Mkdir(name string, perm fs.FileMode) error {
	if err := f.check(Create, name); err != nil {
		return err
	}
	return os.Mkdir(name, perm)
}

func (f faulty) Rename(from, to string) error {
	if err := f.check(Rename, to); err != nil {
		return err
	}
	return os.Rename(from, to)
}

func (f faulty) Link(from, to string) error {
	if err := f.check(Link, to); err != nil {
		return err
	}
	return os.Link(from, to)
}

func (f faulty) Chtimes(name string, accessed, modified time.Time) error {
	if err := f.check(Chtimes, name); err != nil {
		return err
	}
	return os.Chtimes(name, accessed, modified)
}

func (f faulty) Remove(name string) error {
	if err := f.check(Remove, name); err != nil {
		return err
	}
	return os.Remove(name)
}

func (f faulty) Stat(name string) (fs.FileInfo, error) {
	if err := f.check(Stat, name); err != nil {
		return nil, err
	}
	return os.Stat(name)
}

func (f faulty) ReadDir(name string) ([]fs.DirEntry, error) {
	if err := f.check(ReadDir, name); err != nil {
		return nil, err
	}
	return os.ReadDir(name)
}

func (f faulty) SyncDir(name string) error { return f.check(SyncDir, name) }

// file is an open file of a faulty file system.
type file struct {
	filesystem.File
	fs faulty
}

func (f *file) Read(p []byte) (int, error) {
	if err := f.fs.check(Read, f.Name()); err != nil {
		return 0, err
	}
	return f.File.Read(p)
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	if err := f.fs.check(Read, f.Name()); err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

func (f *file) Write(p []byte) (int, error) {
	if err := f.fs.check(Write, f.Name()); err != nil {
		return 0, err
	}
	return f.File.Write(p)
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	if err := f.fs.check(Write, f.Name()); err != nil {
		return 0, err
	}
	return f.File.WriteAt(p, off)
}

func (f *file) Sync() error { return f.fs.check(Sync, f.Name()) }
