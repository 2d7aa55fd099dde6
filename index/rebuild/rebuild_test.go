package rebuild

import (
	"context"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"mula/index/cache"
	"mula/index/gpt"
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
	files, err := OpenFiles(dir, []string{"a", "b"})
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

func TestEstimate(t *testing.T) {
	d, err := Estimate(t.Context(), []Entry{{Class: DatasetClass, Sizes: []int64{4000}},
		{Prefixes: []string{"a", "b", "c"}, Length: 1000}, {}}, 2)
	if err != nil || d <= 0 {
		t.Errorf("%v, %v", d, err)
	}
}
