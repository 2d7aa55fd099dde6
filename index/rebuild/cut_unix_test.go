//go:build unix

package rebuild

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"mula/internal/mapping"
)

// A file that is truncated during a comparison is an error and not a difference.
func TestComparerOfTruncatedFile(t *testing.T) {
	path, page := filepath.Join(t.TempDir(), "file"), os.Getpagesize()
	if err := os.WriteFile(path, make([]byte, 3*page), 0o666); err != nil {
		t.Fatal(err)
	}
	files, err := OpenFiles(nil, filepath.Dir(path), []string{"file"})
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	file := &files[0]
	for _, c := range []*Comparer{{file: file}, {file: file, stop: true}, {file: file, count: true, row: 8}} {
		if err := os.Truncate(path, int64(3*page)); err != nil {
			t.Fatal(err)
		}
		if n, err := c.WriteAt(make([]byte, 2*page), int64(page)); n != 2*page || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
		if err := os.Truncate(path, 100); err != nil {
			t.Fatal(err)
		}
		if _, err := c.WriteAt(make([]byte, 2*page), int64(page)); !errors.Is(err, mapping.ErrUnreadable) {
			t.Errorf("%v; it is to say that the file was cut short", err)
		}
		if at, met := c.First(); met {
			t.Errorf("a difference at byte %d", at)
		}
	}
}

// A truncation that the comparison cannot see, because the rest of a page is read as zeros, is an
// error too.
func TestDifferenceOfTruncatedFile(t *testing.T) {
	const size = 10000
	for _, left := range []int64{0, 10, size - 1} {
		dir := t.TempDir()
		path := filepath.Join(dir, "file")
		if err := os.WriteFile(path, make([]byte, size), 0o666); err != nil {
			t.Fatal(err)
		}
		files, err := OpenFiles(nil, dir, []string{"file"})
		if err != nil {
			t.Fatal(err)
		}
		defer files.Close()
		write := func(to []io.WriterAt) error {
			_, err := to[0].WriteAt(make([]byte, size), 0)
			return err
		}
		if at, err := files.Difference([]int64{size}, write); at != nil || err != nil {
			t.Errorf("before: difference %v, %v", at, err)
		}
		if err := os.Truncate(path, left); err != nil {
			t.Fatal(err)
		}
		if at, err := files.Difference([]int64{size}, write); at != nil || !errors.Is(err, mapping.ErrUnreadable) {
			t.Errorf("%d bytes left: difference %v, %v", left, at, err)
		}
	}
}
