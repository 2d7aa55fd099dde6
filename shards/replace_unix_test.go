//go:build unix

package shards

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A shard that is replaced while it is being opened is not taken for one made of the files of both.
// A named pipe in the place of the manifest holds Open up after it has mapped the other two files.
func TestOpenWhileReplaced(t *testing.T) {
	dir := t.TempDir()
	prefix, other := filepath.Join(dir, "x"), filepath.Join(dir, "other")
	if err := errors.Join(write(prefix, 3, 12), write(other, 4, 12)); err != nil {
		t.Fatal(err)
	}
	manifest, err := os.ReadFile(prefix + ".json")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(prefix+".json"), unix.Mkfifo(prefix+".json", 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, replaced := range []bool{false, true} {
		written := make(chan error, 1)
		go func() {
			f, err := os.OpenFile(prefix+".json", os.O_WRONLY, 0) // waits for the reader
			if err == nil && replaced {
				err = os.Rename(other+".idx", prefix+".idx")
			}
			if err == nil {
				_, err = f.Write(manifest)
			}
			written <- errors.Join(err, f.Close())
		}()
		s, err := Open(prefix)
		if werr := <-written; werr != nil {
			t.Fatal(werr)
		}
		if err == nil {
			s.Close()
		}
		if replaced != (err != nil && strings.Contains(err.Error(), "was replaced while it was opened")) {
			t.Errorf("replaced %v: %v", replaced, err)
		}
	}
}
