package shards

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// foreign gives the bytes of an .idx and a .bin file as Megatron's builder writes them: documents are runs of sequences of ids. It is
// written from the format's table alone, apart from the Writer, so that the two check each other.
func foreign(dtype DType, documents [][][]uint32) (idx, bin []byte) {
	le := binary.LittleEndian
	var lengths, starts, ends []byte
	sequences := uint64(0)
	ends = le.AppendUint64(ends, 0)
	for _, d := range documents {
		for _, s := range d {
			lengths = le.AppendUint32(lengths, uint32(len(s)))
			starts = le.AppendUint64(starts, uint64(len(bin)))
			for _, id := range s {
				if dtype == UInt16 {
					bin = le.AppendUint16(bin, uint16(id))
				} else {
					bin = le.AppendUint32(bin, id)
				}
			}
			sequences++
		}
		ends = le.AppendUint64(ends, sequences)
	}
	idx = append(idx, "MMIDIDX\x00\x00"...)
	idx = le.AppendUint64(idx, 1)
	idx = append(idx, byte(dtype))
	idx = le.AppendUint64(idx, sequences)
	idx = le.AppendUint64(idx, uint64(len(documents))+1)
	idx = append(append(append(idx, lengths...), starts...), ends...)
	return idx, bin
}

// place writes the two files of a shard and gives its prefix.
func place(t testing.TB, idx, bin []byte) string {
	t.Helper()
	prefix := filepath.Join(t.TempDir(), "x")
	for ext, data := range map[string][]byte{".idx": idx, ".bin": bin} {
		if err := os.WriteFile(prefix+ext, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return prefix
}

func open(t testing.TB, prefix string) *Shard {
	t.Helper()
	s, err := Open(prefix)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// Every way of looking into a shard agrees with the list of documents that it was made of, for documents of no, one or several sequences,
// empty ones among them.
func TestShardAgreesWithItsDocuments(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dtype := rapid.SampledFrom([]DType{UInt16, Int32}).Draw(t, "dtype")
		id := rapid.Uint32Range(0, uint32(dtype.limit()-1))
		documents := rapid.SliceOfN(rapid.SliceOfN(rapid.SliceOfN(id, 0, 5), 0, 3), 0, 8).Draw(t, "documents")
		idx, bin := foreign(dtype, documents)
		prefix := filepath.Join(dir, "x")
		if err := errors.Join(os.WriteFile(prefix+".idx", idx, 0o644), os.WriteFile(prefix+".bin", bin, 0o644)); err != nil {
			t.Fatal(err)
		}
		s, err := Open(prefix + rapid.SampledFrom([]string{"", ".bin", ".idx"}).Draw(t, "name"))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()

		var tokens []uint32
		var owner []int64 // of each token
		var starts []int64
		for d, sequences := range documents {
			starts = append(starts, int64(len(tokens)))
			for _, sequence := range sequences {
				for _, id := range sequence {
					tokens, owner = append(tokens, id), append(owner, int64(d))
				}
			}
		}
		starts = append(starts, int64(len(tokens)))
		if s.Prefix() != prefix || s.DType() != dtype || s.Tokens() != int64(len(tokens)) || s.Documents() != int64(len(documents)) || s.Manifest() != nil {
			t.Fatalf("opened as %s, %v, %d tokens, %d documents, manifest %v", s.Prefix(), s.DType(), s.Tokens(), s.Documents(), s.Manifest())
		}
		for d, want := range starts {
			if got := s.DocumentStart(int64(d)); got != want {
				t.Fatalf("document %d starts at token %d, want %d", d, got, want)
			}
		}
		for token, want := range owner {
			if got := s.DocumentAt(int64(token)); got != want {
				t.Fatalf("token %d is in document %d, want %d", token, got, want)
			}
		}
		if a, b := s.DocumentAt(-1), s.DocumentAt(s.Tokens()); a != -1 || b != -1 {
			t.Fatalf("tokens outside the shard are in documents %d and %d", a, b)
		}
		first := rapid.IntRange(0, len(tokens)).Draw(t, "first")
		last := rapid.IntRange(first, len(tokens)).Draw(t, "last")
		got := make([]uint32, last-first)
		if err := s.Read(got, int64(first)); err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i] != tokens[first+i] {
				t.Fatalf("token %d is %d, want %d", first+i, got[i], tokens[first+i])
			}
		}
		rest := make([]uint32, len(tokens)-first+1)
		for _, from := range []int64{-1, int64(first), s.Tokens() + 1, math.MaxInt64} {
			if err := s.Read(rest, from); err == nil {
				t.Fatalf("%d tokens from %d could be read of %d", len(rest), from, len(tokens))
			}
		}
		if _, err := s.DocumentIDs(t.Context()); !errors.Is(err, ErrNoDocuments) || !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("documents of a foreign shard: %v", err)
		}
		if err := s.Verify(t.Context(), nil); err == nil {
			t.Fatal("a shard without a manifest was verified")
		}
	})
}

// Each way in which the files can contradict themselves is refused, and the message names the file and what is wrong.
func TestOpenRefuses(t *testing.T) {
	le := binary.LittleEndian
	documents := [][][]uint32{{{1, 2, 3}}, {{}}, {{4}, {5, 6}}} // ns 4, nd 4, 6 tokens
	const lengths, starts, ends = 34, 34 + 4*4, 34 + 12*4
	tests := []struct {
		name    string
		change  func(idx, bin []byte) ([]byte, []byte)
		message string
		corrupt bool
	}{
		{"empty idx", func(idx, bin []byte) ([]byte, []byte) { return nil, bin }, "x.idx is not an MMIDIDX index", false},
		{"short header", func(idx, bin []byte) ([]byte, []byte) { return idx[:33], bin }, "it has 33 bytes, fewer than the 34 of its header", true},
		{"magic", func(idx, bin []byte) ([]byte, []byte) { idx[7] = 1; return idx, bin }, `"MMIDIDX\x01\x00"`, false},
		{"version", func(idx, bin []byte) ([]byte, []byte) { idx[9] = 2; return idx, bin }, "version 2 (byte 9)", false},
		{"float32", func(idx, bin []byte) ([]byte, []byte) { idx[17] = 7; return idx, bin }, "tokens are float32", false},
		{"int64", func(idx, bin []byte) ([]byte, []byte) { idx[17] = 5; return idx, bin }, "tokens are int64", false},
		{"unknown type", func(idx, bin []byte) ([]byte, []byte) { idx[17] = 99; return idx, bin }, "element type 99", false},
		{"huge ns", func(idx, bin []byte) ([]byte, []byte) { le.PutUint64(idx[18:], 1<<63); return idx, bin }, "need more than the file's", true},
		{"ns that wraps", func(idx, bin []byte) ([]byte, []byte) { le.PutUint64(idx[18:], math.MaxUint64/12+1); return idx, bin }, "need more", true},
		{"huge nd", func(idx, bin []byte) ([]byte, []byte) { le.PutUint64(idx[26:], 1<<61); return idx, bin }, "need more", true},
		{"nd 0", func(idx, bin []byte) ([]byte, []byte) { le.PutUint64(idx[26:], 0); return idx[:ends], bin }, "document array is empty", true},
		{"cut idx", func(idx, bin []byte) ([]byte, []byte) { return idx[:len(idx)-1], bin }, "need more", true},
		{"long idx", func(idx, bin []byte) ([]byte, []byte) { return append(idx, 0), bin }, "1 bytes follow", true},
		{"multimodal", func(idx, bin []byte) ([]byte, []byte) { return append(idx, 0, 0, 0, 0), bin }, "multimodal", false},
		{"negative length", func(idx, bin []byte) ([]byte, []byte) { le.PutUint32(idx[lengths+4:], 1<<32-1); return idx, bin }, "sequence 1 has the length -1", true},
		{"length without pointer", func(idx, bin []byte) ([]byte, []byte) { le.PutUint32(idx[lengths:], 4); return idx, bin }, "sequence 1 starts at byte 6, by the lengths before it at byte 8", true},
		{"pointer", func(idx, bin []byte) ([]byte, []byte) { idx[starts+16]++; return idx, bin }, "sequence 2 starts at byte 7", true},
		{"negative pointer", func(idx, bin []byte) ([]byte, []byte) { le.PutUint64(idx[starts:], 1<<64-2); return idx, bin }, "sequence 0 starts at byte -2", true},
		{"other type", func(idx, bin []byte) ([]byte, []byte) { idx[17] = 4; return idx, bin }, "sequence 1 starts at byte 6", true},
		{"documents start late", func(idx, bin []byte) ([]byte, []byte) { idx[ends] = 1; return idx, bin }, "entry 0 of the document array is 1", true},
		{"documents run back", func(idx, bin []byte) ([]byte, []byte) { idx[ends+8] = 3; return idx, bin }, "entry 2 of the document array is 2, after 3", true},
		{"documents end early", func(idx, bin []byte) ([]byte, []byte) { idx[ends+24] = 3; return idx, bin }, "ends at sequence 3 of 4", true},
		{"documents end late", func(idx, bin []byte) ([]byte, []byte) { idx[ends+24] = 5; return idx, bin }, "ends at sequence 5 of 4", true},
		{"cut bin", func(idx, bin []byte) ([]byte, []byte) { return idx, bin[:11] }, "x.bin: expected 12 bytes", true},
		{"empty bin", func(idx, bin []byte) ([]byte, []byte) { return idx, nil }, "found 0: it was cut short", true},
		{"long bin", func(idx, bin []byte) ([]byte, []byte) { return idx, append(bin, 0, 0) }, "found 14: it belongs to another .idx", true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			prefix := place(t, nil, nil)
			idx, bin := test.change(foreign(UInt16, documents))
			if err := errors.Join(os.WriteFile(prefix+".idx", idx, 0o644), os.WriteFile(prefix+".bin", bin, 0o644)); err != nil {
				t.Fatal(err)
			}
			s, err := Open(prefix)
			if err == nil {
				s.Close()
				t.Fatal("was opened")
			}
			if !strings.Contains(err.Error(), test.message) || !strings.Contains(err.Error(), prefix) {
				t.Errorf("error %q does not say %q", err, test.message)
			}
			if errors.Is(err, ErrCorrupt) != test.corrupt {
				t.Errorf("error %q: is ErrCorrupt %v", err, !test.corrupt)
			}
		})
	}
}

func TestOpenMissing(t *testing.T) {
	prefix := place(t, nil, nil)
	if err := os.Remove(prefix + ".idx"); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(prefix); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "never finished") {
		t.Errorf("without .idx: %v", err)
	}
	idx, _ := foreign(UInt16, nil)
	if err := errors.Join(os.WriteFile(prefix+".idx", idx, 0o644), os.Remove(prefix+".bin")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(prefix); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "x.bin") {
		t.Errorf("without .bin: %v", err)
	}
	if _, err := Open(filepath.Join(t.TempDir(), "nothing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without any file: %v", err)
	}
	if err := os.Mkdir(prefix+".bin", 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(prefix); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a directory named .bin: %v", err)
	}
}

func TestReadNegative(t *testing.T) {
	idx, bin := foreign(Int32, [][][]uint32{{{1, 2}}, {{3, 1 << 31, 5}}})
	s := open(t, place(t, idx, bin))
	err := s.Read(make([]uint32, 3), 2)
	if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "token 3 (byte 12) is -2147483648") {
		t.Errorf("got %v", err)
	}
	if err := s.Read(make([]uint32, 3), 0); err != nil {
		t.Error(err)
	}
}

func TestDocumentStartPanicsOutside(t *testing.T) {
	idx, bin := foreign(UInt16, [][][]uint32{{{1}}})
	s := open(t, place(t, idx, bin))
	for _, d := range []int64{-1, 2} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("document %d of 1 has a start", d)
				}
			}()
			s.DocumentStart(d)
		}()
	}
}

func TestDTypeFor(t *testing.T) {
	for size, want := range map[int]DType{1: UInt16, 50280: UInt16, 65499: UInt16, 65500: Int32, 65536: Int32, 100278: Int32} {
		if got := DTypeFor(size); got != want {
			t.Errorf("%d ids: %v, want %v", size, got, want)
		}
	}
}

// FuzzOpen holds what check accepts against a reading of the file that takes nothing for granted.
func FuzzOpen(f *testing.F) {
	for _, documents := range [][][][]uint32{nil, {{{}}}, {{{1, 2, 3}}, {{}}, {{4}, {5, 6}}, {}}} {
		for _, dtype := range []DType{UInt16, Int32} {
			idx, bin := foreign(dtype, documents)
			f.Add(idx, uint16(len(bin)))
		}
	}
	f.Fuzz(func(t *testing.T, idx []byte, binSize uint16) {
		s := &Shard{prefix: "x"}
		if s.check(idx, int64(binSize)) != nil {
			return
		}
		le := binary.LittleEndian
		ns, nd := int(le.Uint64(idx[18:])), int(le.Uint64(idx[26:]))
		size := int64(map[byte]int{4: 4, 8: 2}[idx[17]])
		starts := []int64{0} // of sequences, in tokens
		for i := range ns {
			starts = append(starts, starts[i]+int64(int32(le.Uint32(idx[34+4*i:]))))
		}
		if size == 0 || starts[ns]*size != int64(binSize) || s.Tokens() != starts[ns] || s.Documents() != int64(nd-1) {
			t.Fatalf("accepted: element size %d, %d tokens, .bin of %d bytes", size, starts[ns], binSize)
		}
		for d := range nd {
			if got, want := s.DocumentStart(int64(d)), starts[le.Uint64(idx[34+12*ns+8*d:])]; got != want {
				t.Fatalf("document %d starts at %d, want %d", d, got, want)
			}
		}
		for token := range s.Tokens() {
			if d := s.DocumentAt(token); s.DocumentStart(d) > token || s.DocumentStart(d+1) <= token {
				t.Fatalf("token %d is not in document %d", token, d)
			}
		}
	})
}

func BenchmarkOpen(b *testing.B) {
	documents := make([][][]uint32, 1<<20)
	for i := range documents {
		documents[i] = [][]uint32{{1, 2, 3}}
	}
	idx, bin := foreign(UInt16, documents)
	prefix := place(b, idx, bin)
	for b.Loop() {
		s, err := Open(prefix)
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(documents)), "ns/document")
}

func BenchmarkRead(b *testing.B) {
	tokens := make([]uint32, 1<<20)
	for _, dtype := range []DType{UInt16, Int32} {
		b.Run(dtype.String(), func(b *testing.B) {
			idx, bin := foreign(dtype, [][][]uint32{{tokens}})
			s := open(b, place(b, idx, bin))
			window := make([]uint32, 4097)
			b.SetBytes(int64(4 * len(window)))
			token := int64(0)
			for b.Loop() {
				if err := s.Read(window, token); err != nil {
					b.Fatal(err)
				}
				token = (token + 4096) % (1<<20 - 4097)
			}
		})
	}
}
