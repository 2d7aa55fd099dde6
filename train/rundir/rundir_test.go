package rundir

import (
	"errors"
	"io/fs"
	"slices"
	"testing"
	"time"

	"mula/internal/filesystem"
	"mula/internal/filesystem/sharedfs"
	"mula/train/checkpoint"
)

// A host that has looked at the directory earlier sees the checkpoint and the file that another
// host has written since, when it opens the directory, although its file system would list the old
// names.
func TestOpenSeesNewNames(t *testing.T) {
	s := sharedfs.New(1)
	s.Stale = time.Hour
	first, second := s.Host("first").Process(nil), s.Host("second").Process(nil)
	names := func(fsys filesystem.FS, d *Dir) (list []string) {
		t.Helper()
		entries, err := fsys.ReadDir(d.Join(checkpoint.DirName))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			list = append(list, e.Name())
		}
		return list
	}
	open := func(fsys filesystem.FS) *Dir {
		t.Helper()
		d, err := Open(fsys, "/run")
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := open(first)
	metrics := d.Join(MetricsFile)
	if list := names(first, d); len(list) != 0 {
		t.Fatalf("a new run has %q", list)
	}
	if _, err := filesystem.ReadFile(first, metrics); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("reading the metrics of a new run: %v", err)
	}
	d.Close()
	d = open(second)
	written := checkpoint.Name(4)
	if err := second.Mkdir(d.Join(checkpoint.DirName)+"/"+written, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := filesystem.WriteFile(second, metrics, []byte("{}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	d.Close()
	if _, err := filesystem.ReadFile(first, metrics); len(names(first, d)) != 0 || err == nil {
		t.Fatalf("the first host lists %q and reads the metrics with the error %v, so this test shows nothing",
			names(first, d), err)
	}
	d = open(first)
	defer d.Close()
	if list := names(first, d); !slices.Equal(list, []string{written}) {
		t.Errorf("after it has opened the directory, the first host lists %q, want %s alone", list, written)
	}
	if _, err := filesystem.ReadFile(first, metrics); err != nil {
		t.Errorf("after it has opened the directory: %v", err)
	}
}
