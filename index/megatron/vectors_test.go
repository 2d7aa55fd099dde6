package megatron

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
	"mula/index/python"
	"mula/index/rebuild"
	"mula/internal/longtest"
)

// The original code made the vectors on x86-64 with numpy 1.24.2: NVIDIA/Megatron-LM d98e8a64. A
// manifest is md5sum over the output of md5sum *, in the cache directory.

// vectorFiles writes f0, f1 and f2 into a new directory.
func vectorFiles(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := vectors.Write(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func writeFile(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o666); err != nil {
		t.Fatal(err)
	}
}

// manifest is md5sum over the md5sum lines of the files in a directory, and their number.
func manifest(t testing.TB, dir string) (files int, sum string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	lines := md5.New()
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		files++
		fmt.Fprintf(lines, "%s  %s\n", fileMD5(t, filepath.Join(dir, e.Name())), e.Name())
	}
	return files, hex.EncodeToString(lines.Sum(nil))
}

func fileMD5(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := md5.Sum(data)
	return hex.EncodeToString(sum[:])
}

func nullTokenizer() python.Value {
	return python.Object{
		{Key: "class", Value: python.String("_NullTokenizer")},
		{Key: "tokenizer_path", Value: python.List{python.Null{}}},
		{Key: "vocab_size", Value: python.String("50304")},
	}
}

// vectorConfig is configuration A, over files in root, built into a new directory.
func vectorConfig(t testing.TB, root string) Config {
	t.Helper()
	c := NewConfig()
	c.Blend = mustBlend(t, "0.5 f0 0.2 f1 0.3 f2")
	c.Split = "70,20,10"
	c.Samples = [3]Size{SizeOf(300), SizeOf(40), SizeOf(10)}
	c.SequenceLength = 64
	c.Tokenizer = nullTokenizer()
	c.Root, c.Cache = root, t.TempDir()
	return c
}

func mustBlend(t testing.TB, words string) Blend {
	t.Helper()
	b, err := ParseBlend(strings.Fields(words))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// build builds a configuration and returns the error of New or Build.
func build(t testing.TB, c Config, threads int) error {
	t.Helper()
	x, err := New(context.Background(), c)
	if err != nil {
		return err
	}
	defer x.Close()
	_, err = x.Build(context.Background(), rebuild.BuildOptions{Threads: threads})
	return err
}

var vectorCases = []struct {
	name   string
	change func(t testing.TB, c *Config)
	files  int
	sum    string
}{
	{"A", func(testing.TB, *Config) {}, 45, "6c76c6d5c4489f1c08c63b51f3b2855d"},
	{"B", func(t testing.TB, c *Config) { c.Blend, c.Samples = mustBlend(t, "f0 f1 f2"), [3]Size{} }, 45,
		"2e0dc0bf72a8230fbc175d8640468733"},
	{"C", func(t testing.TB, c *Config) {
		c.Blend, c.Samples = mustBlend(t, "f0 f1 f2"), [3]Size{SizeOf(60), SizeOf(10), SizeOf(5)}
	}, 45, "01ddf504802006c97897bc9193d27ea3"},
	{"D", func(_ testing.TB, c *Config) { c.ExtraToken = false }, 45, "a85e9888ea22209fcbdc9ce7fe141d4f"},
	{"E1", func(_ testing.TB, c *Config) { c.KeepPartialValidation, c.Seed = true, 7 }, 45,
		"8873888d1d8df962df1ba3e795485533"},
	{"E2", func(_ testing.TB, c *Config) { c.KeepPartialValidation, c.Seed = true, 42 }, 45,
		"c9a071bad3f0984bf2a1c5883367e993"},
	{"E3", func(_ testing.TB, c *Config) { c.Seed = 42 }, 45, "ab8628eca561d065193058c04fc5eabc"},
	{"F", func(t testing.TB, c *Config) { c.Blend = mustBlend(t, "f0") }, 12, "b8ae1d549ef85afe4b434be00ff175f8"},
	{"G", func(t testing.TB, c *Config) {
		c.Blend, c.Split = Blend{}, ""
		for s, words := range []string{"0.5 f0 0.2 f1 0.3 f2", "f1", "f0 f2 f1"} {
			b := mustBlend(t, words)
			c.PerSplit[s] = &b
		}
	}, 34, "fe456083098ad9fab11ad522ea551cf4"},
}

func TestVectors(t *testing.T) {
	longtest.SkipIfShort(t)
	root := vectorFiles(t)
	for i, v := range vectorCases {
		t.Run(v.name, func(t *testing.T) {
			c := vectorConfig(t, root)
			v.change(t, &c)
			if err := build(t, c, 1+i%3); err != nil {
				t.Fatal(err)
			}
			files, sum := manifest(t, c.Cache)
			if files != v.files || sum != v.sum {
				t.Errorf("%d files, manifest %s; want %d, %s", files, sum, v.files, v.sum)
			}
		})
	}
}

// Configuration E stops Megatron at an assertion, because the last row of a sample index would have
// the offset -1.
func TestVectorE(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	c.KeepPartialValidation = true
	err := build(t, c, 2)
	if err == nil || !strings.Contains(err.Error(), "valid") {
		t.Fatalf("error %v; want one that names the valid split", err)
	}
	t.Log(err)
}

// Megatron core 0.7 to 0.9 have no such assertion and write it; so did megatron-core 0.7.0, 0.8.0
// and 0.9.0 from PyPI, with numpy 1.26.4 and, the last one, 2.4.6. It must be recognized, and be
// read as Megatron reads it: the last sample takes nothing from its last document.
func TestVectorEOfOldReleases(t *testing.T) {
	root := vectorFiles(t)
	for _, v := range []struct{ profile, sum string }{
		{"core-0.7", "67ae4b325c5989173e106fd529de5ee7"},
		{"core-0.8", "0fcde90a501e5de7d054d45e5eeda151"},
		{"core-0.9", "d4b6d98d449c5defa54060b060482b2b"},
	} {
		c := vectorConfig(t, root)
		c.Profile, c.KeepPartialValidation = profileNamed(t, v.profile), true
		if err := build(t, c, 2); err != nil {
			t.Fatal(err)
		}
		if files, sum := manifest(t, c.Cache); files != 45 || sum != v.sum {
			t.Errorf("%s: %d files, manifest %s; want 45, %s", v.profile, files, sum, v.sum)
		}

		copied := copyCache(t, c.Cache)
		r := verify(t, copied, root)
		for _, p := range Profiles() {
			written := slices.Contains(r.Writers, "Megatron core "+p.Releases())
			if p.checkOffsets && written || p == c.Profile && !written {
				t.Errorf("%s: written by %q", v.profile, r.Writers)
			}
		}
		if !allEqual(r) {
			t.Errorf("%s: %+v", v.profile, r)
		}
		backwards := 0
		for _, u := range r.Verdicts {
			if u.Kind != gptClass || u.Split != rebuild.Valid.String() {
				continue
			}
			cache, err := OpenCache(copied, u.Description, root)
			if err != nil {
				t.Fatal(err)
			}
			d := cache.datasets[0]
			if d.rows.at(d.rows.n-1) < 0 {
				backwards++
			}
			var all int64
			for k := range cache.Len() {
				segments, err := cache.Segments(nil, 0, k)
				if err != nil {
					t.Errorf("%s: %v", v.profile, err)
				}
				for _, s := range segments {
					all += s.Length
				}
			}
			tokens := cache.Len() - 1 // every sample but the first repeats the last token of the one before
			for at := range d.documents.n {
				length, err := d.lengthAt(at)
				if err != nil {
					t.Fatal(err)
				}
				tokens += length
			}
			if all != tokens {
				t.Errorf("%s, %s: the samples have %d tokens, want %d", v.profile, u.Prefixes[0], all, tokens)
			}
			if err := cache.Close(); err != nil {
				t.Error(err)
			}
		}
		if backwards != 1 {
			t.Errorf("%s: %d sample indexes end with -1", v.profile, backwards)
		}
	}
}

// The files of the train split of A one by one, so that a first difference can be found.
func TestVectorAFiles(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	if err := build(t, c, 1); err != nil {
		t.Fatal(err)
	}
	for _, file := range [][2]string{
		{"9550917d92b5853d13ed9a169d7581ef-GPTDataset-train-document_index.npy",
			"b03c739533e202f9e037a58d7e4cf7e9"},
		{"9550917d92b5853d13ed9a169d7581ef-GPTDataset-train-sample_index.npy",
			"9cb564b7dc6a3353b559cc849d450f46"},
		{"9550917d92b5853d13ed9a169d7581ef-GPTDataset-train-shuffle_index.npy",
			"d47194f6177051f7b04bb6cb8af57692"},
		{"11ee66898d37660cbba784b0bdc1acc8-GPTDataset-train-document_index.npy",
			"e1847ccc81a590530aeae10f4efc3d2e"},
		{"11ee66898d37660cbba784b0bdc1acc8-GPTDataset-train-sample_index.npy",
			"f9e356ce48ccce1963bdb4df82f505b0"},
		{"11ee66898d37660cbba784b0bdc1acc8-GPTDataset-train-shuffle_index.npy",
			"a17dddf6f11d0a6d16d3b85a05a1c208"},
		{"f94a98c76b76328c9e7b19cbbaeb93e9-GPTDataset-train-document_index.npy",
			"48706ce1eb3635fcf11624f4d4af5d02"},
		{"f94a98c76b76328c9e7b19cbbaeb93e9-GPTDataset-train-sample_index.npy",
			"f6b52841b8e0722740b2b69f51a5a566"},
		{"f94a98c76b76328c9e7b19cbbaeb93e9-GPTDataset-train-shuffle_index.npy",
			"b5a1926c6b0e695764f740e808fda9c7"},
		{"2919b6575c2ab8302aed2016a1b7193c-BlendedDataset-train-dataset_index.npy",
			"73786489c5c6a3a94a039429ae01f3f4"},
		{"2919b6575c2ab8302aed2016a1b7193c-BlendedDataset-train-dataset_sample_index.npy",
			"ab260c40f8bd3ec480c61a78b3d95ad9"},
	} {
		name, want := file[0], file[1]
		if got := fileMD5(t, filepath.Join(c.Cache, name)); got != want {
			t.Errorf("%s has the MD5 %s, want %s", name, got, want)
		}
	}
}

// The worked example of a description: 800 bytes, with the tokenizer object of 0.18 and 0.19.
func TestDescriptionExample(t *testing.T) {
	root := t.TempDir()
	lengths := make([]int32, 4000)
	for i := range lengths {
		lengths[i] = 1100
	}
	if err := os.MkdirAll(filepath.Join(root, "data"), 0o777); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(root, "data", "web_text_document.idx"), vectors.Index(lengths))
	var err error
	c := vectorConfig(t, root)
	if c.Tokenizer, err = HuggingFaceTokenizer("core-0.18", "/tok/olmo", false); err != nil {
		t.Fatal(err)
	}
	c.Blend, c.Split, c.SequenceLength, c.Samples[0] = Blend{Prefixes: []string{"data/web_text_document"}}, "969,30,1",
		4096, SizeOf(1005)
	x, err := New(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	// The example has an absolute prefix, which no test can have a file at.
	d := x.datasets[0]
	d.object[1].Value = python.String("/data/web_text_document")
	text, hash := named(d.object)
	if len(text) != 800 || hash != "ab16b0430d86b6cdca8366cb785a2bf9" {
		t.Errorf("%d bytes, hash %s:\n%s", len(text), hash, text)
	}
}
