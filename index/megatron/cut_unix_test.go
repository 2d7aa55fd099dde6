//go:build unix

package megatron

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"mula/index/rebuild"
	"mula/internal/mapping"
)

// An .idx file that is cut short while indexes are built from it, before its lengths are added up
// or after, ends the build with an error about it.
func TestBuildFromCutIndex(t *testing.T) {
	for _, left := range []int64{0, 50, -1} {
		for _, measured := range []bool{false, true} {
			c := vectorConfig(t, vectorFiles(t))
			x, err := New(context.Background(), c)
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			if measured {
				if err := measure(context.Background(), x.datasets, 1); err != nil {
					t.Fatal(err)
				}
			}
			path, size := filepath.Join(c.Root, "f1.idx"), left
			if left < 0 { // in its last page
				info, err := os.Stat(path)
				if err != nil {
					t.Fatal(err)
				}
				size += info.Size()
			}
			if err := os.Truncate(path, size); err != nil {
				t.Fatal(err)
			}
			_, err = x.Build(context.Background(), rebuild.BuildOptions{Threads: 2})
			var at *os.PathError
			if !errors.As(err, &at) || at.Path != path || !errors.Is(err, mapping.ErrUnreadable) {
				t.Errorf("%d bytes left, measured %v: %v", size, measured, err)
			}
		}
	}
}

// A cache whose files are cut short while it is open returns the samples from before, or an error
// about the file. This also holds in the page of the cut, which reads as zeros.
func TestCacheCutWhileOpen(t *testing.T) {
	root := vectorFiles(t)
	config := vectorConfig(t, root)
	if err := build(t, config, 2); err != nil {
		t.Fatal(err)
	}
	c, err := OpenCache(config.Cache, top(t, config, rebuild.Train).Hash, root)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if len(c.datasets) < 2 {
		t.Fatal("it is no blend")
	}
	sample := func(k int64) (segments []Segment, err error) {
		err = mapping.Guard(func() error {
			dataset, number, err := c.Sample(k)
			if err == nil {
				segments, err = c.Segments(nil, dataset, number)
			}
			return err
		})
		return segments, err
	}
	var want [][]Segment
	for k := range c.Len() {
		segments, err := sample(k)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, segments)
	}
	var paths []string
	for _, name := range c.Files() {
		if filepath.Ext(name) == ".npy" {
			paths = append(paths, filepath.Join(config.Cache, name))
		}
	}
	for _, d := range c.datasets {
		paths = append(paths, d.file.Path())
	}
	for _, path := range paths {
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, left := range []int64{0, int64(len(whole)) / 2, int64(len(whole)) - 1} {
			if err := os.Truncate(path, left); err != nil {
				t.Fatal(err)
			}
			failed := 0
			for k := range c.Len() {
				segments, err := sample(k)
				var at *os.PathError
				switch {
				case err == nil && !slices.Equal(segments, want[k]):
					t.Fatalf("%s, %d bytes left: sample %d is another", path, left, k)
				case errors.As(err, &at) && (at.Path != path || !errors.Is(err, mapping.ErrUnreadable)):
					t.Fatalf("%s, %d bytes left: sample %d: %v", path, left, k, err)
				case err != nil:
					failed++
				}
			}
			if failed == 0 {
				t.Errorf("%s, %d bytes left: no error", path, left)
			}
		}
		if err := os.WriteFile(path, whole, 0o666); err != nil {
			t.Fatal(err)
		}
	}
}

// An index file that is cut short while it is compared is a problem, and neither right nor
// different.
func TestVerifyFileCutMeanwhile(t *testing.T) {
	for _, left := range []int64{0, 200, -1} {
		dir := t.TempDir()
		w := wanted{name: "index.npy", descr: "<i8", rows: 2000}
		header, data := w.header(), make([]byte, w.size())
		copy(data, header[:])
		path := filepath.Join(dir, w.name)
		writeFile(t, path, data)
		size := left
		if left < 0 { // in its last page, where zeros are read, as they should be
			size += w.size()
		}
		builds := 0
		build := func(_ context.Context, files []io.WriterAt) error {
			builds++
			if err := os.Truncate(path, size); err != nil {
				t.Fatal(err)
			}
			_, err := files[0].WriteAt(data, 0)
			return err
		}
		u := unit{Verdict: rebuild.Verdict{Description: descriptionEnd}}
		err := (&verifier{dir: dir}).compare(context.Background(), &u, []*candidate{{files: []wanted{w}, build: build}})
		if !errors.Is(err, mapping.ErrUnreadable) || u.Equal || u.Differs || builds != 1 {
			t.Errorf("%d bytes left: %v, %+v", size, err, u)
		}
	}
}
