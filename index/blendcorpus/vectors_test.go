package blendcorpus

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/fixtures/vectors"
	"mula/index/cache"
	"mula/index/rebuild"
)

// The vectors of this file were written by the original code, BlendCorpus ac485ec on x86-64 with
// numpy 1.24.2, for the token files that writeTokenFiles makes.

// writeIndex writes an .idx file of these lengths.
func writeIndex(t testing.TB, prefix string, lengths []int32) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(prefix), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(prefix+".idx", vectors.Index(lengths), 0o666); err != nil {
		t.Fatal(err)
	}
}

// writeTokenFiles writes f0, f1 and f2 into a new directory.
func writeTokenFiles(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	if err := vectors.Write(root); err != nil {
		t.Fatal(err)
	}
	return root
}

func sum(b []byte) string {
	s := md5.Sum(b)
	return hex.EncodeToString(s[:])
}

const fileList = "2 f0 web\n1 f1 wiki\n3.5 f2 web\n"

// vectorConfig is the configuration of vector H.
func vectorConfig(t testing.TB) Config {
	t.Helper()
	c := NewConfig(BlendCorpus)
	var err error
	if c.Files, err = ParseFileList(fileList); err != nil {
		t.Fatal(err)
	}
	if c.Samples, err = Requests(8, 40, 2, 1); err != nil {
		t.Fatal(err)
	}
	c.Split, c.SequenceLength, c.Seed = "70, 20, 10", 64, 1234
	c.Root, c.Cache = writeTokenFiles(t), filepath.Join(t.TempDir(), "cache")
	return c
}

func open(t testing.TB, c Config) *Index {
	t.Helper()
	x, err := New(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func build(t testing.TB, c Config) cache.Summary {
	t.Helper()
	s, err := open(t, c).Build(context.Background(), rebuild.BuildOptions{Threads: 2, Resume: true})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// manifest is md5sum * | md5sum, and the number of files.
func manifest(t testing.TB, dir string) (string, int) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	n := 0
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&lines, "%s  %s\n", sum(b), e.Name())
		n++
	}
	return sum([]byte(lines.String())), n
}

func TestVectors(t *testing.T) {
	for _, test := range []struct {
		name     string
		change   func(*Config)
		manifest string
	}{
		{"H: defaults", func(*Config) {}, "e9d689bdcab49866a956b79285286dee"},
		{"I: not blended in corpora", func(c *Config) { c.BlendSampleInCorpus = false },
			"463aa2031c6184308414f6caa76c79c6"},
		{"J: shuffled in corpora", func(c *Config) { c.ShuffleSampleInCorpus = true },
			"e52d873e0e21d491457fdc5929e597d9"},
	} {
		c := vectorConfig(t)
		test.change(&c)
		s := build(t, c)
		if s.Built != 15 {
			t.Errorf("%s: %+v", test.name, s)
		}
		if got, n := manifest(t, c.Cache); got != test.manifest || n != 54 {
			t.Errorf("%s: %d files with the manifest %s, want 54 with %s", test.name, n, got, test.manifest)
		}
		// A second run finds everything complete.
		if s := build(t, c); s.Kept != 15 || s.Built != 0 {
			t.Errorf("%s, again: %+v", test.name, s)
		}
	}
}

// The files of train in H, one by one.
func TestVectorFiles(t *testing.T) {
	c := vectorConfig(t)
	build(t, c)
	for name, want := range map[string]string{
		"7f9b5841faa88ff9fdf6093d3ccf46ac_doc_idx.npy":      "986a575feeb976675614d425cdbb9e1d",
		"7f9b5841faa88ff9fdf6093d3ccf46ac_sample_idx.npy":   "a30de01dff76393e87403047674d1f9b",
		"7f9b5841faa88ff9fdf6093d3ccf46ac_shuffle_idx.npy":  "8bb82ae6f6b7020c047825882274755b",
		"291792a9e9659cf9c397331daa3861ae_index.npy":        "0a53262dfac21533d4e1f623a7d74b65",
		"291792a9e9659cf9c397331daa3861ae_sample_index.npy": "873118f8edbacf79370bbbac0ffd4114",
		"f131a3ca3ae52062741ff91558b912d6_index.npy":        "3d00e92f0a58557f68a54f1cdedbcb79",
		"f131a3ca3ae52062741ff91558b912d6_sample_index.npy": "8719d8b5c36fc8b3837b41edf9d11f47",
		"21f273c06fc3d9b60857922eb8306ad2_index.npy":        "7152cb38369d0e52dad63570734915fe",
		"21f273c06fc3d9b60857922eb8306ad2_sample_index.npy": "3c4d5318b1a630f3adb55f500bb38c18",
	} {
		b, err := os.ReadFile(filepath.Join(c.Cache, name))
		if err != nil {
			t.Error(err)
		} else if got := sum(b); got != want {
			t.Errorf("%s has the MD5 %s, want %s", name, got, want)
		}
	}
	const text = "Blendable dataset\n\n" +
		"Datasets:\nCorpusDataset:f0,f2,-273-641234\n\nCorpusDataset:f1,-50-641234\n\n" +
		"Weights: [0.84520124 0.15479876]\nSize: 323\n"
	if b, err := os.ReadFile(filepath.Join(c.Cache, "21f273c06fc3d9b60857922eb8306ad2.dsc")); string(b) != text {
		t.Errorf("%v, %q", err, b)
	}
	want := map[string]int64{"f0": 99, "f1": 50, "f2": 174}
	for _, e := range open(t, c).Describe() {
		if e.Class == classDataset && slices.Equal(e.Splits, []rebuild.Split{rebuild.Train}) &&
			e.Samples != want[e.Prefixes[0]] {
			t.Errorf("%s: %d samples, want %d", e.Name, e.Samples, want[e.Prefixes[0]])
		}
	}
}
