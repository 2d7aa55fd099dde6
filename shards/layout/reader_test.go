package layout

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/shards"
)

func writeFile(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func openMarked(t testing.TB, path string) *Marked {
	t.Helper()
	f, err := OpenMarked(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// IDs returns the ids of an array in pieces of any length, and documents that end with an id.
func TestIDs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	rapid.Check(t, func(rt *rapid.T) {
		dtype := rapid.SampledFrom([]shards.DType{shards.UInt8, shards.UInt16, shards.UInt32}).Draw(rt, "dtype")
		const end = 3
		ids := rapid.SliceOfN(rapid.Uint32Max(5), 0, 3*searchChunk).Draw(rt, "ids")
		if rapid.Bool().Draw(rt, "long") { // more than the buffer
			ids = slices.Concat(slices.Repeat([]uint32{1}, 1<<18), ids)
		}
		writeFile(t, path, dtype.AppendEncoded(nil, ids))
		f, err := OpenMarked(path)
		if err != nil {
			rt.Fatal(err)
		}
		defer f.Close()
		r := NewIDs(f, dtype, int64(len(ids)))
		for n := 0; r.Left() > 0; {
			k := rapid.IntRange(0, int(r.Left())).Draw(rt, "piece")
			got, err := r.Append([]uint32{9}, int64(k))
			if err != nil || !slices.Equal(got[1:], ids[n:n+k]) {
				rt.Fatalf("ids %d to %d: %v, %v", n, n+k, got, err)
			}
			if n += k; r.Next() != int64(n) || r.Left() != int64(len(ids)-n) {
				rt.Fatalf("%d ids are read and %d left, after %d of %d", r.Next(), r.Left(), n, len(ids))
			}
		}
		if _, err := r.Append(nil, 1); err == nil {
			rt.Fatal("an id after the last")
		}
		r = NewIDs(f, dtype, int64(len(ids)))
		for n, want := range documents(ids, end) {
			if got, err := r.AppendUntil(nil, end); err != nil || !slices.Equal(got, want) {
				rt.Fatalf("document %d has %d ids, %v; want %d", n, len(got), err, len(want))
			}
		}
		if r.Left() != 0 {
			rt.Fatalf("%d ids are in no document", r.Left())
		}
	})
}

// An id that is too large for the type ends no document.
func TestAppendUntilNoID(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	writeFile(t, path, []byte{1, 0, 0, 0, 2, 0, 0, 0})
	r := NewIDs(openMarked(t, path), shards.UInt32, 2)
	if got, err := r.AppendUntil(nil, 1<<32+1); err != nil || !slices.Equal(got, []uint32{1, 2}) {
		t.Errorf("got %v, %v", got, err)
	}
}

// A file that is shorter than the ids that it should have is an error with the position.
func TestIDsTruncated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	writeFile(t, path, []byte{1, 0, 2, 0, 3})
	r := NewIDs(openMarked(t, path), shards.UInt16, 3)
	got, err := r.Append(nil, 3)
	if err == nil || !strings.Contains(err.Error(), "at byte 4") || !slices.Equal(got, []uint32{1, 2}) {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestMarked(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	if _, err := OpenMarked(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	if _, err := OpenMarked(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a folder: %v", err)
	}
	writeFile(t, path, []byte("12345"))
	f := openMarked(t, path)
	if err := f.Unchanged(); err != nil || f.Size != 5 || f.Summed() {
		t.Errorf("%d bytes, with sums: %t, %v", f.Size, f.Summed(), err)
	}
	writeFile(t, path+".new", []byte("12345"))
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	if err := f.Unchanged(); err == nil || !strings.Contains(err.Error(), "was replaced while it was opened") {
		t.Errorf("a replaced file: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if f.Unchanged() == nil {
		t.Error("a removed file is unchanged")
	}
}

// arrayLayout is a layout of an array of ids, an origin for each document, and a document per
// shard.
func arrayLayout() *Layout {
	l := *files
	l.Own, l.Origins = nil, ".docs.arrow"
	l.Create = func(l *Layout, s Settings) (shards.DocumentWriter, error) {
		return l.NewWriter(s, nil, func(f *shards.FileSet) (shards.Encoder, error) {
			ids, err := f.CreateIDs("ids")
			return &arrayEncoder{ids, s.DType}, err
		})
	}
	return &l
}

type arrayEncoder struct {
	ids   *shards.IDFile
	dtype shards.DType
}

func (e *arrayEncoder) Append(tokens []uint32, _ shards.DocumentOrigin) error {
	return e.ids.Append(tokens, e.dtype)
}

func (e *arrayEncoder) Finish() error { return nil }

// A shard that NewWriter wrote has its manifest, origins and sums, and the sums reveal a flipped
// bit.
func TestWriteAndRead(t *testing.T) {
	l := arrayLayout()
	prefix := filepath.Join(t.TempDir(), "x")
	w, err := l.NewShard(prefix, shards.TokenizerInfo{VocabSize: 1 << 16, EOD: -1}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	ids := make([]uint32, 20_000) // 40,000 bytes: three blocks
	for i := range ids {
		ids[i] = uint32(i)
	}
	origins := []shards.DocumentOrigin{{ID: "a", File: "f", Line: 1}, {ID: "b", File: "f", Line: 2}}
	for i, part := range [][]uint32{ids[:9000], ids[9000:]} {
		if err := w.Append(part, origins[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	m, err := ReadManifest(prefix+".json", l.ID)
	if err != nil || m.Tokens != int64(len(ids)) || m.Documents != 2 || m.DType != shards.UInt16 {
		t.Fatalf("manifest %+v, %v", m, err)
	}
	if _, err := ReadManifest(prefix+".json", "other"); !errors.Is(err, shards.ErrCorrupt) {
		t.Errorf("the manifest of another layout: %v", err)
	}
	if m, err := ReadManifest(prefix+".none", l.ID); m != nil || err != nil {
		t.Errorf("a missing manifest: %v, %v", m, err)
	}
	read := func() ([]uint32, error) {
		f := openMarked(t, prefix+".ids")
		if err := f.OpenSums(prefix+".sums", m); err != nil || !f.Summed() {
			t.Fatalf("with sums: %t, %v", f.Summed(), err)
		}
		o, err := OpenOrigins(t.Context(), prefix+".docs.arrow", "docs.arrow", m)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		for i, want := range origins {
			next, err1 := o.Next()
			of, err2 := o.Of(int64(i))
			if next != want || of != want || err1 != nil || err2 != nil {
				t.Errorf("document %d is from %v, %v; %v, %v", i, next, of, err1, err2)
			}
		}
		got, err := NewIDs(f, m.DType, m.Tokens).Append(nil, m.Tokens)
		if err != nil {
			ends := func(yield func(int64, error) bool) { _ = yield(9000, nil) && yield(m.Tokens, nil) }
			err = f.Damage(t.Context(), err, m.DType, ends, o.Of)
		}
		return got, err
	}
	if got, err := read(); err != nil || !slices.Equal(got, ids) {
		t.Fatalf("%d ids, %v", len(got), err)
	}
	data, err := os.ReadFile(prefix + ".ids")
	if err != nil {
		t.Fatal(err)
	}
	data[39_000] ^= 4 // in document 1, after the first two blocks
	writeFile(t, prefix+".ids", data)
	_, err = read()
	var damage *shards.DamageError
	if !errors.As(err, &damage) || !slices.Equal(damage.Documents, []int64{1}) ||
		damage.Blocks[0] != (shards.ByteSpan{First: 32768, End: 40000}) || !strings.Contains(err.Error(), `"b"`) {
		t.Errorf("a flipped bit: %v", err)
	}
}

// A shard without a manifest has empty origins and no sums.
func TestBareShard(t *testing.T) {
	o, err := OpenOrigins(t.Context(), "missing", "docs.arrow", nil)
	if err != nil {
		t.Fatal(err)
	}
	next, err1 := o.Next()
	of, err2 := o.Of(7)
	if next != (shards.DocumentOrigin{}) || of != next || err1 != nil || err2 != nil || o.Close() != nil {
		t.Errorf("origins %v and %v, %v, %v", next, of, err1, err2)
	}
	path := filepath.Join(t.TempDir(), "x")
	writeFile(t, path, []byte{1, 0})
	f := openMarked(t, path)
	if err := f.OpenSums("missing", nil); err != nil || f.Summed() {
		t.Errorf("with sums: %t, %v", f.Summed(), err)
	}
}

// documents divides ids into documents. Each ends with end, except the last.
func documents(ids []uint32, end uint32) (list [][]uint32) {
	for len(ids) > 0 {
		n := slices.Index(ids, end) + 1
		if n == 0 {
			n = len(ids)
		}
		list, ids = append(list, ids[:n]), ids[n:]
	}
	return list
}
