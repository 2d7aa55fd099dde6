package objectfs_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// A file of a store appears when it is renamed, is read in any order, and leaves nothing in the
// local folder. Other paths are local files.
func TestFiles(t *testing.T) {
	store := objectstest.S3(t)
	scratch := t.TempDir()
	fsys := objectfs.New(t.Context(), nil, scratch)
	files := atomicfile.On(fsys)
	want := make([]byte, 3<<20+5)
	rand.NewChaCha8([32]byte{1}).Read(want)
	name := filepath.Join(store.URL+"a", "b.bin") // has one slash after s3:
	if name != "s3:/bucket/a/b.bin" {
		t.Fatal(name)
	}
	f, err := files.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(want); err != nil {
		t.Fatal(err)
	}
	if _, err := fsys.Stat(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before it is published: %v", err)
	}
	if err := f.Publish(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(scratch); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if info, err := fsys.Stat(name); err != nil || info.Size() != int64(len(want)) || info.Name() != "b.bin" ||
		!info.Mode().IsRegular() {
		t.Errorf("%+v, %v", info, err)
	}
	if got, err := filesystem.ReadFile(fsys, name); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	in, err := filesystem.Open(fsys, name)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if got, err := io.ReadAll(in); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read %d bytes one after the other, %v", len(got), err)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for off := 0; off < len(want); { // runs of reads that follow each other, and gaps
		n := min(1+random.IntN(200_000), len(want)-off)
		got := make([]byte, n)
		if _, err := in.ReadAt(got, int64(off)); err != nil || !bytes.Equal(got, want[off:off+n]) {
			t.Fatalf("%d bytes from %d: %v", n, off, err)
		}
		if off += n; random.IntN(5) == 0 {
			off += random.IntN(100_000)
		}
	}
	got := make([]byte, 20)
	n, err := in.ReadAt(got, int64(len(want)-7))
	if n != 7 || err != io.EOF || !bytes.Equal(got[:7], want[len(want)-7:]) {
		t.Errorf("beyond the end: %d bytes, %v", n, err)
	}
	if _, err := in.Write(got); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("writing an object in place: %v", err)
	}

	if err := files.WriteFile(store.URL+"a/deeper/c", []byte("c")); err != nil {
		t.Fatal(err)
	}
	if entries, err := fsys.ReadDir(store.URL + "a"); err != nil || len(entries) != 1 || entries[0].Name() != "b.bin" {
		t.Errorf("the folder has %v, %v", entries, err)
	}
	if err := files.Remove(name); err != nil {
		t.Fatal(err)
	}
	if _, err := filesystem.Open(fsys, name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after its removal: %v", err)
	}

	local := filepath.Join(scratch, "local")
	if err := files.WriteFile(local, want); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(local); err != nil || !bytes.Equal(got, want) {
		t.Errorf("a local file: %d bytes, %v", len(got), err)
	}
}

// The guard keeps objects from appearing and from being removed.
func TestGuard(t *testing.T) {
	store := objectstest.S3(t)
	scratch := t.TempDir()
	fsys := objectfs.New(t.Context(), nil, scratch)
	files := atomicfile.On(fsys)
	if err := files.WriteFile(store.URL+"kept", []byte("a")); err != nil {
		t.Fatal(err)
	}
	refused := errors.New("refused")
	var asked []string
	fsys.Guard = func(url string) error {
		asked = append(asked, url)
		return refused
	}
	for _, err := range []error{files.WriteFile(store.URL+"new", nil), files.WriteFile(store.URL+"kept", []byte("b")),
		files.Remove(store.URL + "kept")} {
		if !errors.Is(err, refused) {
			t.Errorf("%v, want %v", err, refused)
		}
	}
	if got := strings.Join(asked, " "); got != "s3://bucket/new s3://bucket/kept s3://bucket/kept" {
		t.Errorf("asked for %s", got)
	}
	if _, err := fsys.Stat(store.URL + "new"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a refused object: %v", err)
	}
	if got, _, err := objects.ReadFile(t.Context(), store.URL+"kept", 10); err != nil || string(got) != "a" {
		t.Errorf("an object that was not to be changed: %q, %v", got, err)
	}
	if left, err := os.ReadDir(scratch); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
