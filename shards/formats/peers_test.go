package formats

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/shards"
	"mula/shards/layout"
)

// Files of MosaicML Streaming and datatrove are compared with the counts and hashes that these
// packages wrote: a changed bit of the ids, or a wrong number of tokens, ends a read.
// testdata/peers.py made the files.
func TestPeersHashesAreCompared(t *testing.T) {
	text, err := os.ReadFile("testdata/peers.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Documents [][]uint32
		Shards    []struct {
			Writer, Open string
			Files        map[string]string
			Hashes       []string
		}
	}
	if err := json.Unmarshal(text, &golden); err != nil {
		t.Fatal(err)
	}
	for _, s := range golden.Shards {
		dir := t.TempDir()
		whole := map[string][]byte{}
		for name, text := range s.Files {
			data, err := hex.DecodeString(text)
			if err := errors.Join(err, os.WriteFile(filepath.Join(dir, name), data, 0o644)); err != nil {
				t.Fatal(err)
			}
			whole[name] = data
		}
		put := func(name string, data []byte) {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		documents := func() (docs [][]uint32, err error) {
			r, err := Open(filepath.Join(dir, s.Open), layout.NoHints)
			if err != nil {
				return nil, err
			}
			defer r.Close()
			for d, err := range r.All(t.Context()) {
				if err != nil {
					return docs, err
				}
				docs = append(docs, slices.Clone(d.Tokens))
			}
			return docs, nil
		}
		if docs, err := documents(); err != nil || !slices.EqualFunc(docs, golden.Documents, slices.Equal) {
			t.Fatalf("%s: %v, %v", s.Writer, docs, err)
		}
		if len(s.Hashes) == 0 { // datatrove: it notes the number of tokens alone
			put("x.ds.metadata", []byte(strings.Replace(string(whole["x.ds.metadata"]), "\n12\n", "\n11\n", 1)))
			if _, err := documents(); !errors.Is(err, shards.ErrCorrupt) ||
				!strings.Contains(err.Error(), "x.ds.metadata has tokens 11, but found 12") {
				t.Errorf("%s: another number of tokens: %v", s.Writer, err)
			}
			continue
		}
		data := "shard.00000.mds"
		if _, ok := whole[data]; !ok {
			data += ".zstd"
		}
		for _, algorithm := range s.Hashes {
			// Only this hash is left.
			index := string(whole["index.json"])
			for _, other := range s.Hashes {
				if other != algorithm {
					index = strings.ReplaceAll(index, `"`+other+`": "`, `"not `+other+`": "`)
				}
			}
			put("index.json", []byte(index))
			_, err := documents()
			if strings.HasPrefix(algorithm, "blake2") {
				if err == nil || !strings.Contains(err.Error(), "has only unknown hashes of") {
					t.Errorf("%s, %s: %v", s.Writer, algorithm, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s, %s: %v", s.Writer, algorithm, err)
			}
			damaged := slices.Clone(whole[data])
			damaged[len(damaged)-6] ^= 1
			put(data, damaged)
			if _, err := documents(); !errors.Is(err, shards.ErrCorrupt) ||
				!strings.Contains(err.Error(), filepath.Join(dir, data)+": expected "+algorithm+" ") {
				t.Errorf("%s, %s: a changed bit: %v", s.Writer, algorithm, err)
			}
			put(data, whole[data])
		}
	}
}
