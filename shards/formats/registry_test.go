package formats

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/atomicfile"
	"mula/shards"
)

// The description of each layout is complete, and names and markers are unique.
func TestRegistry(t *testing.T) {
	seen := map[string]string{}
	unique := func(what, value, name string) {
		if other, ok := seen[what+value]; ok {
			t.Errorf("%s and %s have the same %s, %q", other, name, what, value)
		}
		seen[what+value] = name
	}
	for _, l := range All() {
		unique("identifier", string(l.ID), l.Name)
		unique("name", l.Name, l.Name)
		unique("marker", l.Marker, l.Name)
		if l.Users == "" || l.Shape == "" || l.Create == nil || l.Open == nil || len(l.Types) == 0 || l.IDs == "" {
			t.Errorf("%s: its description is incomplete", l.Name)
		}
		if l.Folder != strings.HasPrefix(l.Marker, "/") || l.Folder != (l.Parts != nil && l.PartSuffix != "") {
			t.Errorf("%s: a folder: %t, the marker is %q", l.Name, l.Folder, l.Marker)
		}
		for _, ending := range l.Endings() {
			if ending != "" && ending[0] != l.Marker[0] {
				t.Errorf("%s: the ending %q does not start like the marker %q", l.Name, ending, l.Marker)
			}
		}
		if !slices.IsSortedFunc(l.Types, func(a, b shards.DType) int { return a.Size() - b.Size() }) {
			t.Errorf("%s: types %v", l.Name, l.Types)
		}
		if Of(l.ID) != l || Name(l.ID) != l.Name {
			t.Errorf("%s is not found by its identifier", l.Name)
		}
	}
	if Of("tfrecord") != nil || Name("tfrecord") != "tfrecord" {
		t.Error("an unknown layout is found")
	}
}

// Every file that a writer leaves is in the description of the layout, and the manifest and the
// files of ids are where the description has them.
func TestDescribedFiles(t *testing.T) {
	for _, l := range All() {
		prefix := filepath.Join(t.TempDir(), "x")
		m, err := write(l, prefix, testInfo, Options{}, corpus(1, 20, 300))
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		err = filepath.WalkDir(filepath.Dir(prefix), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			found++
			if ending := filepath.ToSlash(strings.TrimPrefix(path, prefix)); !l.Has(ending) {
				t.Errorf("%s: the file with the ending %q is not described", l.Name, ending)
			}
			return nil
		})
		if err != nil || found != len(m.Files)+1 {
			t.Errorf("%s: %d files, %v; want %d and the manifest", l.Name, found, err, len(m.Files))
		}
		if _, err := os.Stat(l.At(prefix, l.Manifest)); err != nil {
			t.Errorf("%s: %v", l.Name, err)
		}
		ids := int64(0)
		for name, info := range m.Files {
			if _, err := os.Stat(l.FilePath(prefix, name)); err != nil {
				t.Errorf("%s: %v", l.Name, err)
			}
			if l.HasIDs(name) {
				ids += info.Bytes
			}
		}
		if got := l.SizeOfIDs(prefix); got != ids || ids < 2*m.Tokens {
			t.Errorf("%s: files of ids have %d bytes, %d according to the manifest", l.Name, got, ids)
		}
	}
}

// The manifest of another layout is not replaced, even if the other shard is incomplete, and a
// manifest of an unknown layout belongs to no shard.
func TestManifestOfAnotherLayout(t *testing.T) {
	for _, l := range All() {
		for _, id := range []shards.Layout{"tfrecord", Megatron.ID, "dolma"} {
			if id == l.ID {
				continue
			}
			prefix := filepath.Join(t.TempDir(), "x")
			m, err := write(l, prefix, testInfo, Options{}, corpus(1, 3, 30))
			if err != nil {
				t.Fatal(err)
			}
			m.Layout = id
			if id == Megatron.ID {
				m.Files = map[string]shards.FileInfo{"bin": m.Files[l.Marker[1:]]}
			}
			f, err := m.Seal(atomicfile.Files{}, l.At(prefix, l.Manifest))
			if err != nil {
				t.Fatal(err)
			}
			if err := f.Publish(); err != nil {
				t.Fatal(err)
			}
			if r, err := l.Open(prefix, Hints{EOD: -1}); err == nil {
				r.Close()
				t.Errorf("%s: opened with the manifest of %q", l.Name, id)
			}
			if w, err := l.NewShard(prefix, testInfo, Options{}); err == nil {
				w.Abort()
				t.Errorf("%s: would replace the manifest of %q", l.Name, id)
			} else if !strings.Contains(err.Error(), "another layout") {
				t.Errorf("%s: %v", l.Name, err)
			}
		}
	}
}
