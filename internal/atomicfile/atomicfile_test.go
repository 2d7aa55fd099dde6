package atomicfile

import (
	"os"
	"path/filepath"
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
