package blendcorpus

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/index/rebuild"
	"mula/internal/quantity"
)

func verify(t *testing.T, dir, root string) rebuild.Report {
	t.Helper()
	r, err := Verify(context.Background(), dir, rebuild.VerifyOptions{Root: root, Threads: 2})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// allEqual reports whether all described files exist and are correct.
func allEqual(r rebuild.Report) bool {
	return !slices.ContainsFunc(r.Verdicts, func(v rebuild.Verdict) bool { return !v.Equal })
}

// Caches of all kinds are found right, and by the reading that they were built by.
func TestVerify(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*Config)
		how    map[string]string // by class
	}{
		{"H", func(*Config) {}, map[string]string{classBlend: "blendcorpus, separate", classCorpus: "blended, separate",
			classDataset: "split string"}},
		{"I", func(c *Config) { c.BlendSampleInCorpus = false }, map[string]string{classCorpus: "one after the other"}},
		{"Megatron-DeepSpeed", func(c *Config) { c.Profile, c.BlendSampleInCorpus = MegatronDeepSpeed, false },
			map[string]string{classCorpus: "one after the other"}},
		{"fused", func(c *Config) {
			c.Fused = true
			for i, w := range []float64{.1, .2, .7} {
				c.Files[i].Weight, c.Files[i].Corpus = w, ""
			}
		}, map[string]string{classBlend: "fused"}},
		{"flat", func(c *Config) {
			for i := range c.Files {
				c.Files[i].Corpus = ""
			}
		}, map[string]string{classBlend: "as recorded"}},
		{"without a document", func(c *Config) {
			writeIndex(t, filepath.Join(c.Root, "tiny"), []int32{500, 500, 500})
			c.Files = append(c.Files, File{1, "tiny", "web"})
			c.AllowUnreadable = true
		}, map[string]string{classCorpus: "as members"}},
	} {
		c := vectorConfig(t)
		test.change(&c)
		build(t, c)
		r := verify(t, c.Cache, c.Root)
		if !allEqual(r) || len(r.Verdicts) != len(open(t, c).Describe()) {
			t.Errorf("%s: %+v", test.name, r)
		}
		found := map[string]bool{}
		for _, v := range r.Verdicts {
			if v.Equal && strings.Contains(v.Settings, test.how[v.Kind]) {
				found[v.Kind] = true
			}
		}
		for class, how := range test.how {
			if !found[class] {
				t.Errorf("%s: no %s is read %q: %+v", test.name, class, how, r)
			}
		}
	}
}

// Each way in which a cache can be wrong is found, at the byte where it is.
func TestVerifyFindsFaults(t *testing.T) {
	c := vectorConfig(t)
	build(t, c)
	const top, web, file = "21f273c06fc3d9b60857922eb8306ad2", "291792a9e9659cf9c397331daa3861ae",
		"7f9b5841faa88ff9fdf6093d3ccf46ac"
	for _, test := range []struct {
		name, file string
		change     func([]byte) []byte // nil: remove
		hash       string
		at         int64 // of the first difference, or -1
		problem    string
	}{
		{"a byte of a blend", top + "_index.npy", flip(1000), top, 1000, ""},
		{"a byte of a header", top + "_sample_index.npy", flip(20), top, 20, ""},
		{"the last byte of a corpus", web + "_sample_index.npy", flip(128 + 8*273 - 1), web,
			128 + 8*273 - 1, ""},
		{"a byte of a document index", file + "_doc_idx.npy", flip(129), file, 129,
			""},
		{"cut off", file + "_sample_idx.npy", func(b []byte) []byte { return b[:500] }, file,
			500, ""},
		{"empty", web + "_index.npy", func(b []byte) []byte { return nil }, web, 0, ""},
		{"longer", web + "_index.npy", func(b []byte) []byte { return append(b, 0) }, web,
			128 + 8*273, ""},
		{"missing", file + "_shuffle_idx.npy", nil, file, -1, "_shuffle_idx.npy is missing"},
		{"another text", file + ".dsc",
			func(b []byte) []byte { return []byte(strings.Replace(string(b), "1234", "1235", 1)) }, file, -1,
			"does not match the text"},
		{"no description", web + ".dsc", func(b []byte) []byte { return []byte("hello") }, web, -1,
			"not a description"},
	} {
		name := filepath.Join(c.Cache, test.file)
		before, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if test.change == nil {
			err = os.Remove(name)
		} else {
			err = os.WriteFile(name, test.change(append([]byte(nil), before...)), 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
		r := verify(t, c.Cache, c.Root)
		if allEqual(r) {
			t.Errorf("%s: all is right", test.name)
		}
		for _, v := range r.Verdicts {
			if v.Description != test.hash+".dsc" {
				continue
			}
			problem := test.problem
			if test.at >= 0 {
				problem = fmt.Sprintf("%s differs first at byte %s$", test.file, quantity.Grouped(test.at))
			}
			if v.Differs != (test.at >= 0) || !strings.Contains(v.Problem+"$", problem) {
				t.Errorf("%s: %+v, want %s", test.name, v, problem)
			}
		}
		if err := os.WriteFile(name, before, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if !allEqual(verify(t, c.Cache, c.Root)) {
		t.Error("the cache is not as before")
	}
	if r := verify(t, c.Cache, t.TempDir()); allEqual(r) {
		t.Error("datasets are right without their token files")
	}
	if _, err := Verify(context.Background(), t.TempDir(), rebuild.VerifyOptions{}); err == nil ||
		!strings.Contains(err.Error(), "holds no index") {
		t.Errorf("an empty directory: %v", err)
	}
	if _, err := Verify(context.Background(), filepath.Join(c.Cache, "none"), rebuild.VerifyOptions{}); err == nil {
		t.Error("no directory, no error")
	}

	// What can only be known from the rest of the cache, without it.
	alone := t.TempDir()
	for _, name := range []string{web + ".dsc", web + "_index.npy", web + "_sample_index.npy"} {
		data, err := os.ReadFile(filepath.Join(c.Cache, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(alone, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if r := verify(t, alone, c.Root); len(r.Verdicts) != 1 || !strings.Contains(r.Verdicts[0].Problem,
		"are unknown") {
		t.Errorf("a corpus alone: %+v", r)
	}
}

// A description that does not belong to its files may request more memory than any machine has. Its
// files are then only inspected, and the others are verified.
func TestVerifyImplausible(t *testing.T) {
	c := vectorConfig(t)
	build(t, c)
	for _, test := range []struct{ hash, old, new string }{
		{"7f9b5841faa88ff9fdf6093d3ccf46ac", "Number of samples 99\nNumber of epochs 3\n",
			"Number of samples 70000000000000\nNumber of epochs 3000000000000\n"},
		{"7f9b5841faa88ff9fdf6093d3ccf46ac", "Number of epochs 3\n", "Number of epochs 9007199254740991\n"},
		{"291792a9e9659cf9c397331daa3861ae", " 273", " 9007199254740991"},
		{"21f273c06fc3d9b60857922eb8306ad2", "Size: 323\n", "Size: 9007199254740991\n"},
	} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(c.Cache)); err != nil {
			t.Fatal(err)
		}
		before, err := os.ReadFile(filepath.Join(dir, test.hash+descriptionEnd))
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Replace(string(before), test.old, test.new, 1)
		if text == string(before) {
			t.Fatalf("no %q in %q", test.old, text)
		}
		changed := hash(text)
		if err := os.WriteFile(filepath.Join(dir, changed+descriptionEnd), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		ends := blendEnds[:]
		if strings.Contains(test.old, "epochs") {
			ends = datasetEnds[:]
		}
		for i, name := range named(test.hash, ends) {
			if err := os.Link(filepath.Join(dir, name), filepath.Join(dir, changed+ends[i])); err != nil {
				t.Fatal(err)
			}
		}
		good := 0
		for _, v := range verify(t, dir, c.Root).Verdicts {
			switch {
			case v.Description != changed+descriptionEnd:
				if v.Equal {
					good++
				}
			case v.Problem == "" || v.Equal || v.Differs:
				t.Errorf("%q: %+v", test.new, v)
			}
		}
		if all := len(verify(t, c.Cache, c.Root).Verdicts); good != all {
			t.Errorf("%q: %d of %d others are right", test.new, good, all)
		}
	}
}

func flip(at int) func([]byte) []byte {
	return func(b []byte) []byte {
		b[at] ^= 0x10
		return b
	}
}

// Descriptions of any text are read without a panic. Accepted descriptions have the written values.
func FuzzParseDescription(f *testing.F) {
	r := request{"data/f0", rebuild.Train, 99, 64, 1234, "70, 20, 10"}
	f.Add(r.text(3))
	f.Add(corpusText(BlendCorpus, "web", 273, true, false))
	f.Add(corpusText(MegatronDeepSpeed, "web", 273, true, false))
	f.Add(blendText([]string{corpusEntry([]string{"f0", "f2"}, 273, 64, 1234), corpusEntry([]string{"f1"}, 50, 64,
		1234)}, []float64{.8, .2}, 323))
	f.Add(blendText([]string{r.text(3)}, []float64{1}, 99))
	f.Fuzz(func(t *testing.T, text string) {
		d := parseDescription(text)
		switch d.class {
		case classDataset:
			again := parseDescription(d.request.text(d.epochs))
			if again.class != classDataset || again.request != d.request || again.epochs != d.epochs {
				t.Errorf("%q is read as %+v, which is read as %+v", text, d, again)
			}
		case classBlend:
			var total int
			for _, e := range d.entries {
				total += len(e.prefixes)
			}
			if total > len(text) || d.size < 0 {
				t.Errorf("%q is read as %+v", text, d)
			}
		case classCorpus:
			if !strings.HasPrefix(text, d.corpus+"\n ") || len(d.modes) == 0 {
				t.Errorf("%q is read as %+v", text, d)
			}
		}
		var tops = verifier{descriptions: []*description{d}}
		tops.corpora(d)
	})
}
