//go:build unix

package mapping

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, size := range []int{0, 1, 4095, 4096, 100_001} {
		want := bytes.Repeat([]byte("0123456"), size/7+1)[:size]
		if err := os.WriteFile(path, want, 0o666); err != nil {
			t.Fatal(err)
		}
		f, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		f.Scattered()
		f.InSequence(f.Data[size/3:])
		f.Usual()
		f.Forget(f.Data[size/2:])
		if !bytes.Equal(f.Data, want) || f.Info.Size() != int64(size) {
			t.Errorf("%d bytes: %d bytes, %d by Info", size, len(f.Data), f.Info.Size())
		}
		for range 2 {
			if err := f.Close(); err != nil || f.Data != nil {
				t.Errorf("%d bytes: closed: %d bytes are left, %v", size, len(f.Data), err)
			}
		}
	}
	// What replaces the file is another one.
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.WriteFile(path+".new", []byte("new"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	if len(f.Data) != 100_001 || f.Data[0] != '0' {
		t.Errorf("%d bytes after the file was replaced", len(f.Data))
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(filepath.Join(dir, "absent")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	var at *fs.PathError
	if _, err := Open(dir); !errors.As(err, &at) || at.Path != dir {
		t.Errorf("a directory: %v", err)
	}
}
