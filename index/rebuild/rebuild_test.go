package rebuild

import (
	"bytes"
	"context"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"mula/index/cache"
	"mula/index/gpt"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSplits(t *testing.T) {
	for _, s := range []Split{Train, Valid, Test} {
		if got, ok := SplitNamed(s.String()); got != s || !ok {
			t.Errorf("%s: %v, %v", s, got, ok)
		}
	}
	if _, ok := SplitNamed("dev"); ok {
		t.Error("dev is a split")
	}
}

func TestBuild(t *testing.T) {
	root := t.TempDir()
	unit := func(name string) cache.Unit {
		return cache.Unit{Name: name, Files: []string{name + ".npy"}, Marker: name + ".txt", MarkerText: []byte(name),
			Expect: 3,
			Sizes:  func(context.Context) ([]int64, error) { return []int64{3}, nil },
			Build: func(_ context.Context, files []io.WriterAt) error {
				_, err := files[0].WriteAt([]byte("abc"), 0)
				return err
			}}
	}
	var u Units
	a, b := filepath.Join(root, "a"), filepath.Join(root, "b")
	u.AddDataset(a, unit("x"))
	u.AddDataset(b, unit("x"))
	u.AddBlend(a, unit("y"))
	u.AddBlend(a, unit("z"))
	s, err := u.Build(t.Context(), gpt.NewWorkers(1), BuildOptions{Threads: 1})
	if err != nil || s.Built != 4 || s.Bytes != 12 {
		t.Errorf("%+v, %v", s, err)
	}
	for dir, names := range map[string][]string{a: {"x.npy", "y.npy", "z.npy"}, b: {"x.npy"}} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Error(err)
		}
		var found []string
		for _, e := range entries {
			if filepath.Ext(e.Name()) == ".npy" {
				found = append(found, e.Name())
			}
		}
		if !slices.Equal(found, names) {
			t.Errorf("%s has %v, want %v", dir, found, names)
		}
	}
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("abcdef"), 0o666); err != nil {
		t.Fatal(err)
	}
	files, err := OpenFiles(nil, dir, []string{"a", "b"})
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	if files[0].Missing || !files[1].Missing || files.Bytes() != 6 {
		t.Errorf("%+v, %d bytes", files, files.Bytes())
	}
	for text, want := range map[string]*Difference{"abcdef": nil, "abxdef": {"a", 2}, "abcd": {"a", 4},
		"abcdefg": {"a", 6}} {
		got, err := files.Difference([]int64{int64(len(text)), 0}, func(to []io.WriterAt) error {
			if to[1] != nil {
				t.Error("a missing file has a writer")
			}
			_, err := to[0].WriteAt([]byte(text), 0)
			return err
		})
		if err != nil || (got == nil) != (want == nil) || got != nil && *got != *want {
			t.Errorf("%s: %v, %v; want %v", text, got, err, want)
		}
	}
	if !files.Plausible(1<<30) || files.Plausible(1<<31) || files.Plausible(math.MaxInt64) {
		t.Error("the limit of plausible sizes")
	}
}

// Files in a store are compared without a local copy: each byte is fetched once, whether it is
// compared from the start or from the end.
func TestFilesStore(t *testing.T) {
	store := objectstest.S3(t)
	const piece = 1 << 20
	want := make([]byte, 5*piece+12345)
	rand.NewChaCha8([32]byte{7}).Read(want)
	have := bytes.Clone(want)
	have[3*piece+17] ^= 1
	for name, data := range map[string][]byte{"equal": want, "other": have, "short": want[:4*piece+1]} {
		if err := objects.WriteFile(t.Context(), store.URL+name, data); err != nil {
			t.Fatal(err)
		}
	}
	fsys := objectfs.New(t.Context(), nil, "")
	for _, descending := range []bool{false, true} {
		for name, at := range map[string]int64{"equal": -1, "other": 3*piece + 17, "short": 4*piece + 1} {
			files, err := OpenFiles(fsys, store.URL, []string{name, "absent"})
			if err != nil {
				t.Fatal(err)
			}
			if !files[1].Missing || files[0].Size != files.Bytes() {
				t.Errorf("%+v", files)
			}
			before := objects.Count().BytesRead
			got, err := files.Difference([]int64{int64(len(want)), 0}, func(to []io.WriterAt) error {
				for k := range 6 {
					if descending {
						k = 5 - k
					}
					p := want[k*piece : min((k+1)*piece, len(want))]
					if _, err := to[0].WriteAt(p, int64(k*piece)); err != nil {
						return err
					}
				}
				return nil
			})
			files.Close()
			if err != nil || (got == nil) != (at < 0) || got != nil && *got != (Difference{name, at}) {
				t.Errorf("%s: %v, %v; want %d", name, got, err, at)
			}
			if read := objects.Count().BytesRead - before; name == "equal" && read != int64(len(want)) {
				t.Errorf("%d bytes were fetched of %d", read, len(want))
			}
		}
	}
}

func TestEstimate(t *testing.T) {
	d, err := Estimate(t.Context(), []Entry{{Class: DatasetClass, Sizes: []int64{4000}},
		{Prefixes: []string{"a", "b", "c"}, Length: 1000}, {}}, 2)
	if err != nil || d <= 0 {
		t.Errorf("%v, %v", d, err)
	}
}
