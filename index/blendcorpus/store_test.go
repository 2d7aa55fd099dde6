package blendcorpus

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/index/rebuild"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// A cache in a store has the files of a local one. Blends of another program are refused there,
// because their contents are not compared.
func TestStore(t *testing.T) {
	c := vectorConfig(t)
	build(t, c)
	local := c.Cache
	c.Cache = objectstest.S3(t).URL + "cache"
	run := func() error {
		x := open(t, c)
		defer x.Close()
		_, err := x.Build(t.Context(), rebuild.BuildOptions{Threads: 2, Resume: true,
			FS: objectfs.New(t.Context(), nil, t.TempDir())})
		return err
	}
	for range 2 {
		if err := run(); err != nil {
			t.Fatal(err)
		}
	}
	names, err := filepath.Glob(filepath.Join(local, "*.*"))
	if err != nil || len(names) < 40 {
		t.Fatalf("%d files, %v", len(names), err)
	}
	for _, name := range names {
		if name == filepath.Join(local, ".mula") {
			continue
		}
		want, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		got, _, err := objects.ReadFile(t.Context(), c.Cache+"/"+filepath.Base(name), 1<<30)
		if err != nil || string(got) != string(want) {
			t.Errorf("%s: %d bytes, want %d, %v", filepath.Base(name), len(got), len(want), err)
		}
	}
	for e, err := range objects.ListFolder(t.Context(), c.Cache+"/.mula") {
		if err == nil {
			err = objects.Remove(t.Context(), e.URL)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := run(); err == nil || !strings.Contains(err.Error(), "another program wrote") {
		t.Errorf("blends of another program: %v", err)
	}
}
