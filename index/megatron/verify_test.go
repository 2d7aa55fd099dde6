package megatron

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/index/rebuild"
	"mula/internal/longtest"
	"mula/internal/quantity"
)

func verify(t testing.TB, dir, root string) rebuild.Report {
	t.Helper()
	calls := 0
	r, err := Verify(context.Background(), dir, rebuild.VerifyOptions{Root: root, Threads: 2,
		Progress: func(finished, all int, _ string) {
			if calls++; finished != calls || all < calls {
				t.Errorf("call %d: %d of %d", calls, finished, all)
			}
		}})
	if err != nil {
		t.Fatal(err)
	}
	if calls != len(r.Verdicts) {
		t.Errorf("%d calls for %d units", calls, len(r.Verdicts))
	}
	return r
}

// allEqual reports whether all described files exist and are correct.
func allEqual(r rebuild.Report) bool {
	return !slices.ContainsFunc(r.Verdicts, func(v rebuild.Verdict) bool { return !v.Equal })
}

// Verify accepts the files of every vector and finds the settings that produced them.
func TestVerify(t *testing.T) {
	longtest.SkipIfShort(t)
	root := vectorFiles(t)
	for _, vector := range vectorCases {
		c := vectorNamed(t, root, vector.name)
		r := verify(t, copyCache(t, c.Cache), root)
		if !allEqual(r) || len(r.Notes) > 0 {
			t.Errorf("%s: %+v", vector.name, r)
			continue
		}
		// Descriptions of blends have another key in 0.9 and 0.10, sample indices another type in
		// 0.8 and 0.9.
		want := []string{"Megatron core 0.7", "Megatron core 0.11 and 0.12", "Megatron core 0.13 and newer"}
		if vector.name == "F" {
			want = slices.Insert(want, 1, "Megatron core 0.10")
		}
		if !slices.Equal(r.Writers, want) {
			t.Errorf("%s: written by %q", vector.name, r.Writers)
		}
		either := 0
		for _, v := range r.Verdicts {
			if strings.Contains(v.Settings, "extra token or not") {
				either++
			} else if v.Kind == gptClass && strings.Contains(v.Settings, "no extra token") == c.ExtraToken {
				t.Errorf("%s: %s in %s", vector.name, v.Settings, v.Description)
			}
			if strings.Contains(v.Settings, "partial sample kept") && !c.KeepPartialValidation {
				t.Errorf("%s: partial sample kept", vector.name)
			}
		}
		if either == len(r.Verdicts) {
			t.Errorf("%s: no unit shows whether there is an extra token", vector.name)
		}
	}
}

func TestVerifyArithmetic(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	c.Arithmetic, c.Blend, c.Split = Fused, mustBlend(t, ".1 f0 .2 f1 .7 f2"), "1"
	c.Samples = [3]Size{SizeOf(24), SizeOf(0), SizeOf(0)}
	if err := build(t, c, 2); err != nil {
		t.Fatal(err)
	}
	r := verify(t, c.Cache, c.Root)
	for _, v := range r.Verdicts {
		if !v.Equal || v.Kind == blendClass && v.Settings != Fused.String() {
			t.Errorf("%+v", v)
		}
	}
}

// Damage is found at its byte, and put into words.
func TestVerifyDamage(t *testing.T) {
	longtest.SkipIfShort(t)
	root := vectorFiles(t)
	// The third file's train split, where the extra token makes a difference.
	const train, blend = "f94a98c76b76328c9e7b19cbbaeb93e9-GPTDataset-train-",
		"2919b6575c2ab8302aed2016a1b7193c-BlendedDataset-train-"
	caches := map[string]Config{"A": vectorNamed(t, root, "A"), "D": vectorNamed(t, root, "D")}
	for _, c := range []struct {
		vector, unit, file string
		change             func(path string)
		at                 int64
		meaning            string
	}{
		{"A", train, "document_index.npy", func(p string) { edit(t, p, 128+4*7) }, 128 + 4*7,
			"document_index entry 7: "},
		{"A", train, "sample_index.npy", func(p string) { edit(t, p, 128+8*17+4) }, 128 + 8*17 + 4,
			"sample_index row 17, offset: "},
		{"D", train, "sample_index.npy", func(p string) { edit(t, p, 128+8*17) }, 128 + 8*17,
			"sample_index row 17, document: "},
		{"D", train, "sample_index.npy", func(p string) { edit(t, p, 128+8*50+5) }, 128 + 8*50 + 5,
			"sample_index row 50, offset: "},
		{"A", train, "shuffle_index.npy", func(p string) { edit(t, p, 129) }, 129, "shuffle_index entry 0: "},
		{"A", train, "shuffle_index.npy", func(p string) { edit(t, p, 62) }, 62, "shuffle_index header: "},
		{"A", train, "shuffle_index.npy", func(p string) { edit(t, p, 2) }, 2, "shuffle_index header: not readable"},
		{"A", train, "shuffle_index.npy", func(p string) { cut(t, p, 4) }, 704, "shuffle_index: truncated after"},
		{"A", train, "shuffle_index.npy", func(p string) { cut(t, p, -3) }, 708,
			"shuffle_index: 3 bytes after its end"},
		{"A", blend, "dataset_index.npy", func(p string) { edit(t, p, 128+2*299) }, 128 + 2*299,
			"dataset_index entry 299: "},
		{"A", blend, "dataset_sample_index.npy", func(p string) { edit(t, p, 128) }, 128,
			"dataset_sample_index entry 0: 1, should be 0"},
		{"A", blend, "dataset_sample_index.npy", func(p string) { remove(t, p) }, 0, ""},
	} {
		dir := copyCache(t, caches[c.vector].Cache)
		c.change(filepath.Join(dir, c.unit+c.file))
		r := verify(t, dir, root)
		for _, v := range r.Verdicts {
			if v.Description != c.unit+descriptionEnd {
				if !v.Equal {
					t.Errorf("%s: %s", v.Description, v.Problem)
				}
				continue
			}
			// Another value of the extra token would differ first at another byte.
			want := fmt.Sprintf("%s%s differs first at byte %s: %s", c.unit, c.file, quantity.Grouped(c.at), c.meaning)
			if c.meaning == "" {
				want = c.unit + c.file + " is missing"
			}
			if v.Equal || !v.Differs || !strings.HasPrefix(v.Problem, want) || strings.Count(v.Problem, c.unit) != 1 {
				t.Errorf("%s%s: %q; want %q", c.unit, c.file, v.Problem, want)
			}
		}
	}
}

func TestVerifyProblems(t *testing.T) {
	root := vectorFiles(t)
	c := vectorNamed(t, root, "A")
	const train = "9550917d92b5853d13ed9a169d7581ef-GPTDataset-train-"
	find := func(r rebuild.Report, description string) rebuild.Verdict {
		at := slices.IndexFunc(r.Verdicts, func(v rebuild.Verdict) bool { return v.Description == description })
		if at < 0 {
			return rebuild.Verdict{}
		}
		return r.Verdicts[at]
	}

	dir := copyCache(t, c.Cache)
	remove(t, filepath.Join(dir, train+descriptionEnd))
	r := verify(t, dir, root)
	blend := find(r, "2919b6575c2ab8302aed2016a1b7193c-BlendedDataset-train-description.txt")
	if len(r.Notes) != 3 || !strings.HasPrefix(r.Notes[0], train) || blend.Equal || !blend.Differs ||
		blend.Settings != Separate.String() || blend.Problem != "datasets of the blend are missing: 1 "+
		"description, the first is "+train+descriptionEnd {
		t.Errorf("without a description: %+v, %+v", r.Notes, blend)
	}

	dir = copyCache(t, c.Cache)
	edit(t, filepath.Join(dir, train+descriptionEnd), 40)
	writeFile(t, filepath.Join(dir, "x-BERTMaskedWordPieceDataset-train-description.txt"), []byte(`{}`))
	r = verify(t, dir, root)
	for _, name := range []string{train + descriptionEnd, "x-BERTMaskedWordPieceDataset-train-description.txt"} {
		if v := find(r, name); v.Problem == "" || v.Equal || v.Differs {
			t.Errorf("%s: %+v", name, v)
		}
	}

	r = verify(t, c.Cache, t.TempDir())
	for _, v := range r.Verdicts {
		if v.Kind == gptClass && (v.Differs || !strings.Contains(v.Problem, ".idx")) {
			t.Errorf("without token files: %+v", v)
		}
	}
	if _, err := Verify(context.Background(), filepath.Join(root, "absent"), rebuild.VerifyOptions{}); err == nil {
		t.Error("a directory that is not there is verified")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Verify(ctx, c.Cache, rebuild.VerifyOptions{Root: root}); err == nil {
		t.Error("verified after the end")
	}
}

// A description that does not belong to its files may request more memory than any machine has. Its
// files are then only inspected.
func TestVerifyImplausible(t *testing.T) {
	root := vectorFiles(t)
	c := vectorNamed(t, root, "A")
	e := top(t, c, rebuild.Train)
	dir := t.TempDir()
	for _, change := range []struct {
		e        rebuild.Entry
		old, new string
	}{
		{e, `"size": 300`, `"size": 9007199254740992`},
		{e, `"size": 300`, `"size": 800000000000`},
		{datasetEntry(t, c), `"num_samples": 151`, `"num_samples": 800000000000`},
	} {
		text := strings.Replace(change.e.Text, change.old, change.new, 1)
		if text == change.e.Text {
			t.Fatalf("no %s in the description", change.old)
		}
		hash := hashed(text)
		writeFile(t, filepath.Join(dir, strings.Replace(change.e.Description, change.e.Hash, hash, 1)), []byte(text))
		for _, name := range change.e.Files {
			write(t, filepath.Join(dir, strings.Replace(name, change.e.Hash, hash, 1)), filepath.Join(c.Cache, name))
		}
	}
	r := verify(t, dir, root)
	if len(r.Verdicts) != 3 {
		t.Fatalf("%d units", len(r.Verdicts))
	}
	for _, v := range r.Verdicts {
		files := map[string]int{gptClass: 3, blendClass: 2}[v.Kind]
		if !v.Differs || strings.Count(v.Problem, " header: ") != files {
			t.Errorf("%+v", v)
		}
	}
}

// datasetEntry is the first dataset of a configuration.
func datasetEntry(t testing.TB, c Config) rebuild.Entry {
	t.Helper()
	x, err := New(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	entries, err := x.Describe(context.Background(), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Class == gptClass {
			return e
		}
	}
	t.Fatal("no dataset")
	return rebuild.Entry{}
}

// Caches of releases that use different names for the same description can share a directory.
func TestVerifyTwoNames(t *testing.T) {
	root := vectorFiles(t)
	c := vectorConfig(t, root)
	c.Blend = mustBlend(t, "f0")
	if err := build(t, c, 2); err != nil {
		t.Fatal(err)
	}
	c.Profile = profileNamed(t, "core-0.6")
	if err := build(t, c, 2); err != nil {
		t.Fatal(err)
	}
	r := verify(t, c.Cache, root)
	if len(r.Verdicts) != 6 || !allEqual(r) || len(r.Notes) > 0 || len(r.Writers) != 0 {
		t.Errorf("%+v", r)
	}
	edit(t, filepath.Join(c.Cache, datasetEntry(t, c).Files[2]), 200)
	r = verify(t, c.Cache, root)
	wrong := 0
	for _, v := range r.Verdicts {
		if !v.Equal {
			wrong++
			if !strings.HasSuffix(v.Description, "-GPTDataset-description.txt") {
				t.Errorf("%s is wrong", v.Description)
			}
		}
	}
	if wrong != 1 {
		t.Errorf("%d units are wrong", wrong)
	}
}

// Of the ways in which a cache may have been made one ends with the offset -1, as in configuration
// E; the others are tried all the same.
func TestVerifyPartialWithoutExtra(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	c.KeepPartialValidation, c.ExtraToken = true, false
	if err := build(t, c, 2); err != nil {
		t.Fatal(err)
	}
	r := verify(t, copyCache(t, c.Cache), c.Root)
	partial := 0
	for _, v := range r.Verdicts {
		if v.Split == rebuild.Valid.String() && v.Settings == "no extra token, partial sample kept" {
			partial++
		}
	}
	if !allEqual(r) || partial == 0 {
		t.Errorf("%d partial: %+v", partial, r)
	}
}
