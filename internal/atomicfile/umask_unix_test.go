//go:build unix

package atomicfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// The user's umask sets the permissions of files, as in any other program.
func TestUmask(t *testing.T) {
	before := syscall.Umask(0)
	defer syscall.Umask(before)
	for umask, want := range map[int]fs.FileMode{0o022: 0o644, 0o077: 0o600, 0o002: 0o664} {
		syscall.Umask(umask)
		path := filepath.Join(t.TempDir(), "x")
		if err := WriteFile(path, nil); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode() != want {
			t.Errorf("umask %03o: mode %v, %v, want %v", umask, info.Mode(), err, want)
		}
	}
}
