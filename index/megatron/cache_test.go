package megatron

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/fixtures/vectors"
	"mula/index/rebuild"
)

// vectorNamed is one of the vectors' configurations, built.
func vectorNamed(t testing.TB, root, name string) Config {
	t.Helper()
	for _, v := range vectorCases {
		if v.name == name {
			c := vectorConfig(t, root)
			v.change(t, &c)
			if err := build(t, c, 2); err != nil {
				t.Fatal(err)
			}
			return c
		}
	}
	t.Fatalf("no vector %s", name)
	return Config{}
}

// top is the entry that a split's samples come from.
func top(t testing.TB, c Config, s rebuild.Split) rebuild.Entry {
	t.Helper()
	x, err := New(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	entries, err := x.Describe(context.Background(), true)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries { // blends come first
		if e.Splits[0] == s {
			return e
		}
	}
	t.Fatalf("nothing of %s", s)
	return rebuild.Entry{}
}

// The samples must equal the samples of megatron-core, which testdata/samples.py wrote.
func TestCacheSamples(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "samples.json"))
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Samples map[string]map[string][][]json.RawMessage
	}
	if err := json.Unmarshal(text, &golden); err != nil {
		t.Fatal(err)
	}
	root := vectorFiles(t)
	var starts [3][]int64 // of each document, in tokens
	for f, documents := range []int{40, 25, 60} {
		at := int64(0)
		for _, l := range vectors.Lengths(f, documents) {
			starts[f] = append(starts[f], at)
			at += int64(l)
		}
	}
	if len(golden.Samples) != 5 {
		t.Fatalf("%d configurations in samples.json", len(golden.Samples))
	}
	for name, splits := range golden.Samples {
		config := vectorNamed(t, root, name)
		for split, samples := range splits {
			s, _ := rebuild.SplitNamed(split)
			c, err := OpenCache(config.Cache, top(t, config, s).Hash, root)
			if err != nil {
				t.Fatal(err)
			}
			if c.ExtraToken() != config.ExtraToken || c.SequenceLength() != 64 || c.Split() != s {
				t.Errorf("%s %s: extra token %v, %d tokens, split %s", name, split, c.ExtraToken(), c.SequenceLength(),
					c.Split())
			}
			if c.Len() != int64(len(samples)) {
				t.Fatalf("%s %s: %d samples, want %d", name, split, c.Len(), len(samples))
			}
			var segments []Segment
			for k, want := range samples {
				dataset, sample, err := c.Sample(int64(k))
				if err != nil {
					t.Fatal(err)
				}
				if segments, err = c.Segments(segments[:0], dataset, sample); err != nil {
					t.Fatal(err)
				}
				f := strings.Index("f0f1f2", c.Datasets()[dataset].Prefix) / 2
				got, total := [][2]int64{}, int64(0)
				for _, s := range segments {
					at := starts[f][s.Document] + s.Offset
					total += s.Length
					if n := len(got); n > 0 && got[n-1][0]+got[n-1][1] == at { // neighbours run on
						got[n-1][1] += s.Length
					} else {
						got = append(got, [2]int64{at, s.Length})
					}
				}
				full := int64(64)
				if config.ExtraToken {
					full++
				}
				if total < full {
					got = append(got, [2]int64{-1, full - total})
				}
				var wantDataset int
				if err := json.Unmarshal(want[0], &wantDataset); err != nil {
					t.Fatal(err)
				}
				runs := make([][2]int64, len(want)-1)
				for i := range runs {
					if err := json.Unmarshal(want[i+1], &runs[i]); err != nil {
						t.Fatal(err)
					}
				}
				if dataset != wantDataset || !slices.Equal(got, runs) {
					t.Fatalf("%s %s, sample %d: dataset %d, %v; want %d, %v", name, split, k, dataset, got, wantDataset,
						runs)
				}
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// readAll reads every sample of a cache.
func readAll(c *Cache) error {
	var segments []Segment
	for k := range c.Len() {
		dataset, sample, err := c.Sample(k)
		if err != nil {
			return err
		}
		if segments, err = c.Segments(segments[:0], dataset, sample); err != nil {
			return err
		}
	}
	return nil
}

func TestOpenCacheErrors(t *testing.T) {
	root := vectorFiles(t)
	config := vectorNamed(t, root, "A")
	e := top(t, config, rebuild.Train)
	if _, _, err := (&Cache{length: 3}).Sample(3); err == nil {
		t.Error("sample 3 of 3")
	}
	for _, c := range []struct {
		name, want string
		change     func(dir string)
	}{
		{"nonsense", "is not a name", nil},
		{strings.Repeat("0", 32), "no description", nil},
		{e.Description, "", nil},
		{e.Files[0], "", nil},
		{filepath.Join("elsewhere", e.Files[0]), "", nil},
		{e.Hash, "it was changed", func(dir string) {
			edit(t, filepath.Join(dir, e.Description),
				strings.Index(e.Text, "151")+2)
		}},
		{e.Hash, "is truncated", func(dir string) { cut(t, filepath.Join(dir, e.Files[1]), 100) }},
		{e.Hash, "no such file", func(dir string) { remove(t, filepath.Join(dir, e.Files[1])) }},
		{e.Hash, "no such file",
			func(dir string) { remove(t, filepath.Join(dir, "*-GPTDataset-train-shuffle_index.npy")) }},
		{e.Hash, "type", func(dir string) {
			write(t, filepath.Join(dir, e.Files[0]), filepath.Join(dir, e.Files[1]))
		}},
	} {
		dir := copyCache(t, config.Cache)
		if c.change != nil {
			c.change(dir)
		}
		opened, err := OpenCache(dir, c.name, root)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
				continue
			}
			if err := readAll(opened); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			opened.Close()
		} else if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", c.name, err, c.want)
		}
	}
	if _, err := OpenCache(config.Cache, e.Hash, t.TempDir()); err == nil ||
		!strings.Contains(err.Error(), "no such file") {
		t.Errorf("without token files: %v", err)
	}
	if _, err := OpenCache(filepath.Join(root, "absent"), e.Hash, root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a directory: %v", err)
	}
}

// copyCache copies a directory, without mula's own folder.
func copyCache(t testing.TB, dir string) string {
	t.Helper()
	to := t.TempDir()
	found, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		if data, err := os.ReadFile(path); err == nil {
			writeFile(t, filepath.Join(to, filepath.Base(path)), data)
		}
	}
	return to
}

func edit(t testing.TB, path string, at int) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[at] ^= 1
	writeFile(t, path, data)
}

func cut(t testing.TB, path string, off int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, info.Size()-off); err != nil {
		t.Fatal(err)
	}
}

func remove(t testing.TB, pattern string) {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		t.Fatalf("%s: %v", pattern, err)
	}
	if err := os.Remove(found[0]); err != nil {
		t.Fatal(err)
	}
}

func write(t testing.TB, to, from string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, to, data)
}

// A damaged cache gives errors, never a panic, and no segment outside its file.
func FuzzOpenCache(f *testing.F) {
	root := vectorFiles(f)
	config := vectorConfig(f, root)
	config.Blend = mustBlend(f, "2 f0 1 f1")
	config.Samples = [3]Size{SizeOf(20), SizeOf(0), SizeOf(0)}
	config.Split = "1,0,0"
	if err := build(f, config, 1); err != nil {
		f.Fatal(err)
	}
	e := top(f, config, rebuild.Train)
	paths, err := filepath.Glob(filepath.Join(config.Cache, "*-*"))
	if err != nil || len(paths) != 11 {
		f.Fatal(len(paths), err)
	}
	files := make([][]byte, len(paths))
	for i, path := range paths {
		if files[i], err = os.ReadFile(path); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(uint8(0), uint32(0), []byte{})
	r := rand.New(rand.NewPCG(3, 4))
	for i := range 60 {
		f.Add(uint8(i), r.Uint32(), []byte{byte(r.Uint32()), byte(r.Uint32()), 0xff})
	}
	lengths := [][]int32{vectors.Lengths(0, 40), vectors.Lengths(1, 25)}
	f.Fuzz(func(t *testing.T, file uint8, at uint32, with []byte) {
		dir := t.TempDir()
		which := int(file) % len(files)
		for i, data := range files {
			if i == which {
				data = bytes.Clone(data)
				at := int(at) % len(data)
				data = append(data[:at], append(bytes.Clone(with), data[min(len(data), at+len(with)):]...)...)
			}
			if err := os.WriteFile(filepath.Join(dir, filepath.Base(paths[i])), data, 0o666); err != nil {
				t.Fatal(err)
			}
		}
		c, err := OpenCache(dir, e.Hash, root)
		if err != nil {
			return
		}
		defer c.Close()
		var segments []Segment
		for k := range c.Len() {
			dataset, sample, err := c.Sample(k)
			if err != nil {
				continue
			}
			segments, err = c.Segments(segments[:0], dataset, sample)
			if err != nil {
				continue
			}
			total := int64(0)
			for _, s := range segments {
				if s.Offset < 0 || s.Length <= 0 || s.Offset+s.Length > int64(lengths[dataset][s.Document]) {
					t.Fatalf("segment %v of dataset %d", s, dataset)
				}
				total += s.Length
			}
			if total > c.SequenceLength()+1 {
				t.Fatalf("%d tokens", total)
			}
		}
	})
}

// Single precision may count one partial sample too many. Before core 0.10, it starts at offset -1
// if the last document is empty. Such a sample has no tokens; the others do.
func TestCacheSampleFromNowhere(t *testing.T) {
	root := t.TempDir()
	writeFile(t, filepath.Join(root, "f.idx"), vectors.Index([]int32{134217930, 0}))
	for seed := uint32(0); ; seed++ {
		if seed == 20 {
			t.Fatal("the empty document is never the last; the test shows nothing")
		}
		c := vectorConfig(t, root)
		b := mustBlend(t, "f")
		c.Profile, c.Blend, c.Split, c.Samples, c.PerSplit[rebuild.Valid] = profileNamed(t, "core-0.9"), Blend{}, "",
			[3]Size{}, &b
		c.SequenceLength, c.Seed, c.KeepPartialValidation = 8947862, seed, true
		if err := build(t, c, 1); err != nil {
			t.Fatal(err)
		}
		cache, err := OpenCache(c.Cache, top(t, c, rebuild.Valid).Hash, root)
		if err != nil {
			t.Fatal(err)
		}
		defer cache.Close()
		if cache.Len() != 16 {
			t.Fatalf("%d samples", cache.Len())
		}
		if d := cache.datasets[0]; d.rows.at(d.rows.n-1) >= 0 {
			continue
		}
		for k := range cache.Len() {
			_, err := cache.Segments(nil, 0, k)
			if last := cache.datasets[0].shuffle.at(k) == 15; last != errors.Is(err, ErrCorrupt) ||
				!last && err != nil {
				t.Errorf("sample %d: %v", k, err)
			}
		}
		return
	}
}
