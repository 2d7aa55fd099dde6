package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestInMemory(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	if folder, err := inMemory(); folder != "" || err != nil {
		t.Errorf("with TMPDIR: %q, %v", folder, err)
	}
	t.Setenv("TMPDIR", "")
	folder, err := inMemory()
	if err != nil {
		t.Fatal(err)
	}
	if folder == "" {
		t.Skip("this machine has no 4 GiB for files in memory")
	}
	defer os.Remove(folder)
	if filepath.Dir(folder) != memory {
		t.Errorf("the folder is %s, not in %s", folder, memory)
	}
}
