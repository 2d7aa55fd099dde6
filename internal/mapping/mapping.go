// Package mapping maps files into memory for reading.
//
// A mapping costs memory only for pages that were read recently, and the system can reclaim these
// pages at any time. A read of bytes beyond the end of a truncated file, or of bytes that the disk
// fails to deliver, raises a fault (SIGBUS) instead of an error. [Guard] turns the fault into an
// error. Outside of Guard the fault ends the process.
package mapping

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"unsafe"
)

// ErrUnreadable matches ([errors.Is]) the errors of [Guard] and [File.Cut] about a file. The
// mapping stays valid. If the file is restored by a new file under the same name, it must be opened
// again.
var ErrUnreadable = errors.New("mapped bytes cannot be read")

// unreadable wraps an error that is also ErrUnreadable.
type unreadable struct{ error }

func (unreadable) Is(target error) bool { return target == ErrUnreadable }

// A File is a file mapped for reading. The zero File has no bytes and is closed.
type File struct {
	Data []byte      // the bytes of the file, read-only; nil if it is empty
	Info fs.FileInfo // at the time of Open
	path string
}

// mapped lists the mapped files by the address of their first byte, for [Guard].
var mapped = struct {
	sync.Mutex
	files map[uintptr]File
}{files: map[uintptr]File{}}

func address(data []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(data))) }

// register makes a file known to Guard.
func register(f File) {
	mapped.Lock()
	defer mapped.Unlock()
	mapped.files[address(f.Data)] = f
}

// forget must be called before the bytes are unmapped, because another mapping may then start at
// the same address.
func forget(data []byte) {
	mapped.Lock()
	defer mapped.Unlock()
	delete(mapped.files, address(data))
}

// Guard calls read and returns its error. read must read mapped bytes only on the calling
// goroutine. If bytes of a mapped file cannot be read, Guard stops read and returns an
// [fs.PathError] that names the file and the reason. Other panics are passed on. Guard costs a few
// nanoseconds and may be nested.
func Guard(read func() error) (err error) {
	before := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(before)
		if p := recover(); p != nil {
			if err = faultError(p); err == nil {
				panic(p)
			}
		}
	}()
	return read()
}

// faultError returns the error about the mapped file in which the fault p occurred, nil if p is not
// such a fault.
func faultError(p any) error {
	fault, ok := p.(interface {
		runtime.Error
		Addr() uintptr
	})
	if !ok {
		return nil
	}
	mapped.Lock()
	defer mapped.Unlock()
	for start, f := range mapped.files {
		if at := fault.Addr(); at >= start && at-start < uintptr(len(f.Data)) {
			err := f.Cut()
			if err == nil {
				err = f.fail(fmt.Errorf("byte %d could not be read: the disk failed, or the file was cut short "+
					"while in use; check both and start again", at-start))
			}
			return err
		}
	}
	return nil
}

func (f *File) fail(err error) error {
	return &fs.PathError{Op: "read", Path: f.path, Err: unreadable{err}}
}

// Replaced asks the system whether the path now names another file, or none.
func (f *File) Replaced() bool {
	now, err := os.Stat(f.path)
	return err != nil || f.Info == nil || !os.SameFile(now, f.Info)
}

// Cut asks the system whether the file has been truncated since it was opened, and returns an
// [fs.PathError] if so. It does not detect that another file has replaced the file.
func (f *File) Cut() error {
	now, err := os.Stat(f.path)
	if err != nil || f.Info == nil || !os.SameFile(now, f.Info) || now.Size() >= f.Info.Size() {
		return nil
	}
	return f.fail(fmt.Errorf("the file was cut short while in use: it had %d bytes when it was opened and has %d "+
		"now; restore it and start again",
		f.Info.Size(), now.Size()))
}

// Probe reads the last byte, so that [Guard] returns an error if the file was truncated. Guard
// misses a truncation within the page of the last byte, because the rest of that page reads as
// zeros. Only [File.Cut] detects it.
func (f *File) Probe() {
	if n := len(f.Data); n > 0 {
		load(&f.Data[n-1])
	}
}

// lastPage is the number of bytes at the end of a file that may share a page of memory.
var lastPage = os.Getpagesize()

// Intact returns an error if the file was truncated. Call it inside [Guard], after part of Data has
// been read: a truncation within a page reads as zeros and raises no fault. Intact asks the system
// only if part is at the end of the file.
func (f *File) Intact(part []byte) error {
	f.Probe()
	return f.CutBefore(int64(address(part)-address(f.Data)) + int64(len(part)))
}

// CutBefore returns [File.Cut] if a truncation before the given byte might raise no fault.
// Otherwise it asks nothing and returns nil.
func (f *File) CutBefore(end int64) error {
	if end <= int64(len(f.Data)-lastPage) {
		return nil
	}
	return f.Cut()
}

// load reads a byte. The compiler cannot optimize the read away.
//
//go:noinline
func load(p *byte) byte { return *p }
