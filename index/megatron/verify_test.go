package megatron

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/longtest"
)

func verify(t testing.TB, dir, root string) Report {
	t.Helper()
	calls := 0
	r, err := Verify(context.Background(), dir, VerifyOptions{Root: root, Threads: 2, Progress: func(finished, all int,
		_ UnitReport) {
		if calls++; finished != calls || all < calls {
			t.Errorf("call %d: %d of %d", calls, finished, all)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if calls != len(r.Units) {
		t.Errorf("%d calls for %d units", calls, len(r.Units))
	}
	return r
}

// Every vector is found right, and how it was made is found out, from the files alone.
func TestVerify(t *testing.T) {
	longtest.SkipIfShort(t)
	root := vectorFiles(t)
	for _, v := range vectorCases {
		c := vectorNamed(t, root, v.name)
		r := verify(t, copyCache(t, c.Cache), root)
		if !r.ok() || len(r.Orphans) > 0 {
			t.Errorf("%s: %+v", v.name, r)
			continue
		}
		// Descriptions of blends have another key in 0.9 and 0.10, sample indices another type in
		// 0.8 and 0.9.
		want := "[core-0.7 core-0.11 core-0.13]"
		if v.name == "F" {
			want = "[core-0.7 core-0.10 core-0.11 core-0.13]"
		}
		if p := fmt.Sprint(r.Profiles()); p != want {
			t.Errorf("%s: profiles %s", v.name, p)
		}
		either := 0
		for _, u := range r.Units {
			if u.EitherToken {
				either++
			} else if u.Class == gptClass && u.ExtraToken != c.ExtraToken {
				t.Errorf("%s: extra token %v in %s", v.name, u.ExtraToken, u.Description)
			}
			if u.KeepPartial && !c.KeepPartialValidation {
				t.Errorf("%s: partial sample kept", v.name)
			}
			for _, f := range u.Files {
				if !f.OK() || f.Size != f.Want || f.Size == 0 {
					t.Errorf("%s: %+v", v.name, f)
				}
			}
		}
		if either == len(r.Units) {
			t.Errorf("%s: no unit says whether there is an extra token", v.name)
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
	for _, u := range r.Units {
		if !u.OK || u.Class == blendClass && u.Arithmetic != Fused {
			t.Errorf("%+v", u)
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
		{"A", train, "shuffle_index.npy", func(p string) { cut(t, p, 4) }, 0, "shuffle_index: truncated after"},
		{"A", train, "shuffle_index.npy", func(p string) { cut(t, p, -3) }, 0, "shuffle_index: 3 bytes after its end"},
		{"A", blend, "dataset_index.npy", func(p string) { edit(t, p, 128+2*299) }, 128 + 2*299,
			"dataset_index entry 299: "},
		{"A", blend, "dataset_sample_index.npy", func(p string) { edit(t, p, 128) }, 128,
			"dataset_sample_index entry 0: 1, should be 0"},
		{"A", blend, "dataset_sample_index.npy", func(p string) { remove(t, p) }, -1, "the file is missing"},
	} {
		dir := copyCache(t, caches[c.vector].Cache)
		c.change(filepath.Join(dir, c.unit+c.file))
		r := verify(t, dir, root)
		if r.ok() {
			t.Errorf("%s%s: not noticed", c.unit, c.file)
		}
		for _, u := range r.Units {
			if u.Description != c.unit+descriptionEnd {
				if !u.OK {
					t.Errorf("%s is not right either: %+v", u.Description, u)
				}
				continue
			}
			for _, f := range u.Files {
				if f.Name != c.unit+c.file {
					if !f.OK() {
						t.Errorf("%s: %s", f.Name, f.Meaning)
					}
				} else if f.OK() || c.at > 0 && f.Byte != c.at || !strings.Contains(f.Meaning, c.meaning) {
					t.Errorf("%s, byte %d: %q; want byte %d, %q", f.Name, f.Byte, f.Meaning, c.at, c.meaning)
				}
			}
			if c.unit == train && u.ExtraToken != (c.vector == "A") {
				t.Errorf("%s: extra token %v comes closest", c.vector, u.ExtraToken)
			}
		}
	}
}

func TestVerifyProblems(t *testing.T) {
	root := vectorFiles(t)
	c := vectorNamed(t, root, "A")
	const train = "9550917d92b5853d13ed9a169d7581ef-GPTDataset-train-"
	find := func(r Report, description string) UnitReport {
		for _, u := range r.Units {
			if u.Description == description {
				return u
			}
		}
		return UnitReport{}
	}

	dir := copyCache(t, c.Cache)
	remove(t, filepath.Join(dir, train+descriptionEnd))
	r := verify(t, dir, root)
	blend := find(r, "2919b6575c2ab8302aed2016a1b7193c-BlendedDataset-train-description.txt")
	if len(r.Orphans) != 3 || !strings.HasPrefix(r.Orphans[0], train) || r.ok() || !blend.OK ||
		len(blend.Absent) != 1 || blend.Absent[0] != train+descriptionEnd {
		t.Errorf("without a description: %+v, %+v", r.Orphans, blend)
	}

	dir = copyCache(t, c.Cache)
	edit(t, filepath.Join(dir, train+descriptionEnd), 40)
	writeFile(t, filepath.Join(dir, "x-BERTMaskedWordPieceDataset-train-description.txt"), []byte(`{}`))
	r = verify(t, dir, root)
	for _, name := range []string{train + descriptionEnd, "x-BERTMaskedWordPieceDataset-train-description.txt"} {
		if u := find(r, name); u.Problem == nil || u.OK {
			t.Errorf("%s: %+v", name, u)
		}
	}

	r = verify(t, c.Cache, t.TempDir())
	for _, u := range r.Units {
		if u.Class == gptClass && (u.Problem == nil || !strings.Contains(u.Problem.Error(), ".idx")) {
			t.Errorf("without token files: %+v", u)
		}
	}
	if _, err := Verify(context.Background(), filepath.Join(root, "absent"), VerifyOptions{}); err == nil {
		t.Error("a directory that is not there is verified")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Verify(ctx, c.Cache, VerifyOptions{Root: root}); err == nil {
		t.Error("verified after the end")
	}
}

// A description that is not that of its files may ask for more than any machine has; its files are
// then only looked at.
func TestVerifyImplausible(t *testing.T) {
	root := vectorFiles(t)
	c := vectorNamed(t, root, "A")
	e := top(t, c, Train)
	dir := t.TempDir()
	for _, change := range []struct {
		e        Entry
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
	if len(r.Units) != 3 {
		t.Fatalf("%d units", len(r.Units))
	}
	for _, u := range r.Units {
		if u.Problem != nil || u.OK {
			t.Errorf("%+v", u)
		}
		for _, f := range u.Files {
			if f.OK() || f.Byte >= 128 || !strings.Contains(f.Meaning, "header") {
				t.Errorf("%s: byte %d, %s", f.Name, f.Byte, f.Meaning)
			}
		}
	}
}

// datasetEntry is the first dataset of a configuration.
func datasetEntry(t testing.TB, c Config) Entry {
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
	return Entry{}
}

// Caches of releases that name the same description differently can lie in one directory.
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
	if len(r.Units) != 6 || !r.ok() || len(r.Orphans) > 0 || len(r.Profiles()) != 0 {
		t.Errorf("%+v", r)
	}
	edit(t, filepath.Join(c.Cache, datasetEntry(t, c).Files[2]), 200)
	r = verify(t, c.Cache, root)
	wrong := 0
	for _, u := range r.Units {
		if !u.OK {
			wrong++
			if !strings.HasSuffix(u.Description, "-GPTDataset-description.txt") {
				t.Errorf("%s is wrong", u.Description)
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
	for _, u := range r.Units {
		if u.Split == Valid && u.KeepPartial && !u.ExtraToken {
			partial++
		}
	}
	if !r.ok() || partial == 0 {
		t.Errorf("%d partial: %+v", partial, r)
	}
}

// ok says that everything that the directory describes is there and right.
func (r Report) ok() bool {
	return !slices.ContainsFunc(r.Units, func(u UnitReport) bool { return !u.OK || len(u.Absent) > 0 })
}
