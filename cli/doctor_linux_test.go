package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// diagnose returns the output of mula doctor for a folder, and the exit code.
func diagnose(folder string) (string, int) {
	var out, messages bytes.Buffer
	code := Main([]string{"mula", "doctor", folder}, strings.NewReader(""), &out, &messages)
	return out.String() + messages.String(), code
}

// A read-only folder and a full file system are errors. Root mounts them; for other users the mode
// of the folder is enough for the first.
func TestDoctorFolders(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	folder := filepath.Join(t.TempDir(), "folder")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	expect := func(want string) {
		t.Helper()
		if text, code := diagnose(folder); code != exitFailed || !strings.Contains(text, want) {
			t.Errorf("exit code %d, want %q:\n%s", code, want, text)
		}
	}
	if os.Getuid() != 0 {
		if err := os.Chmod(folder, 0o555); err != nil {
			t.Fatal(err)
		}
		expect("this user may not write")
		t.Skip("mounting a full file system needs root")
	}
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("mounting a file system: %v", err)
	}
	defer func() {
		if err := unix.Unmount(folder, 0); err != nil {
			t.Error(err)
		}
	}()
	if err := os.WriteFile(filepath.Join(folder, "full"), make([]byte, 1<<20), 0o644); err == nil {
		t.Fatal("the file system is not full")
	}
	expect("no space left on device")
	if err := unix.Mount("", folder, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	expect("read-only file system")
}
