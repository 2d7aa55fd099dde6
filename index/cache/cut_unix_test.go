//go:build unix

package cache

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"mula/internal/mapping"
)

// A file that is cut short while something is compared with it is an error, and no difference.
func TestCompareWithCutFile(t *testing.T) {
	path, page := filepath.Join(t.TempDir(), "file"), os.Getpagesize()
	if err := os.WriteFile(path, make([]byte, 3*page), 0o666); err != nil {
		t.Fatal(err)
	}
	file, err := mapping.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, c := range []*Comparer{{Data: file.Data}, {Data: file.Data, Stop: true}, {Data: file.Data, Count: true,
		Row: 8}} {
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
