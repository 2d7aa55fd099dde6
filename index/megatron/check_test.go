package megatron

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/fixtures/vectors"
	"mula/index/rebuild"
	"mula/internal/longtest"
)

// described opens all that a cache directory describes.
func described(t testing.TB, dir, root string) map[string]*Cache {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "*"+descriptionEnd))
	if err != nil || len(found) == 0 {
		t.Fatalf("%s: %v", dir, err)
	}
	caches := map[string]*Cache{}
	for _, path := range found {
		c, err := OpenCache(dir, filepath.Base(path), root)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		caches[filepath.Base(path)] = c
	}
	return caches
}

// Megatron's files are complete: blends of both kinds, both settings of the extra token, partial
// samples, and a sample that starts at -1.
func TestCheck(t *testing.T) {
	longtest.SkipIfShort(t)
	root := vectorFiles(t)
	checked := 0
	check := func(name string, config Config) {
		if err := build(t, config, 2); err != nil {
			t.Fatal(err)
		}
		for file, c := range described(t, config.Cache, config.Root) {
			if err := c.Check(t.Context()); err != nil {
				t.Errorf("%s: %s: %v", name, file, err)
			}
			checked++
		}
	}
	for _, v := range vectorCases {
		c := vectorConfig(t, root)
		v.change(t, &c)
		check(v.name, c)
	}
	for _, profile := range []string{"core-0.4", "core-0.7", "core-0.9"} {
		c := vectorConfig(t, root)
		c.Profile, c.KeepPartialValidation = profileNamed(t, profile), profile != "core-0.4"
		if profile == "core-0.4" {
			c.Tokenizer = nil
		}
		check(profile, c)
	}
	if checked < 100 {
		t.Errorf("%d datasets and blends", checked)
	}
}

// Single precision counts samples that are not there, whose rows repeat the last.
func TestCheckSurplusRows(t *testing.T) {
	root := t.TempDir()
	writeFile(t, filepath.Join(root, "f.idx"), vectors.Index([]int32{134217930, 1}))
	c := vectorConfig(t, root)
	b := mustBlend(t, "f")
	c.Blend, c.Split, c.Samples, c.PerSplit[rebuild.Valid], c.KeepPartialValidation = Blend{}, "", [3]Size{}, &b, true
	c.SequenceLength = 8947862
	if err := build(t, c, 1); err != nil {
		t.Fatal(err)
	}
	cache, err := OpenCache(c.Cache, top(t, c, rebuild.Valid).Hash, root)
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	rows := cache.datasets[0].rows
	if n := rows.n; rows.at(n-2) != rows.at(n-4) || rows.at(n-1) != rows.at(n-3) {
		t.Fatal("the last row is not repeated; the test shows nothing")
	}
	if err := cache.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// Whatever bit of an index is wrong, the file and an entry are named. Of a blend that is so up to
// the last draws of its datasets: there two may be at the same number, and either could be meant.
func TestCheckFlips(t *testing.T) {
	root := vectorFiles(t)
	for name, bits := range map[string][]byte{"A": {0x01, 0x40, 0x80}, "D": {0x01}, "E1": {0x40}} {
		config := vectorNamed(t, root, name)
		e := top(t, config, rebuild.Valid)
		cache, err := OpenCache(config.Cache, e.Hash, root)
		if err != nil {
			t.Fatal(err)
		}
		defer cache.Close()
		bases := []string{cache.blendFile + blendEnds[0], cache.blendFile + blendEnds[1]}
		for _, d := range cache.datasets {
			for _, end := range gptEnds {
				bases = append(bases, d.base+end)
			}
		}
		late := 0
		for _, path := range bases {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for at := int64(128); at < int64(len(whole)); at++ {
				for _, bit := range bits {
					if _, err := f.WriteAt([]byte{whole[at] ^ bit}, at); err != nil { // the mapping shows it
						t.Fatal(err)
					}
					err := cache.Check(t.Context())
					switch {
					case err == nil && strings.HasSuffix(path, blendEnds[0]) && at >= int64(len(whole))-2*20:
						late++
					case !errors.Is(err, ErrCorrupt) ||
						!strings.Contains(err.Error(), "mula index verify "+config.Cache):
						t.Fatalf("%s %s: bit %#x of byte %d: %v", name, filepath.Base(path), bit, at, err)
					}
					if _, err := f.WriteAt(whole[at:at+1], at); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		if late > 3 {
			t.Errorf("%s: %d damaged draws were not noticed", name, late)
		}
		if err := cache.Check(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// The messages, each with file and row.
func TestCheckMessages(t *testing.T) {
	root := vectorFiles(t)
	config := vectorNamed(t, root, "F") // one dataset
	e := top(t, config, rebuild.Train)
	for _, v := range []struct {
		file   int // documents, samples, shuffle
		at     int64
		with   []byte
		wanted string
	}{
		{0, 128 + 4*3, []byte{200}, "document_index.npy: entry 3 is document 200, but "},
		{0, 128 + 4*3, []byte{0xff, 0xff, 0xff, 0xff}, "document_index.npy: entry 3 is document -1, but "},
		{1, 128 + 8*5, []byte{0xff}, "sample_index.npy: row 5 is (255, "},
		{1, 128, []byte{1}, "sample_index.npy: row 0 is (1, 0), not (0, 0)"},
		{2, 128 + 4*7, []byte{0xff, 0xff}, "shuffle_index.npy: entry 7 is sample 65535 of "},
	} {
		dir := copyCache(t, config.Cache)
		path := filepath.Join(dir, e.Files[v.file])
		c, err := OpenCache(dir, e.Hash, root)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.WriteAt(v.with, v.at) // the mapping shows it
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		err = c.Check(t.Context())
		if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), v.wanted) && v.file != 0 {
			t.Errorf("%v; want %q", err, v.wanted)
		}
		if v.file == 0 { // the rows that need the entry may be the first to say so
			if err := c.datasets[0].checkDocuments(t.Context()); err == nil ||
				!strings.Contains(err.Error(), v.wanted) {
				t.Errorf("%v; want %q", err, v.wanted)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.Check(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("after cancellation: %v", err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}
