//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package locks

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A file is held once, and free again with Close, though another descriptor of the same opening is
// left: as a child process has one between its start and the program that it becomes.
func TestHold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.lock")
	f, err := Hold(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Hold(path); !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), path) {
		t.Errorf("held twice: %v", err)
	}
	inherited, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(inherited)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Hold(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
}
