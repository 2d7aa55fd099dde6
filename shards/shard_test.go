package shards

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mula/internal/blockcache"
	"mula/internal/objects"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(withCache{m}) }

// withCache runs the tests with a temporary cache of remote files.
type withCache struct{ tests *testing.M }

func (m withCache) Run() int {
	dir, err := os.MkdirTemp("", "mula-test")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	os.Setenv(blockcache.FolderVariable, dir)
	return m.tests.Run()
}

// foreign gives the bytes of an .idx and a .bin file as Megatron's builder writes them: documents
// are runs of sequences of ids. It is written from the format's table alone, apart from the Writer,
// so that the two check each other.
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
	idx = append(idx, dtype.Code())
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

// Every way of looking into a shard agrees with the list of documents that it was made of, for
// documents of no, one or several sequences, empty ones among them.
func TestShardAgreesWithItsDocuments(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dtype := rapid.SampledFrom([]DType{UInt16, Int32}).Draw(t, "dtype")
		id := rapid.Uint32Range(0, uint32(dtype.IDs()-1))
		documents := rapid.SliceOfN(rapid.SliceOfN(rapid.SliceOfN(id, 0, 5), 0, 3), 0, 8).Draw(t, "documents")
		idx, bin := foreign(dtype, documents)
		prefix := filepath.Join(dir, "x")
		if err := errors.Join(os.WriteFile(prefix+".idx", idx, 0o644), os.WriteFile(prefix+".bin", bin,
			0o644)); err != nil {
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
		if s.Prefix() != prefix || s.DType() != dtype || s.Tokens() != int64(len(tokens)) ||
			s.Documents() != int64(len(documents)) || s.Manifest() != nil {
			t.Fatalf("opened as %s, %v, %d tokens, %d documents, manifest %v", s.Prefix(), s.DType(), s.Tokens(),
				s.Documents(), s.Manifest())
		}
		for d, want := range starts {
			if got, err := s.DocumentStart(int64(d)); got != want || err != nil {
				t.Fatalf("document %d starts at token %d, %v, want %d", d, got, err, want)
			}
		}
		for token, want := range owner {
			if got, err := s.DocumentAt(int64(token)); got != want || err != nil {
				t.Fatalf("token %d is in document %d, %v, want %d", token, got, err, want)
			}
		}
		for _, token := range []int64{-1, s.Tokens(), math.MaxInt64} {
			if d, err := s.DocumentAt(token); d != -1 || err != nil {
				t.Fatalf("token %d, outside the shard, is in document %d, %v", token, d, err)
			}
		}
		if err := s.Check(t.Context()); err != nil {
			t.Fatal(err)
		}
		first := rapid.IntRange(0, len(tokens)).Draw(t, "first")
		last := rapid.IntRange(first, len(tokens)).Draw(t, "last")
		want := []Span{}
		for _, d := range slices.Compact(slices.Clone(owner[first:last])) {
			want = append(want, Span{d, starts[d], starts[d+1]})
		}
		spans := []Span{}
		for span, err := range s.Spans(int64(first), int64(last)) {
			if err != nil {
				t.Fatal(err)
			}
			spans = append(spans, span)
		}
		if !slices.Equal(spans, want) {
			t.Fatalf("tokens [%d, %d) are of documents %v, want %v", first, last, spans, want)
		}
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

// Each way in which the files can contradict themselves is refused, by Open or, where it is in the
// middle of an array, by Check; the message names the file and what is wrong.
func TestOpenRefuses(t *testing.T) {
	le := binary.LittleEndian
	documents := [][][]uint32{{{1, 2, 3}}, {{}}, {{4}, {5, 6}}} // ns 4, nd 4, 6 tokens
	const lengths, starts, ends = 34, 34 + 4*4, 34 + 12*4
	const inOpen, inCheck = false, true
	tests := []struct {
		name    string
		change  func(idx, bin []byte) ([]byte, []byte)
		message string
		corrupt bool
		by      bool
	}{
		{"empty idx", func(idx, bin []byte) ([]byte, []byte) { return nil, bin }, "x.idx is not an MMIDIDX index",
			false, inOpen},
		{"short header", func(idx, bin []byte) ([]byte, []byte) { return idx[:33], bin },
			"33 bytes, but the header has 34", true, inOpen},
		{"magic", func(idx, bin []byte) ([]byte, []byte) { idx[7] = 1; return idx, bin }, `"MMIDIDX\x01\x00"`, false,
			inOpen},
		{"version", func(idx, bin []byte) ([]byte, []byte) { idx[9] = 2; return idx, bin }, "version 2 (byte 9)", false,
			inOpen},
		{"float32", func(idx, bin []byte) ([]byte, []byte) { idx[17] = 7; return idx, bin }, "tokens have type float32",
			false, inOpen},
		{"int64", func(idx, bin []byte) ([]byte, []byte) { idx[17] = 5; return idx, bin }, "tokens have type int64",
			false,
			inOpen},
		{"unknown type", func(idx, bin []byte) ([]byte, []byte) { idx[17] = 99; return idx, bin }, "element type 99",
			false, inOpen},
		{"huge ns", func(idx, bin []byte) ([]byte, []byte) { le.PutUint64(idx[18:], 1<<63); return idx, bin },
			"need more than the file's", true, inOpen},
		{"ns that wraps", func(idx, bin []byte) ([]byte, []byte) {
			le.PutUint64(idx[18:],
				math.MaxUint64/12+1)
			return idx, bin
		}, "need more", true, inOpen},
		{"huge nd", func(idx, bin []byte) ([]byte, []byte) { le.PutUint64(idx[26:], 1<<61); return idx, bin },
			"need more", true, inOpen},
		{"nd 0", func(idx, bin []byte) ([]byte, []byte) { le.PutUint64(idx[26:], 0); return idx[:ends], bin },
			"document array is empty", true, inOpen},
		{"cut idx", func(idx, bin []byte) ([]byte, []byte) { return idx[:len(idx)-1], bin }, "need more", true, inOpen},
		{"long idx", func(idx, bin []byte) ([]byte, []byte) { return append(idx, 0), bin }, "1 bytes follow", true,
			inOpen},
		{"multimodal", func(idx, bin []byte) ([]byte, []byte) { return append(idx, 0, 0, 0, 0), bin }, "multimodal",
			false, inOpen},
		{"negative length", func(idx, bin []byte) ([]byte, []byte) {
			le.PutUint32(idx[lengths+4:], 1<<32-1)
			return idx,
				bin
		}, "sequence 1 has the length -1", true, inCheck},
		{"length without pointer", func(idx, bin []byte) ([]byte, []byte) {
			le.PutUint32(idx[lengths:], 4)
			return idx,
				bin
		}, "sequence 1 starts at byte 6, but by the lengths before it at byte 8", true, inCheck},
		{"pointer", func(idx, bin []byte) ([]byte, []byte) { idx[starts+16]++; return idx, bin },
			"sequence 2 starts at byte 7", true, inCheck},
		{"negative pointer", func(idx, bin []byte) ([]byte, []byte) {
			le.PutUint64(idx[starts:], 1<<64-2)
			return idx,
				bin
		}, "sequence 0 starts at byte -2", true, inOpen},
		{"other type", func(idx, bin []byte) ([]byte, []byte) { idx[17] = 4; return idx, bin },
			"x.bin: expected 16 bytes", true, inOpen},
		{"documents start late", func(idx, bin []byte) ([]byte, []byte) { idx[ends] = 1; return idx, bin },
			"entry 0 of the document array is 1", true, inOpen},
		{"documents run back", func(idx, bin []byte) ([]byte, []byte) { idx[ends+8] = 3; return idx, bin },
			"entry 2 of the document array is 2, after 3", true, inCheck},
		{"documents end early", func(idx, bin []byte) ([]byte, []byte) { idx[ends+24] = 3; return idx, bin },
			"ends at sequence 3 of 4", true, inOpen},
		{"last length", func(idx, bin []byte) ([]byte, []byte) {
			le.PutUint32(idx[lengths+12:], 1<<32-1)
			return idx,
				bin
		}, "sequence 3 has the length -1", true, inOpen},
		{"last pointer", func(idx, bin []byte) ([]byte, []byte) { idx[starts+24]++; return idx, bin },
			"sequence 3 starts at byte 9, not a valid offset", true, inOpen},
		{"last pointer far", func(idx, bin []byte) ([]byte, []byte) {
			le.PutUint64(idx[starts+24:],
				1<<63-2)
			return idx, bin
		}, "not a valid offset", true, inOpen},
		{"lengths beyond 2^63", func(idx, bin []byte) ([]byte, []byte) {
			le.PutUint64(idx[starts+16:],
				1<<63-2)
			return idx, bin
		}, "sequence 2 starts at byte 9223372036854775806", true, inCheck},
		{"documents beyond", func(idx, bin []byte) ([]byte, []byte) { idx[ends+8] = 9; return idx, bin },
			"entry 1 of the document array is 9", true, inCheck},
		{"documents end late", func(idx, bin []byte) ([]byte, []byte) { idx[ends+24] = 5; return idx, bin },
			"ends at sequence 5 of 4", true, inOpen},
		{"cut bin", func(idx, bin []byte) ([]byte, []byte) { return idx, bin[:11] }, "x.bin: expected 12 bytes", true,
			inOpen},
		{"empty bin", func(idx, bin []byte) ([]byte, []byte) { return idx, nil }, "found 0: it was cut short", true,
			inOpen},
		{"long bin", func(idx, bin []byte) ([]byte, []byte) { return idx, append(bin, 0, 0) },
			"found 14: it belongs to another .idx", true, inOpen},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			prefix := place(t, nil, nil)
			idx, bin := test.change(foreign(UInt16, documents))
			if err := errors.Join(os.WriteFile(prefix+".idx", idx, 0o644), os.WriteFile(prefix+".bin", bin,
				0o644)); err != nil {
				t.Fatal(err)
			}
			s, err := Open(prefix)
			if (err == nil) != (test.by == inCheck) {
				t.Fatalf("opened: %v", err)
			}
			if err == nil {
				defer s.Close()
				if err = s.Check(t.Context()); err == nil {
					t.Fatal("nothing was found")
				}
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

func TestDocumentStartOutside(t *testing.T) {
	idx, bin := foreign(UInt16, [][][]uint32{{{1}}})
	s := open(t, place(t, idx, bin))
	for _, d := range []int64{-1, 2, math.MaxInt64} {
		if start, err := s.DocumentStart(d); err == nil || errors.Is(err, ErrCorrupt) {
			t.Errorf("document %d of 1 starts at %d, %v", d, start, err)
		}
	}
}

func TestDTypeFor(t *testing.T) {
	for size, want := range map[int]DType{1: UInt16, 50280: UInt16, 65499: UInt16, 65500: Int32, 65536: Int32,
		100278: Int32} {
		if got := DTypeFor(size); got != want {
			t.Errorf("%d ids: %v, want %v", size, got, want)
		}
	}
}

// FuzzOpen looks into whatever Open accepts in every way there is. None may panic or run for ever,
// and what Check passes as well must be as a reading of the file says that takes nothing for
// granted.
func FuzzOpen(f *testing.F) {
	le := binary.LittleEndian
	for _, documents := range [][][][]uint32{nil, {{{}}}, {{{1, 2, 3}}, {{}}, {{4}, {5, 6}}, {}, {{7}}}} {
		for _, dtype := range []DType{UInt16, Int32} {
			idx, bin := foreign(dtype, documents)
			f.Add(idx, uint16(len(bin)))
			if ns := len(documents); ns == 5 { // wrong in the middle, where Open does not look
				for _, at := range []int{34 + 4, 34 + 4*5 + 8, 34 + 4*5 + 16, 34 + 12*5 + 8, 34 + 12*5 + 16} {
					wrong := slices.Clone(idx)
					wrong[at] ^= 3
					f.Add(wrong, uint16(len(bin)))
				}
			}
		}
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, idx []byte, binSize uint16) {
		prefix := filepath.Join(dir, "x")
		if err := errors.Join(os.WriteFile(prefix+".idx", idx, 0o644),
			os.WriteFile(prefix+".bin", make([]byte, binSize), 0o644)); err != nil {
			t.Fatal(err)
		}
		if x, err := OpenIndex(prefix); err == nil {
			if int64(len(x.Lengths())) != 4*x.Sequences() || x.Size() != int64(len(idx)) || x.DType().Size() == 0 {
				t.Fatalf("%d sequences with %d bytes of lengths", x.Sequences(), len(x.Lengths()))
			}
			x.Check(t.Context())
			x.Close()
		}
		s, err := Open(prefix)
		if err != nil {
			return
		}
		defer s.Close()
		whole := s.Check(t.Context()) == nil
		ns, nd := int(le.Uint64(idx[18:])), int(le.Uint64(idx[26:]))
		size := int64(map[byte]int{4: 4, 8: 2}[idx[17]])
		starts := []int64{0} // of sequences, in tokens
		for i := range ns {
			starts = append(starts, starts[i]+int64(int32(le.Uint32(idx[34+4*i:]))))
		}
		if size == 0 || s.Tokens()*size != int64(binSize) || s.Documents() != int64(nd-1) ||
			whole && s.Tokens() != starts[ns] {
			t.Fatalf("accepted: element size %d, %d tokens, .bin of %d bytes", size, s.Tokens(), binSize)
		}
		for d := range nd {
			got, err := s.DocumentStart(int64(d))
			if err == nil && (got < 0 || got > s.Tokens()) || err != nil && (whole || !errors.Is(err, ErrCorrupt)) {
				t.Fatalf("document %d starts at %d, %v", d, got, err)
			}
			if whole && got != starts[le.Uint64(idx[34+12*ns+8*d:])] {
				t.Fatalf("document %d starts at %d", d, got)
			}
		}
		step := max(1, s.Tokens()/64)
		for token := int64(0); token < s.Tokens(); token += step {
			d, err := s.DocumentAt(token)
			if err != nil && (whole || !errors.Is(err, ErrCorrupt)) {
				t.Fatal(err)
			}
			if whole {
				first, _ := s.DocumentStart(d)
				if end, _ := s.DocumentStart(d + 1); first > token || end <= token {
					t.Fatalf("token %d is not in document %d", token, d)
				}
			}
		}
		at, last := int64(0), int64(-1)
		for span, err := range s.Spans(0, math.MaxInt64) {
			if err != nil {
				if whole || !errors.Is(err, ErrCorrupt) {
					t.Fatal(err)
				}
				at = s.Tokens()
				break
			}
			if span.First > at || span.End <= at || whole && (span.First != at || span.Document <= last) {
				t.Fatalf("token %d is in document %d, which has [%d, %d)", at, span.Document, span.First, span.End)
			}
			at, last = span.End, span.Document
		}
		if at != s.Tokens() {
			t.Fatalf("the documents end at token %d of %d", at, s.Tokens())
		}
		if err := s.Read(make([]uint32, s.Tokens()), 0); err != nil {
			t.Fatal(err)
		}
	})
}

// uneven makes n documents of each kind of lengths: equal, of all sizes, growing, with one document
// that has almost all tokens, and with empty documents between.
func uneven(n int) map[string][][][]uint32 {
	random := rand.New(rand.NewPCG(1, 2))
	kinds := map[string]func(i int) int{
		"alike":     func(int) int { return 7 },
		"lognormal": func(int) int { return int(math.Exp(3 + 1.1*random.NormFloat64())) },
		"growing":   func(i int) int { return i * i * 60 / (n * n) },
		"falling":   func(i int) int { return (n - i) * (n - i) * 60 / (n * n) },
		"one":       func(i int) int { return 1 + i/(n-1)*20*n },
		"empty":     func(i int) int { return i % 11 / 10 * 50 },
	}
	all := make(map[string][][][]uint32)
	for name, length := range kinds {
		for i := range n {
			all[name] = append(all[name], [][]uint32{make([]uint32, length(i))})
		}
	}
	return all
}

// The document of every token is found, however lengths are distributed.
func TestDocumentAtUneven(t *testing.T) {
	for name, documents := range uneven(3000) {
		idx, bin := foreign(UInt16, documents)
		s := open(t, place(t, idx, bin))
		token := int64(0)
		for d, sequences := range documents {
			for range sequences[0] {
				if got, err := s.DocumentAt(token); got != int64(d) || err != nil {
					t.Fatalf("%s: token %d is in document %d, %v, want %d", name, token, got, err, d)
				}
				token++
			}
		}
	}
}

func BenchmarkDocumentAt(b *testing.B) {
	for name, documents := range uneven(1 << 17) {
		b.Run(name, func(b *testing.B) {
			idx, bin := foreign(UInt16, documents)
			s := open(b, place(b, idx, bin))
			random := rand.New(rand.NewPCG(3, 4))
			for b.Loop() {
				if _, err := s.DocumentAt(random.Int64N(s.Tokens())); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
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
}

func BenchmarkRead(b *testing.B) {
	tokens := make([]uint32, 1<<20)
	for _, dtype := range []DType{UInt16, Int32} {
		b.Run(string(dtype), func(b *testing.B) {
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

// Blocks of an object are used again only if its version is known to be the same.
func TestIdentity(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		a, b objects.Info
		same bool
	}{
		{objects.Info{Size: 1, Version: "v"}, objects.Info{Size: 1, Version: "v", Modified: at}, true},
		{objects.Info{Size: 1, Version: "v"}, objects.Info{Size: 1, Version: "w"}, false},
		{objects.Info{Size: 1, Version: "v"}, objects.Info{Size: 2, Version: "v"}, false},
		{objects.Info{Size: 1, Modified: at}, objects.Info{Size: 1, Modified: at}, true},
		{objects.Info{Size: 1, Modified: at}, objects.Info{Size: 1, Modified: at.Add(time.Second)}, false},
		{objects.Info{Size: 1}, objects.Info{Size: 1}, false},
	} {
		if same := identity("u", c.a) == identity("u", c.b); same != c.same {
			t.Errorf("%+v, %+v: the same: %v", c.a, c.b, same)
		}
	}
	if identity("u", objects.Info{Version: "v"}) == identity("v", objects.Info{Version: "v"}) {
		t.Error("two objects have the same identity")
	}
}
