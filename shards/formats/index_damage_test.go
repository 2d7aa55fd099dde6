package formats

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/shards"
	"mula/shards/datatrove"
	"mula/shards/dolma"
	"mula/shards/fms"
	"mula/shards/layout"
	"mula/shards/mds"
)

// A conversion reads every boundary of documents, so damage in the file that has them ends it
// before anything is written, also where the damaged file does not contradict itself.
func TestConversionFindsMovedBoundaries(t *testing.T) {
	docs := corpus(9, 30, 300)
	for _, c := range []struct {
		name   string
		layout *layout.Layout
		file   string // behind the prefix
		damage func(t *testing.T, data []byte) []byte
	}{
		{"start", &Megatron, ".idx", func(t *testing.T, idx []byte) []byte {
			start := idx[34+4*9+8*4:] // of sequence 4: two bytes less, one token
			binary.LittleEndian.PutUint64(start, binary.LittleEndian.Uint64(start)-2)
			return idx
		}},
		{"start and lengths", &Megatron, ".idx", func(t *testing.T, idx []byte) []byte {
			start, lengths := idx[34+4*9+8*4:], idx[34+4*3:]
			binary.LittleEndian.PutUint64(start, binary.LittleEndian.Uint64(start)-2)
			binary.LittleEndian.PutUint32(lengths, binary.LittleEndian.Uint32(lengths)-1)
			binary.LittleEndian.PutUint32(lengths[4:], binary.LittleEndian.Uint32(lengths[4:])+1)
			return idx
		}},
		{"document array", &Megatron, ".idx", func(t *testing.T, idx []byte) []byte {
			binary.LittleEndian.PutUint64(idx[34+12*9+8*4:], 5)
			return idx
		}},
		{"list", &dolma.Layout, ".csv.gz", func(t *testing.T, data []byte) []byte {
			z, err := gzip.NewReader(bytes.NewReader(data))
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(z)
			if err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			w := gzip.NewWriter(&out)
			w.Write(bytes.Replace(text, []byte(",d4,"), []byte(",d5,"), 1))
			w.Close()
			return out.Bytes()
		}},
		{"ends", &datatrove.Layout, ".ds.index", func(t *testing.T, data []byte) []byte {
			data[8*4] ^= 1
			return data
		}},
		{"index", &mds.Layout, "/index.json", func(t *testing.T, data []byte) []byte {
			return bytes.Replace(data, []byte(`"size_limit": 67108864`), []byte(`"size_limit": 67108865`), 1)
		}},
	} {
		t.Run(c.layout.Name+" "+c.name, func(t *testing.T) {
			dir := t.TempDir()
			in := filepath.Join(dir, "in")
			if _, err := write(c.layout, in, testInfo, Options{}, docs); err != nil {
				t.Fatal(err)
			}
			path := in + filepath.FromSlash(c.file)
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, c.damage(t, bytes.Clone(data)), 0o644); err != nil {
				t.Fatal(err)
			}
			if now, _ := os.ReadFile(path); bytes.Equal(now, data) {
				t.Fatal("nothing was damaged")
			}
			conversion := Conversion{Inputs: []string{in}, Hints: Hints{EOD: -1}, Layout: &fms.Layout,
				Output: filepath.Join(dir, "out", "x")}
			if err := os.Mkdir(filepath.Join(dir, "out"), 0o755); err != nil {
				t.Fatal(err)
			}
			_, err = conversion.Run(t.Context())
			if !errors.Is(err, shards.ErrCorrupt) || !strings.Contains(err.Error(), path) {
				t.Errorf("%v, want an error about %s", err, path)
			}
			if left := files(t, filepath.Join(dir, "out")); len(left) > 0 {
				t.Errorf("files were written: %d", len(left))
			}
		})
	}
}
