package sharedfs

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
	"mula/internal/locks"
)

func read(t *testing.T, fsys filesystem.FS, name string) string {
	t.Helper()
	text, err := filesystem.ReadFile(fsys, name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(text)
}

// A crash of a host loses data and names that it has not synced, and nothing of other hosts. Data
// may be lost completely or in part.
func TestCrash(t *testing.T) {
	lost := map[string]int{}
	for seed := range uint64(200) {
		s := New(seed)
		a, b := s.Host("a"), s.Host("b")
		fa, fb := a.Process(nil), b.Process(nil)
		for _, step := range []error{
			fa.Mkdir("/d", 0o755), fa.SyncDir("/"),
			atomicfile.On(fa).WriteFile("/d/kept", []byte("kept")),
			atomicfile.On(fb).WriteFile("/d/other", []byte("other")),
			filesystem.WriteFile(fb, "/d/unsynced", []byte("unsynced"), 0o644),
			filesystem.WriteFile(fa, "/d/kept2", []byte("old"), 0o644), fa.SyncDir("/d"),
			fa.Rename("/d/kept", "/d/moved"),
		} {
			if step != nil {
				t.Fatal(step)
			}
		}
		a.Crash()
		for name, want := range map[string]string{"/d/other": "other", "/d/unsynced": "unsynced"} {
			if got := read(t, fb, name); got != want {
				t.Fatalf("seed %d: %s has %q", seed, name, got)
			}
		}
		before, after := read(t, fb, "/d/kept"), read(t, fb, "/d/moved")
		if before+after != "kept" {
			t.Fatalf("seed %d: a renamed file has %q under its old name and %q under its new name", seed, before, after)
		}
		if before != "" {
			lost["rename"]++
		}
		switch got := read(t, fb, "/d/kept2"); {
		case got == "":
			lost["all"]++
		case got == "\x00\x00\x00":
			lost["zeros"]++
		case got == "old":
			lost["nothing"]++
		case strings.HasPrefix("old", got):
			lost["part"]++
		default:
			t.Fatalf("seed %d: a file that was not synced has %q", seed, got)
		}
	}
	for _, what := range []string{"rename", "all", "zeros", "part", "nothing"} {
		if lost[what] == 0 || lost[what] == 200 {
			t.Errorf("%s: %d times of 200", what, lost[what])
		}
	}
}

// Synced bytes survive later writes and changes of the size that are not synced.
func TestCrashAfterSync(t *testing.T) {
	for name, test := range map[string]struct {
		change func(f filesystem.File) error
		want   []string
	}{
		"append": {func(f filesystem.File) error { _, err := f.Write([]byte("xy")); return err },
			[]string{"synced", "synced\x00\x00", "syncedx", "syncedxy"}},
		"cut": {func(f filesystem.File) error { return f.Truncate(4) }, []string{"synced", "sync"}},
		"cut and append": {func(f filesystem.File) error {
			err := f.Truncate(4)
			_, writeErr := f.Write([]byte("xyz"))
			return errors.Join(err, writeErr)
		}, []string{"synced", "sync", "syncx", "syncxy", "syncxyz", "synced\x00"}},
	} {
		left := map[string]bool{}
		for seed := range uint64(200) {
			h := New(seed).Host("a")
			fs := h.Process(nil)
			f, err := fs.OpenFile("/x", os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
			if err != nil {
				t.Fatal(err)
			}
			_, err = f.Write([]byte("synced"))
			if err := errors.Join(err, f.Sync(), fs.SyncDir("/"), test.change(f)); err != nil {
				t.Fatal(err)
			}
			h.Crash()
			left[read(t, fs, "/x")] = true
		}
		for _, want := range test.want {
			if !left[want] {
				t.Errorf("%s: no crash left %q", name, want)
			}
			delete(left, want)
		}
		for got := range left {
			t.Errorf("%s: a crash left %q", name, got)
		}
	}
}

// A synced file and its synced name survive, also in a renamed directory.
func TestSynced(t *testing.T) {
	for seed := range uint64(50) {
		s := New(seed)
		h := s.Host("a")
		f := h.Process(nil)
		out := atomicfile.On(f)
		for _, err := range []error{filesystem.MkdirAll(f, "/run/.temp", 0o755), f.SyncDir("/"),
			out.WriteFile("/run/.temp/x", []byte("x")), f.Rename("/run/.temp", "/run/done"), f.SyncDir("/run")} {
			if err != nil {
				t.Fatal(err)
			}
		}
		h.Crash()
		if got := read(t, f, "/run/done/x"); got != "x" {
			t.Fatalf("seed %d: %q", seed, got)
		}
	}
}

// Another host sees old attributes for some time, and cannot open a file that it has not found,
// until it changes the directory. A host sees its own changes at once, and opening a file that the
// host has found is never stale.
func TestStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(1)
		s.Stale = time.Minute
		a, b := s.Host("a").Process(nil), s.Host("b").Process(nil)
		exists := func(f filesystem.FS) bool {
			_, err := f.Stat("/x")
			return err == nil
		}
		if exists(a) || exists(b) {
			t.Fatal("a file exists before it is created")
		}
		if err := filesystem.WriteFile(a, "/x", []byte("1"), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := filesystem.ReadFile(b, "/x"); !exists(a) || exists(b) || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("after the file was created: %v on its host, %v on another host, which reads it with the error %v",
				exists(a), exists(b), err)
		}
		if err := b.Mkdir("/y", 0o755); err != nil {
			t.Fatal(err)
		}
		if !exists(b) || read(t, b, "/x") != "1" {
			t.Error("the other host does not see the file after it has changed the directory")
		}
		if err := filesystem.WriteFile(a, "/x", []byte("22"), 0o644); err != nil {
			t.Fatal(err)
		}
		size := func() int64 {
			info, err := b.Stat("/x")
			if err != nil {
				t.Fatal(err)
			}
			return info.Size()
		}
		if size() != 1 || read(t, b, "/x") != "22" {
			t.Errorf("the other host sees %d bytes and reads %q, want 1 and 22", size(), read(t, b, "/x"))
		}
		time.Sleep(time.Minute)
		if size() != 2 {
			t.Errorf("the other host sees %d bytes after a minute, want 2", size())
		}
	})
}

// Operations can fail, and a lock ends with its file.
func TestFaults(t *testing.T) {
	s := New(1)
	f := s.Host("a").Process(nil)
	failing := s.Host("b").Process(func(op faultfs.Op, path string) error {
		if op == faultfs.Create && path == "/z" {
			return syscall.EIO
		}
		return nil
	})
	if _, err := failing.OpenFile("/z", os.O_CREATE|os.O_RDWR, 0o644); !errors.Is(err, syscall.EIO) {
		t.Errorf("a failing operation: %v", err)
	}
	lock, err := locks.HoldOn(f, "/lock")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := locks.HoldOn(failing, "/lock"); !errors.Is(err, locks.ErrHeld) {
		t.Errorf("a second lock: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := locks.HoldOn(failing, "/lock"); err != nil {
		t.Errorf("after the lock was released: %v", err)
	}
}
