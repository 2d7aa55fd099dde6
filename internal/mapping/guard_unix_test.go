//go:build unix

package mapping

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"unsafe"
)

// sum reads all bytes.
//
//go:noinline
func sum(data []byte) (n int) {
	for _, b := range data {
		n += int(b)
	}
	return n
}

func TestGuardGivesErrorsOfFiles(t *testing.T) {
	page := os.Getpagesize()
	for _, test := range []struct {
		name    string
		size    int64
		read    func(f *File) error
		wantCut bool
	}{
		{"whole", int64(3 * page), func(f *File) error { sum(f.Data); f.Probe(); return f.Cut() }, false},
		{"what is gone", 1000, func(f *File) error { sum(f.Data); return nil }, true},
		{"copied", int64(page), func(f *File) error { copy(make([]byte, 3*page), f.Data); return nil }, true},
		{"in an inner guard", 0, func(f *File) error {
			return Guard(func() error { sum(f.Data); return nil })
		}, true},
		{"after an inner guard", 0, func(f *File) error {
			Guard(func() error { return nil })
			sum(f.Data)
			return nil
		}, true},
		{"only what is left", 1000, func(f *File) error { sum(f.Data[:1000]); return nil }, false},
		{"only what is left, and a probe", 1000, func(f *File) error { sum(f.Data[:1000]); f.Probe(); return nil },
			true},
		{"cut in its last page", int64(3*page - 1), func(f *File) error { f.Probe(); return f.Cut() }, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(path, make([]byte, 3*page), 0o666); err != nil {
				t.Fatal(err)
			}
			f, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := os.Truncate(path, test.size); err != nil {
				t.Fatal(err)
			}
			err = Guard(func() error { return test.read(&f) })
			if !test.wantCut {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var at *fs.PathError
			if !errors.As(err, &at) || at.Path != path || !strings.Contains(err.Error(), "cut short") ||
				!errors.Is(err, ErrUnreadable) {
				t.Errorf("%v; it is to name %s and to say that it was cut short, and to be ErrUnreadable", err, path)
			}
		})
	}
}

func TestGuardPassesOnWhatIsNotAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, 10), 0o666); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	closed := f
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	want := errors.New("its own")
	if err := Guard(func() error { return want }); err != want || errors.Is(err, ErrUnreadable) {
		t.Errorf("an error of the reader became %v", err)
	}
	var nothing *int
	for name, read := range map[string]func(){
		"a panic":                  func() { panic(want) },
		"nil":                      func() { *nothing = 1 },
		"a slice":                  func() { load(&closed.Data[len(closed.Data)]) },
		"a mapping that is closed": func() { load(unsafe.SliceData(closed.Data)) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			err := Guard(func() error { read(); return nil })
			t.Errorf("%s: error %v", name, err)
		}()
		if debug.SetPanicOnFault(false) {
			t.Errorf("%s: the goroutine still panics on faults", name)
		}
	}
}

func BenchmarkGuard(b *testing.B) {
	f := File{Data: make([]byte, 1<<16)}
	for b.Loop() {
		if err := Guard(func() error { f.Probe(); return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
