package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func write(path string, parts ...string) error {
	f, err := Create(path)
	if err != nil {
		return err
	}
	defer f.Abort()
	for _, p := range parts {
		if _, err := f.Write([]byte(p)); err != nil {
			return err
		}
	}
	return f.Publish()
}

func TestPublish(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plan.json")
	for _, content := range []string{"first", "second"} {
		if err := write(path, content[:2], content[2:]); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != content {
			t.Fatalf("got %q, %v; want %q", got, err, content)
		}
	}
	if names := list(t, filepath.Dir(path)); len(names) != 1 {
		t.Errorf("left behind: %v", names)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm()&0o444 != 0o444 {
		t.Errorf("mode %v, %v: others cannot read it", info.Mode(), err)
	}
}

// Whichever operation fails, the final name holds the old content or the new one, and no temporary
// file stays.
func TestEveryFault(t *testing.T) {
	defer func() { Fault = nil }()
	for k := 1; ; k++ {
		path := filepath.Join(t.TempDir(), "x.bin")
		if err := write(path, "old"); err != nil {
			t.Fatal(err)
		}
		n, failed := 0, Op("")
		Fault = func(op Op, _ string) error {
			if n++; n == k {
				failed = op
				return syscall.ENOSPC
			}
			return nil
		}
		err := write(path, "new", " content")
		Fault = nil
		got, readErr := os.ReadFile(path)
		if readErr != nil {
			t.Fatal(readErr)
		}
		if failed == "" { // k is past the last operation
			if err != nil || string(got) != "new content" {
				t.Fatalf("without a fault: %q, %v", got, err)
			}
			if k < 6 {
				t.Fatalf("only %d operations were seen", k-1)
			}
			return
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: error %v does not wrap ENOSPC", failed, err)
		}
		want := "old"
		if failed == OpSyncDir {
			want = "new content"
		}
		if string(got) != want {
			t.Errorf("%s failed: file holds %q, want %q", failed, got, want)
		}
		if names := list(t, filepath.Dir(path)); len(names) != 1 {
			t.Errorf("%s failed: left behind %v", failed, names)
		}
	}
}

func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Devices, pipes and folders are not replaced by files.
func TestOnlyRegularFiles(t *testing.T) {
	for _, path := range []string{os.DevNull, t.TempDir()} {
		before, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := WriteFile(path, []byte("x")); err == nil {
			t.Errorf("%s was replaced", path)
		}
		if after, err := os.Stat(path); err != nil || after.Mode() != before.Mode() {
			t.Errorf("%s: %v, %v", path, after, err)
		}
	}
}
