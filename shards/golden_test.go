package shards

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Both tests below use files of megatron-core and pyarrow, which testdata/golden_megatron.py makes.

var megatronDir = flag.String("megatron", "",
	"write the shards of TestMegatronReads to this directory, for golden_megatron.py, and end there")

// What megatron-core's builder writes is read here, and where it has one sequence a document,
// written here to the same bytes.
func TestMegatronBuilder(t *testing.T) {
	var golden struct {
		Cases map[string]struct {
			Vocabulary int
			Documents  [][][]uint32
		}
	}
	readJSON(t, "testdata/builder/cases.json", &golden)
	if len(golden.Cases) < 5 {
		t.Fatalf("only %d cases", len(golden.Cases))
	}
	for name, c := range golden.Cases {
		t.Run(name, func(t *testing.T) {
			prefix := filepath.Join("testdata/builder", name)
			s := open(t, prefix)
			if s.DType() != DTypeFor(c.Vocabulary) {
				t.Errorf("type %v, Megatron chose %v", DTypeFor(c.Vocabulary), s.DType())
			}
			if s.Documents() != int64(len(c.Documents)) {
				t.Fatalf("%d documents, want %d", s.Documents(), len(c.Documents))
			}
			single := true
			for d, sequences := range c.Documents {
				want := slices.Concat(sequences...)
				first, err1 := s.DocumentStart(int64(d))
				end, err2 := s.DocumentStart(int64(d) + 1)
				got := make([]uint32, end-first)
				if err := errors.Join(err1, err2, s.Read(got, first)); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, want) {
					t.Errorf("document %d is %v, want %v", d, got, want)
				}
				single = single && len(sequences) == 1
			}
			if !single {
				return
			}
			ours := filepath.Join(t.TempDir(), "x")
			w, err := Create(ours, DTypeFor(c.Vocabulary), TokenizerInfo{VocabSize: c.Vocabulary})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Abort()
			for d, sequences := range c.Documents {
				if err := w.Append(sequences[0], DocumentOrigin{Line: int64(d)}); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			for _, ext := range []string{".bin", ".idx"} {
				got, want := readFile(t, ours+ext), readFile(t, prefix+ext)
				if !bytes.Equal(got, want) {
					t.Errorf("%s differs from Megatron's:\n%x, want\n%x", ext, got, want)
				}
			}
		})
	}
}

// The shards below have the bytes that megatron-core's IndexedDataset and pyarrow were seen to
// read, and those saw in them what was written.
func TestMegatronReads(t *testing.T) {
	dir := *megatronDir
	if dir == "" {
		dir = t.TempDir()
	} else if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	type seen struct {
		Files           map[string]string
		DType           string
		Sequences       int64
		FirstLengths    []int64 `json:"first_lengths"`
		FirstDocuments  []int64 `json:"first_documents"`
		LengthsSHA256   string  `json:"lengths_sha256"`
		DocumentsSHA256 string  `json:"documents_sha256"`
		Tokens          int64
		TokensSHA256    string `json:"tokens_sha256"`
		Arrow           struct {
			Schema        [][2]string
			Batches       []int64
			BatchEdges    [][3]any `json:"batch_edges"`
			OriginsSHA256 string   `json:"origins_sha256"`
		}
	}
	var golden struct{ Shards map[string]seen }
	if *megatronDir == "" {
		readJSON(t, "testdata/seen.json", &golden)
	}
	for _, c := range []struct {
		name      string
		dtype     DType
		vocab     uint32
		documents int64
		length    func(d int64) int64
	}{
		{"one-uint16", UInt16, 65536, 1, func(int64) int64 { return 5000 }},
		{"one-int32", Int32, 1<<31 - 1, 1, func(int64) int64 { return 5000 }},
		{"empty-among-uint16", UInt16, 50280, 40, func(d int64) int64 { return max(0, d%7-3) * 100 }},
		{"empty-among-int32", Int32, 100278, 40, func(d int64) int64 { return max(0, d%7-3) * 100 }},
		// More than one record batch of origins.
		{"many-uint16", UInt16, 50280, documentBatch + 3000, func(d int64) int64 { return d % 5 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			prefix := filepath.Join(dir, c.name)
			w, err := Create(prefix, c.dtype, TokenizerInfo{VocabSize: int(c.vocab), EOD: -1})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Abort()
			lengths, starts, tokens, origins := sha256.New(), sha256.New(), sha256.New(), sha256.New()
			put := func(h interface{ Write([]byte) (int, error) }, v any) { binary.Write(h, binary.LittleEndian, v) }
			var total, next int64
			put(starts, int64(0))
			for d := range c.documents {
				ids := make([]uint32, c.length(d))
				for i := range ids {
					ids[i] = uint32((next*2654435761 + 12345) % int64(c.vocab))
					next++
				}
				o := origin(d)
				if err := w.Append(ids, o); err != nil {
					t.Fatal(err)
				}
				put(lengths, int32(len(ids)))
				put(starts, d+1)
				put(tokens, ids)
				fmt.Fprintf(origins, "%s\n%s\n%d\n", o.ID, o.File, o.Line)
				total += int64(len(ids))
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			if *megatronDir != "" {
				t.Skip("written to " + prefix + " for golden_megatron.py")
			}
			g, ok := golden.Shards[c.name]
			if !ok {
				t.Fatal("not in testdata/seen.json")
			}
			for _, ext := range []string{"bin", "idx", "docs.arrow"} {
				sum := sha256.Sum256(readFile(t, prefix+"."+ext))
				if got := hex.EncodeToString(sum[:]); got != g.Files[ext] {
					t.Errorf(".%s has the SHA-256 %s; the one that was read had %s. If the change is meant, make "+
						"seen.json again", ext, got, g.Files[ext])
				}
			}
			sum := func(h interface{ Sum([]byte) []byte }) string { return hex.EncodeToString(h.Sum(nil)) }
			if g.DType != string(c.dtype) || g.Sequences != c.documents || g.Tokens != total {
				t.Errorf("IndexedDataset saw %s, %d sequences, %d tokens; written %v, %d, %d", g.DType, g.Sequences,
					g.Tokens, c.dtype, c.documents, total)
			}
			if sum(lengths) != g.LengthsSHA256 || sum(starts) != g.DocumentsSHA256 || sum(tokens) != g.TokensSHA256 {
				t.Errorf("IndexedDataset saw other lengths (first %v), documents (first %v) or tokens", g.FirstLengths,
					g.FirstDocuments)
			}
			if !slices.Equal(g.Arrow.Schema, [][2]string{{"id", "string"}, {"file", "string"}, {"line", "int64"}}) {
				t.Errorf("pyarrow saw the columns %v", g.Arrow.Schema)
			}
			if sum(origins) != g.Arrow.OriginsSHA256 {
				t.Errorf("pyarrow saw other origins; its batches begin and end with %v", g.Arrow.BatchEdges)
			}
			var batches []int64
			for n := int64(0); n < c.documents; n += documentBatch {
				batches = append(batches, min(documentBatch, c.documents-n))
			}
			if !slices.Equal(g.Arrow.Batches, batches) {
				t.Errorf("pyarrow saw batches of %v rows, want %v", g.Arrow.Batches, batches)
			}
		})
	}
}

// origin makes up where document d of a test's shard comes from.
func origin(d int64) DocumentOrigin {
	return DocumentOrigin{ID: fmt.Sprintf("dok-%d-ß-%d", d, d*d%97), File: fmt.Sprintf("dclm/part-%04d.jsonl.zst",
		d/1000), Line: d%1000 + 1}
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func readJSON(t *testing.T, path string, v any) {
	t.Helper()
	if err := json.Unmarshal(readFile(t, path), v); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}
