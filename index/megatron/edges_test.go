package megatron

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"mula/fixtures/vectors"
	"mula/index/python"
	"mula/index/rebuild"
	"mula/internal/longtest"
)

func profileNamed(t testing.TB, name string) Profile {
	t.Helper()
	p, err := ProfileNamed(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A build that is not possible is refused with an error that has the location and the remedy.
func TestRefused(t *testing.T) {
	root := vectorFiles(t)
	zeros := make([]int32, 40)
	zeros[0] = 5000
	writeFile(t, filepath.Join(root, "empty.idx"), vectors.Index(zeros))
	writeFile(t, filepath.Join(root, "small.idx"), vectors.Index([]int32{20, 20, 20, 20}))
	old := func(c *Config) { c.Profile, c.Tokenizer = profileNamed(t, "core-0.4"), nil }
	for _, c := range []struct {
		name   string
		change func(c *Config)
		want   []string
	}{
		{"no profile", func(c *Config) { c.Profile = Profile{} }, []string{"profile"}},
		{"arithmetic", func(c *Config) { c.Arithmetic = 7 }, []string{"arithmetic(7)"}},
		{"sequence length", func(c *Config) { c.SequenceLength = 0 }, []string{"sequence length 0"}},
		{"negative", func(c *Config) { c.Samples[1] = SizeOf(-1) }, []string{"valid: invalid number of samples -1"}},
		{"too many", func(c *Config) { c.Samples[1] = SizeOf(1 << 62) }, []string{"are out of range"}},
		{"surplus", func(c *Config) { c.Surplus = -1 }, []string{"surplus is -1.0"}},
		{"no tokenizer", func(c *Config) { c.Tokenizer = nil }, []string{"tokenizer's object is missing",
			"description.txt"}},
		{"tokenizer", func(c *Config) { c.Profile = profileNamed(t, "core-0.4") }, []string{"have no tokenizer"}},
		{"renormalize", func(c *Config) { c.RenormalizeBlendWeights = true }, []string{"0.9 and 0.10"}},
		{"old extra token", func(c *Config) { old(c); c.ExtraToken = false }, []string{"is supported from 0.7"}},
		{"old partial", func(c *Config) { old(c); c.KeepPartialValidation = true }, []string{"is supported from 0.7"}},
		{"old size", func(c *Config) { old(c); c.Blend = mustBlend(t, "f0"); c.Samples[0] = Size{} },
			[]string{"train", "open sizes are supported from 0.7"}},
		{"old file of nothing", func(c *Config) { old(c); c.Blend = mustBlend(t, "f0"); c.Samples[2] = SizeOf(0) },
			[]string{"test", "above 0"}},
		{"old zero weight", func(c *Config) { old(c); c.Blend = mustBlend(t, "1 f0 0 f1 2 f2") },
			[]string{"weight of f1", "remove the file"}},
		{"old blend of nothing", func(c *Config) { old(c); c.Samples[2] = SizeOf(0) }, []string{"test", "above 0"}},
		{"old unweighted", func(c *Config) { old(c); c.Blend = mustBlend(t, "f0 f1 f2") },
			[]string{"lists without weights are supported from 0.7"}},
		{"both", func(c *Config) { c.PerSplit[1] = &c.Blend }, []string{"give only one kind"}},
		{"split and blends of splits", func(c *Config) { b := c.Blend; c.Blend = Blend{}; c.PerSplit[1] = &b },
			[]string{"remove the split string"}},
		{"nothing", func(c *Config) { c.Blend = Blend{} }, []string{"no token files"}},
		{"no split", func(c *Config) { c.Split = "" }, []string{"split string is missing", DefaultSplit}},
		{"bad split", func(c *Config) { c.Split = "1,2,3,4" }, []string{"4 numbers"}},
		{"weights without size", func(c *Config) { c.Samples[1] = Size{} },
			[]string{"valid", "weights divide a number"}},
		{"weights without size, left out", func(c *Config) { c.Split, c.Samples[2] = "9,1,0", Size{} },
			[]string{"test", "weights divide a number"}},
		{"zero weight", func(c *Config) { c.Blend = mustBlend(t, "0 f0 1 f1") },
			[]string{"weight of f0", "remove the file"}},
		{"no file", func(c *Config) { c.Blend = mustBlend(t, "1 f0 1 absent") }, []string{"absent.idx", "relative",
			root}},
		{"no absolute file", func(c *Config) { c.Blend = mustBlend(t, "1 f0 1 /absent/file") },
			[]string{"/absent/file.idx", "check the prefix"}},
		{"odd words", func(c *Config) { c.Blend = mustBlend(t, "0.5 f0 f1") },
			[]string{"0.5.idx", "looks like a weight", "odd number of words"}},
		{"empty split", func(c *Config) { c.Blend, c.Split = mustBlend(t, "1 f0 1 small"), "969,30,1" },
			[]string{"small.idx, valid split", "never finish"}},
		{"split without tokens", func(c *Config) { c.Blend = mustBlend(t, "1 f0 1 empty") },
			[]string{"empty.idx, ", "no tokens"}},
		{"file without samples", func(c *Config) {
			c.Blend, c.Split, c.Samples = mustBlend(t, "f0 small f1"), "2,1,1", [3]Size{}
		}, []string{"small.idx, train split", "40 tokens", "remove it"}},
	} {
		config := vectorConfig(t, root)
		c.change(&config)
		err := build(t, config, 2)
		if err == nil {
			t.Errorf("%s: no error", c.name)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q lacks %q", c.name, err, want)
			}
		}
	}
}

// A blend that draws more from a file than it has is refused, and writes nothing. The loop exceeds
// a dataset's share by up to two samples, and the files here have exactly the requested samples:
// one sample an epoch, and no surplus.
func TestOversampling(t *testing.T) {
	longtest.SkipIfShort(t)
	root := t.TempDir()
	lengths := make([]int32, 1000)
	for i := range lengths {
		lengths[i] = 8
	}
	var words []string
	for i := range 30 {
		name := fmt.Sprint("s", i)
		writeFile(t, filepath.Join(root, name+".idx"), vectors.Index(lengths))
		words = append(words, fmt.Sprint(1+i), name)
	}
	refused := 0
	for n := int64(20); n < 32; n++ {
		c := vectorConfig(t, root)
		var err error
		if c.Blend, err = ParseBlend(words); err != nil {
			t.Fatal(err)
		}
		c.Split, c.SequenceLength, c.Surplus = "1", 8*999+7, 0
		c.Samples = [3]Size{SizeOf(n), SizeOf(0), SizeOf(0)}
		err = build(t, c, 1)
		left, _ := filepath.Glob(filepath.Join(c.Cache, "*Blended*"))
		if err == nil {
			if len(left) != 3 {
				t.Errorf("%d samples: %d files of the blend", n, len(left))
			}
			continue
		}
		refused++
		if !strings.Contains(err.Error(), "IndexError") || !strings.Contains(err.Error(), "surplus") || len(left) > 0 {
			t.Errorf("%d samples: %v, with %s", n, err, left)
		}
	}
	if refused == 0 {
		t.Error("no size oversamples; the test shows nothing")
	}
}

// One prefix twice with the same share is one dataset with one set of files, but two in the blend.
func TestSamePrefixTwice(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	c.Blend, c.Split = mustBlend(t, "1 f0 1 f1 1 f0"), "1"
	c.Samples = [3]Size{SizeOf(90), SizeOf(0), SizeOf(0)}
	if err := build(t, c, 2); err != nil {
		t.Fatal(err)
	}
	if files, _ := manifest(t, c.Cache); files != 4+4+3 {
		t.Errorf("%d files", files)
	}
	if e := top(t, c, rebuild.Train); strings.Count(e.Text, `"GPTDataset"`) != 3 || e.Samples != 90 {
		t.Errorf("%d datasets, %d samples", strings.Count(e.Text, `"GPTDataset"`), e.Samples)
	}
}

// As many datasets as Megatron takes.
func TestMostDatasets(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	c.Split, c.Samples = "1", [3]Size{SizeOf(2 * maxDatasets), SizeOf(0), SizeOf(0)}
	c.Blend = Blend{Prefixes: slices.Repeat([]string{"f0"}, maxDatasets), Weights: slices.Repeat([]float64{1},
		maxDatasets)}
	if err := build(t, c, 2); err != nil {
		t.Fatal(err)
	}
	e := top(t, c, rebuild.Train)
	cache, err := OpenCache(c.Cache, e.Hash, c.Root)
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	seen := make([]int, maxDatasets)
	for k := range cache.Len() {
		dataset, _, err := cache.Sample(k)
		if err != nil {
			t.Fatal(err)
		}
		seen[dataset]++
	}
	if slices.Min(seen) != slices.Max(seen) {
		t.Errorf("datasets are drawn %d to %d times", slices.Min(seen), slices.Max(seen))
	}
	c.Blend.Prefixes, c.Blend.Weights = append(c.Blend.Prefixes, "f0"), append(c.Blend.Weights, 1)
	if err := build(t, c, 2); err == nil || !strings.Contains(err.Error(), "at most 32766") {
		t.Errorf("one more: %v", err)
	}
}

// Without a cache directory, datasets go beside their token files and blends nowhere.
func TestDefaultDirectories(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	c.Cache = ""
	x, err := New(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	s, err := x.Build(context.Background(), rebuild.BuildOptions{Threads: 2})
	if err != nil || s.Built != 9 {
		t.Fatalf("%+v, %v", s, err)
	}
	for _, f := range []string{"f0", "f1", "f2"} {
		if files, _ := manifest(t, filepath.Join(c.Root, f, "cache", "GPTDataset_indices")); files != 12 {
			t.Errorf("%s: %d files", f, files)
		}
	}
	entries, err := x.Describe(context.Background(), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if (e.Dir == "") != (e.Class == blendClass) || e.Length >= 0 != (e.Class == blendClass) || e.Sizes != nil {
			t.Errorf("%s %s: directory %q, length %d, sizes %v", e.Class, e.Splits, e.Dir, e.Length, e.Sizes)
		}
	}
}

// A second build with Resume keeps all; other settings that names do not tell are noticed.
func TestResume(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	run := func() (built, kept int) {
		x, err := New(context.Background(), c)
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		s, err := x.Build(context.Background(), rebuild.BuildOptions{Threads: 2, Resume: true})
		if err != nil {
			t.Fatal(err)
		}
		return s.Built, s.Kept
	}
	check := func(what string, wantBuilt, wantKept int, wantSum string) {
		t.Helper()
		built, kept := run()
		if _, sum := manifest(t, c.Cache); built != wantBuilt || kept != wantKept || sum != wantSum {
			t.Errorf("%s: %d built, %d kept, manifest %s", what, built, kept, sum)
		}
	}
	const a, d = "6c76c6d5c4489f1c08c63b51f3b2855d", "a85e9888ea22209fcbdc9ce7fe141d4f"
	check("first", 12, 0, a)
	check("again", 0, 12, a)
	c.ExtraToken = false
	check("no extra token", 9, 3, d)
	c.ExtraToken = true
	check("extra token", 9, 3, a)
	c.Arithmetic = Fused
	if built, kept := run(); built != 3 || kept != 9 {
		t.Errorf("fused: %d built, %d kept", built, kept)
	}
	c.Arithmetic = Separate
	check("separate", 3, 9, a)
	cut(t, filepath.Join(c.Cache, "2919b6575c2ab8302aed2016a1b7193c-BlendedDataset-train-dataset_index.npy"), 1)
	check("cut", 1, 11, a)
	touched := filepath.Join(c.Root, "f1.idx")
	if err := os.Chtimes(touched, time.Unix(1e9, 0), time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	check("touched", 3, 9, a)
}

func TestDescribeSizes(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	x, err := New(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	entries, err := x.Describe(context.Background(), true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := x.Build(context.Background(), rebuild.BuildOptions{Threads: 1}); err != nil {
		t.Fatal(err)
	}
	if len(entries) != 12 {
		t.Fatalf("%d entries", len(entries))
	}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(e.Dir, e.Description))
		if err != nil || string(text) != e.Text || !strings.HasPrefix(e.Description, e.Hash) {
			t.Errorf("%s: %v", e.Description, err)
		}
		for i, name := range e.Files {
			if info, err := os.Stat(filepath.Join(e.Dir, name)); err != nil || info.Size() != e.Sizes[i] {
				t.Errorf("%s: %d bytes were announced, error %v", name, e.Sizes[i], err)
			}
		}
	}
}

// The names and types of all releases, written from the table of the changes of each release. The
// bytes of the arrays equal the bytes of the newest release wherever the rules agree.
func TestProfiles(t *testing.T) {
	longtest.SkipIfShort(t)
	root := vectorFiles(t)
	for _, p := range Profiles() {
		t.Run(p.Name(), func(t *testing.T) {
			c := vectorConfig(t, root)
			c.Profile = p
			if p.Name() == "core-0.4" {
				c.Tokenizer = nil
			}
			if err := build(t, c, 2); err != nil {
				t.Fatal(err)
			}
			e := top(t, c, rebuild.Train)
			v, err := python.Parse([]byte(e.Text))
			if err != nil {
				t.Fatal(err)
			}
			o := v.(python.Object)
			first := o.Get("datasets").(python.List)[0].(python.Object)
			number := slices.Index([]string{"core-0.4", "core-0.5", "core-0.7", "core-0.8", "core-0.9", "core-0.10",
				"core-0.11", "core-0.13"}, p.Name())

			keys := "class dataset_path num_samples index_split random_seed sequence_length split split_matrix " +
				"tokenizer"
			if number == 0 {
				keys = "class path_prefix num_samples index_split split random_seed sequence_length"
			}
			if got := keysOf(first); got != keys {
				t.Errorf("keys of a dataset: %s", got)
			}
			keys = "class datasets split weights size"
			switch {
			case number <= 1:
				keys = "class datasets weights size"
			case number == 4 || number == 5:
				keys += " renormalize_blend_weights"
			}
			if got := keysOf(o); got != keys {
				t.Errorf("keys of a blend: %s", got)
			}
			size := int64(300)
			if number <= 5 {
				size = 151 + 61 + 91 // one ceil: 150.75, 60.3, 90.45
			}
			if got := o.Get("size"); got != python.Int(size) {
				t.Errorf("size %v, want %d", got, size)
			}
			split := "-train"
			if number <= 1 {
				split = ""
			}
			if want := e.Hash + "-BlendedDataset" + split + "-description.txt"; e.Description != want {
				t.Errorf("%s, want %s", e.Description, want)
			}
			samples, err := filepath.Glob(filepath.Join(c.Cache, "*-GPTDataset"+split+"-sample_index.npy"))
			if err != nil || len(samples) != map[bool]int{true: 9, false: 3}[number <= 1] {
				t.Fatal(samples, err)
			}
			descr := "'<i4'"
			if number == 3 || number == 4 {
				descr = "'<i8'"
			}
			for _, path := range samples {
				if data, err := os.ReadFile(path); err != nil || !strings.Contains(string(data[:128]), descr) {
					t.Errorf("%s is not of type %s", path, descr)
				}
			}
			r, err := Verify(context.Background(), c.Cache, rebuild.VerifyOptions{Root: root, Threads: 2})
			if err != nil || !allEqual(r) || !slices.Contains(r.Writers, "Megatron core "+p.Releases()) {
				t.Errorf("verify: %v, written by %q", err, r.Writers)
			}
		})
	}
}

func keysOf(o python.Object) string {
	var names []string
	for _, m := range o {
		names = append(names, m.Key)
	}
	return strings.Join(names, " ")
}

// Renormalized weights are the shares of the whole blend: 151, 61 and 91 of 303.
func TestRenormalize(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	c.Profile, c.RenormalizeBlendWeights = profileNamed(t, "core-0.10"), true
	e := top(t, c, rebuild.Train)
	var got struct {
		Weights     []float64
		Renormalize bool `json:"renormalize_blend_weights"`
	}
	if err := json.Unmarshal([]byte(e.Text), &got); err != nil {
		t.Fatal(err)
	}
	sum := 151./303 + 61./303 + 91./303
	if !got.Renormalize || !slices.Equal(got.Weights, []float64{151. / 303 / sum, 61. / 303 / sum, 91. / 303 / sum}) {
		t.Errorf("%+v", got)
	}
}

func TestProfileNamed(t *testing.T) {
	for name, want := range map[string]string{
		"core-0.4": "core-0.4", "core-0.6": "core-0.5", "core-0.12": "core-0.11", "core-0.19": "core-0.13",
		"core-main": "core-0.13",
	} {
		if p := profileNamed(t, name); p.Name() != want || p.String() != want || p.Releases() == "" {
			t.Errorf("%s is %s", name, p)
		}
	}
	if _, err := ProfileNamed("core-0.3"); err == nil || !strings.Contains(err.Error(), "core-0.4, core-0.5") {
		t.Errorf("core-0.3: %v", err)
	}
	if NewConfig().Profile.Name() != "core-0.13" {
		t.Error("the default is not the newest")
	}
	for _, name := range []string{"separate", "fused"} {
		if a, err := ParseArithmetic(name); err != nil || a.String() != name {
			t.Errorf("%s: %v, %v", name, a, err)
		}
	}
	if _, err := ParseArithmetic("double"); err == nil {
		t.Error("double is an arithmetic")
	}
}
