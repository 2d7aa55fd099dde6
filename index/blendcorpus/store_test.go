package blendcorpus

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"mula/index/rebuild"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// A cache in a store has the files of a local one, and the same report. Blends of another program
// are compared with the expected contents.
func TestStore(t *testing.T) {
	c := vectorConfig(t)
	build(t, c)
	local := c.Cache
	c.Cache = objectstest.S3(t).URL + "cache"
	fsys := objectfs.New(t.Context(), nil, t.TempDir())
	run := func() error {
		x := open(t, c)
		defer x.Close()
		_, err := x.Build(t.Context(), rebuild.BuildOptions{Threads: 2, Resume: true, FS: fsys})
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
	same := func() {
		t.Helper()
		r, err := Verify(t.Context(), c.Cache, rebuild.VerifyOptions{Root: c.Root, Threads: 2, FS: fsys})
		if want := verify(t, local, c.Root); err != nil || !reflect.DeepEqual(r, want) {
			t.Errorf("%+v, %v; want %+v", r, err, want)
		}
	}
	same()
	for e, err := range objects.ListFolder(t.Context(), c.Cache+"/.mula") {
		if err == nil {
			err = objects.Remove(t.Context(), e.URL)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := run(); err != nil {
		t.Errorf("blends of another program: %v", err)
	}
	same()
	const blend = "21f273c06fc3d9b60857922eb8306ad2_index.npy"
	data, err := os.ReadFile(filepath.Join(local, blend))
	if err != nil {
		t.Fatal(err)
	}
	data[1000] ^= 1
	if err := errors.Join(os.WriteFile(filepath.Join(local, blend), data, 0o666),
		objects.WriteFile(t.Context(), c.Cache+"/"+blend, data)); err != nil {
		t.Fatal(err)
	}
	same()
	if err := run(); err == nil || !strings.Contains(err.Error(), blend+" in "+c.Cache) ||
		!strings.Contains(err.Error(), "differs at byte 1000") {
		t.Errorf("another blend: %v", err)
	}
}
