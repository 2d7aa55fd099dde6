// Package mapping maps files into memory for reading.
//
// A mapping costs memory only for what was read of it lately, and that the system can take back at
// any time. A read of bytes that the file does not have any more, or that a disk does not give, is
// no call that could return an error: the system stops the program there. [Guard] makes an error of
// it; outside of it the process ends.
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

// ErrUnreadable is what the errors of [Guard] and [File.Cut] about a file are ([errors.Is]). The
// mapping stays as it is: if the file is restored by another that takes its name, it must be opened
// again.
var ErrUnreadable = errors.New("mapped bytes cannot be read")

// unreadable is an error that is ErrUnreadable and says more.
type unreadable struct{ error }

func (unreadable) Is(target error) bool { return target == ErrUnreadable }

// A File is a file mapped for reading. The zero File is one without bytes, and closed.
type File struct {
	Data []byte      // its bytes, nothing to write to; nil if it has none
	Info fs.FileInfo // as it was when it was opened
	path string
}

// mapped are the files that are mapped, by the address of their first byte, for [Guard].
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

// forget is to be called before the bytes are unmapped: another mapping may then begin at the same
// address.
func forget(data []byte) {
	mapped.Lock()
	defer mapped.Unlock()
	delete(mapped.files, address(data))
}

// Guard calls read, which reads mapped bytes on the calling goroutine and on no other, and gives
// its error. If bytes of a file that is mapped cannot be read, it gives an [fs.PathError] that
// names the file and says why, and what read had still to do is left undone. Every other panic goes
// on. It costs a few nanoseconds and may be nested.
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

// faultError is the error about a file that a panic is about, if it is about one.
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
				err = f.fail(fmt.Errorf("byte %d could not be read: its disk failed, or the file was cut short "+
					"while it was in use; look at both and start again", at-start))
			}
			return err
		}
	}
	return nil
}

func (f *File) fail(err error) error {
	return &fs.PathError{Op: "read", Path: f.path, Err: unreadable{err}}
}

// Replaced asks the system whether the file's name stands for another file by now, or for none.
func (f *File) Replaced() bool {
	now, err := os.Stat(f.path)
	return err != nil || f.Info == nil || !os.SameFile(now, f.Info)
}

// Cut asks the system whether the file has been cut short since it was opened, and gives an
// [fs.PathError] if it has. It knows nothing of a file that another has taken the place of.
func (f *File) Cut() error {
	now, err := os.Stat(f.path)
	if err != nil || f.Info == nil || !os.SameFile(now, f.Info) || now.Size() >= f.Info.Size() {
		return nil
	}
	return f.fail(fmt.Errorf("it was cut short while it was in use: it had %d bytes when it was opened and has %d "+
		"now; restore it and start again",
		f.Info.Size(), now.Size()))
}

// Probe reads the last byte. A file that was cut short has it no more, so that [Guard] gives its
// error, unless the cut is in the page of that byte: there zeros follow what is left, which only
// [File.Cut] can tell.
func (f *File) Probe() {
	if n := len(f.Data); n > 0 {
		load(&f.Data[n-1])
	}
}

// lastPage is the number of bytes at the end of a file that may share a page of memory.
var lastPage = os.Getpagesize()

// Intact gives the error of a file that was cut short, once part of its Data has been read: in the
// page of memory in which the cut is, zeros were read, and no fault tells of it. It asks the system
// only where part is at the end of the file. It is to be guarded.
func (f *File) Intact(part []byte) error {
	f.Probe()
	if end := int(address(part)-address(f.Data)) + len(part); end <= len(f.Data)-lastPage {
		return nil
	}
	return f.Cut()
}

// load is a read that is not optimized away.
//
//go:noinline
func load(p *byte) byte { return *p }
