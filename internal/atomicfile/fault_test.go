package atomicfile_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
)

// If an operation fails, the final name holds the old or the new content, and no temporary file
// remains.
func TestEveryFault(t *testing.T) {
	t.Parallel()
	content := make([]byte, 2<<20+77)
	rand.NewChaCha8([32]byte{3}).Read(content)
	for name, write := range map[string]func(atomicfile.Files, string) error{
		"file": func(files atomicfile.Files, path string) error {
			return files.WriteFile(path, content)
		},
		"hashed": func(files atomicfile.Files, path string) error {
			h, err := files.CreateHashed(path)
			if err != nil {
				return err
			}
			defer h.File.Abort()
			if _, err := h.Buffer.Write(content); err != nil {
				return err
			}
			if _, err := h.Finish(); err != nil {
				return err
			}
			return h.File.Publish()
		},
		"image": func(files atomicfile.Files, path string) error {
			m, err := files.CreateImage(path, int64(len(content)))
			if err != nil {
				return err
			}
			defer m.Abort()
			for end := len(content); end > 0; {
				begin := (end - 1) / (1 << 20) * (1 << 20)
				if _, err := m.WriteAt(content[begin:end], int64(begin)); err != nil {
					return err
				}
				end = begin
			}
			return m.Publish()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for k := int64(1); ; k++ {
				path := filepath.Join(t.TempDir(), "x")
				if err := atomicfile.On(faultfs.New(nil)).WriteFile(path, []byte("old")); err != nil {
					t.Fatal(err)
				}
				nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC}
				err := write(atomicfile.On(faultfs.New(nth.Fault)), path)
				failed := nth.Failed()
				got, readErr := os.ReadFile(path)
				if readErr != nil {
					t.Fatal(readErr)
				}
				want := []byte("old")
				if failed == "" || strings.HasPrefix(failed, string(faultfs.SyncDir)) {
					want = content
				}
				if !bytes.Equal(got, want) {
					t.Errorf("%s failed: the file has %d bytes, want %d", failed, len(got), len(want))
				}
				if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
					t.Errorf("%s failed: the directory has %v, %v; want only the file", failed, entries, err)
				}
				if failed == "" {
					if err != nil || k < 6 {
						t.Errorf("without a fault: %v after %d operations; want at least 5", err, k-1)
					}
					return
				}
				if !errors.Is(err, syscall.ENOSPC) {
					t.Errorf("%s failed: got %v, want an error that wraps ENOSPC", failed, err)
				}
			}
		})
	}
}

// Clean skips a file that only another user may remove, and fails if the disk does.
func TestCleanFails(t *testing.T) {
	t.Parallel()
	self := atomicfile.Self()
	for _, test := range []struct {
		cause error
		fails bool
	}{{fs.ErrPermission, false}, {syscall.EIO, true}} {
		dir := t.TempDir()
		// A process of this machine with the same id, but another start, has ended.
		left := filepath.Join(dir, fmt.Sprintf(".x.%s-%d-1-1%s", self.Machine, self.PID, atomicfile.TempSuffix))
		if err := os.WriteFile(left, nil, 0o666); err != nil {
			t.Fatal(err)
		}
		files := atomicfile.On(faultfs.FailOn(faultfs.Remove, left, test.cause))
		if n, err := files.Clean(dir); n != 0 || errors.Is(err, test.cause) != test.fails {
			t.Errorf("%v: %d files removed, error %v; want an error: %v", test.cause, n, err, test.fails)
		}
	}
}

// Reads fail, too, and errors name the file.
func TestReadFault(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, []byte("content"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, op := range []faultfs.Op{faultfs.Open, faultfs.Read} {
		_, err := filesystem.ReadFile(faultfs.FailOn(op, "x", syscall.EIO), path)
		if !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s failed: got %v, want an error with EIO and the path", op, err)
		}
	}
	if got, err := filesystem.ReadFile(faultfs.FailOn(faultfs.Read, "y", syscall.EIO), path); string(got) != "content" {
		t.Errorf("got %q, %v; want the content: the fault is for another file", got, err)
	}
}
