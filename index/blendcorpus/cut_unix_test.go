//go:build unix

package blendcorpus

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"mula/internal/mapping"
)

// An .idx file that is cut short while indexes are built from it ends the build with an error about
// it.
func TestBuildFromCutIndex(t *testing.T) {
	for _, left := range []int64{0, 50, -1} {
		c := vectorConfig(t)
		x := open(t, c)
		path, size := filepath.Join(c.Root, "f1.idx"), left
		if left < 0 { // in its last page
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			size += info.Size()
		}
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		_, err := x.Build(context.Background(), BuildOptions{Threads: 2})
		var at *os.PathError
		if !errors.As(err, &at) || at.Path != path || !errors.Is(err, mapping.ErrUnreadable) {
			t.Errorf("%d bytes left: %v", size, err)
		}
	}
}

// An index file that is cut short while it is compared is seen to be.
func TestCompareWithCutFile(t *testing.T) {
	for _, left := range []int64{0, 10, 9999} {
		dir := t.TempDir()
		path := filepath.Join(dir, "file")
		if err := os.WriteFile(path, make([]byte, 10000), 0o666); err != nil {
			t.Fatal(err)
		}
		files, err := compare(dir, []string{"file"}, []int64{10000})
		if err != nil {
			t.Fatal(err)
		}
		defer files.close()
		if err := files.cut(); err != nil {
			t.Error(err)
		}
		if err := os.Truncate(path, left); err != nil {
			t.Fatal(err)
		}
		_, err = files.writers()[0].WriteAt(make([]byte, 10000), 0)
		if left < 9999 && !errors.Is(err, mapping.ErrUnreadable) || files.difference() != nil {
			t.Errorf("%d bytes left: %v, difference %v", left, err, files.difference())
		}
		if err := files.cut(); !errors.Is(err, mapping.ErrUnreadable) {
			t.Errorf("%d bytes left, in the end: %v", left, err)
		}
	}
}
