package formats

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/shards"
)

// A goldenCase is files of a framework's own writer, made by conformance/layouts.py, which names
// the versions in the file.
type goldenCase struct {
	Writer    string
	Open      string            // the path of the shard among the files
	Files     map[string]string // in hexadecimal
	Documents [][]uint32
	IDs       []string
	EOD       int64
	DType     string
	Limit     int64 // of MDS, where mula is to write the same folder; else 0
}

func goldenCases(t testing.TB) []goldenCase {
	t.Helper()
	data, err := os.ReadFile("testdata/layouts.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct{ Cases []goldenCase }
	if err := json.Unmarshal(data, &golden); err != nil || len(golden.Cases) < 10 {
		t.Fatalf("%d cases, %v", len(golden.Cases), err)
	}
	return golden.Cases
}

func (c *goldenCase) place(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range c.Files {
		data, err := hex.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, c.Open)
}

// What the frameworks' own writers write is read, and where mula writes the same documents in the
// same form, to the same bytes.
func TestFrameworksFiles(t *testing.T) {
	compared := make(map[string]int)
	for _, c := range goldenCases(t) {
		path := c.place(t)
		last := slices.Max(slices.Concat(c.Documents...))
		hints := Hints{DType: c.DType, VocabSize: int(last) + 1, EOD: c.EOD}
		r, err := Open(path, hints)
		if err != nil {
			t.Errorf("%s: %v", c.Writer, err)
			continue
		}
		var docs [][]uint32
		var ids []string
		for d, err := range r.All(t.Context()) {
			if err != nil {
				t.Fatalf("%s: %v", c.Writer, err)
			}
			docs = append(docs, slices.Clone(d.Tokens))
			if d.Origin.ID != "" {
				ids = append(ids, d.Origin.ID)
			}
		}
		if !slices.EqualFunc(docs, c.Documents, slices.Equal) || !slices.Equal(ids, c.IDs) {
			t.Errorf("%s: read %v %q, want %v %q", c.Writer, docs, ids, c.Documents, c.IDs)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}

		// The same bytes, of the files that do not depend on who wrote them.
		l, _, err := Detect(path)
		if err != nil {
			t.Fatal(err)
		}
		out := filepath.Join(t.TempDir(), "x")
		var again []document
		for i, tokens := range c.Documents {
			if c.Limit > 0 {
				again = append(again, document{tokens, shards.DocumentOrigin{ID: c.IDs[i]}})
				continue
			}
			again = append(again, document{tokens, shards.DocumentOrigin{ID: "doc \"" + string(rune('0'+i)) + "\", é",
				File: "part,0.json.gz", Line: int64(i) + 1}})
		}
		info := shards.TokenizerInfo{VocabSize: int(last) + 1, EOD: -1}
		if _, err := write(l, out, info, Options{TokenizerName: "some/tokenizer", SizeLimit: c.Limit},
			again); err != nil {
			t.Fatal(err)
		}
		for name, text := range c.Files {
			if c.Limit > 0 {
				got, err := os.ReadFile(filepath.Join(out, name))
				if want, _ := hex.DecodeString(text); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %s is %q, %v, want %q", c.Writer, name, got, err, want)
				}
				compared["mds"]++
			}
			if ending := strings.TrimPrefix(name, "x"); slices.Contains([]string{".npy", ".ds", ".ds.index",
				".ds.metadata"}, ending) {
				got, err := os.ReadFile(out + ending)
				if want, _ := hex.DecodeString(text); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %s is %x, %v, want %x", c.Writer, name, got, err, want)
				}
				compared[ending]++
			}
		}
	}
	if compared["mds"] < 4 || compared[".npy"] < 2 || compared[".ds"] < 3 || compared[".ds.index"] < 2 ||
		compared[".ds.metadata"] < 2 {
		t.Errorf("compared %v", compared)
	}
}
