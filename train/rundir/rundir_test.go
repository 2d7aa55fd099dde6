package rundir

import (
	"slices"
	"testing"
	"time"

	"mula/internal/filesystem"
	"mula/internal/filesystem/sharedfs"
	"mula/train/checkpoint"
)

// A host that has listed the checkpoints earlier sees the checkpoint that another host has written
// since, when it opens the directory, although its file system would list the old names.
func TestOpenSeesNewCheckpoints(t *testing.T) {
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
	if list := names(first, d); len(list) != 0 {
		t.Fatalf("a new run has %q", list)
	}
	d.Close()
	d = open(second)
	written := checkpoint.Name(4)
	if err := second.Mkdir(d.Join(checkpoint.DirName)+"/"+written, 0o755); err != nil {
		t.Fatal(err)
	}
	d.Close()
	if list := names(first, d); len(list) != 0 {
		t.Fatalf("the first host lists %q, so this test shows nothing", list)
	}
	d = open(first)
	defer d.Close()
	if list := names(first, d); !slices.Equal(list, []string{written}) {
		t.Errorf("after it has opened the directory, the first host lists %q, want %s alone", list, written)
	}
}
