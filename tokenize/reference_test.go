package tokenize

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReference compares with ids that testdata/reference.py had from Hugging Face tokenizers, by hand and in bulk; the
// golden tests hold the same on a small scale.
func TestReference(t *testing.T) {
	dir := os.Getenv("TOKENIZE_REFERENCE")
	if dir == "" {
		t.Skip("TOKENIZE_REFERENCE is not set")
	}
	documents := readCounted(t, filepath.Join(dir, "documents.bin"), 1)
	files, err := filepath.Glob(filepath.Join(dir, "*.ids"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no .ids files in %s (%v)", dir, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			base, specials, _ := strings.Cut(strings.TrimSuffix(file, ".ids"), ".")
			tok, err := Load(base + ".json")
			if err != nil {
				t.Fatal(err)
			}
			opts := EncodeOptions{Specials: SpecialsAsTokens}
			if specials == "text" {
				opts.Specials = SpecialsAsText
			}
			e := tok.NewEncoder(opts)
			want := readCounted(t, file, 4)
			if len(want) != len(documents) {
				t.Fatalf("ids of %d documents, want %d", len(want), len(documents))
			}
			var ids []uint32
			differ, total := 0, 0
			for i, d := range documents {
				ids, err = e.Append(ids[:0], d)
				if err != nil {
					t.Fatalf("document %d: %v", i, err)
				}
				total += len(ids)
				if same(ids, want[i]) {
					continue
				}
				if differ++; differ <= 5 {
					k := 0
					for k < len(ids) && 4*k < len(want[i]) && ids[k] == binary.LittleEndian.Uint32(want[i][4*k:]) {
						k++
					}
					before, _ := tok.Decode(nil, ids[:k])
					t.Errorf("document %d of %d bytes: %d ids, want %d; they part at %d, after %q, in %.300q", i, len(d), len(ids), len(want[i])/4, k, before[max(0, len(before)-40):], d)
				}
			}
			t.Logf("%d of %d documents differ (%d ids)", differ, len(documents), total)
		})
	}
}

func same(ids []uint32, want []byte) bool {
	if 4*len(ids) != len(want) {
		return false
	}
	for i, id := range ids {
		if binary.LittleEndian.Uint32(want[4*i:]) != id {
			return false
		}
	}
	return true
}

// readCounted reads items that each have their count before them, size bytes a unit.
func readCounted(t *testing.T, path string, size int) (items [][]byte) {
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for len(b) > 0 {
		n := size * int(binary.LittleEndian.Uint32(b))
		items = append(items, b[4:4+n])
		b = b[4+n:]
	}
	return items
}
