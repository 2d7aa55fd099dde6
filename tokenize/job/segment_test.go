package job

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/atomicfile"
	"mula/shards"
	"mula/tokenize/documents"
)

// writeSegment makes a segment of documents.
func writeSegment(t testing.TB, dir string, width int, limit int64, shuffled bool, docs []meta,
	tokens [][]uint32) string {
	t.Helper()
	path := segmentName(dir, 3, 1)
	d := &description{SegmentBytes: limit, Settings: settings{Shuffle: shuffled,
		Tokenizer: shards.TokenizerInfo{VocabSize: 1 << (8*width - 1)}}}
	w, err := createSegment(atomicfile.Files{}, path, rejectName(dir, 3, 1), d, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.abort()
	for i := range docs {
		if err := w.add(&docs[i], tokens[i]); err != nil {
			t.Fatal(err)
		}
	}
	bad := &documents.DocumentError{File: "f", Line: 3, Offset: 44, ID: "é\n", Kind: documents.Empty,
		Err: errors.New("it is empty")}
	if err := w.reject(1, 2, bad); err != nil {
		t.Fatal(err)
	}
	if err := w.finish(place{Part: 1, Within: true, Offset: 5, Lines: 6}, []totals{{Lines: 9}, {Lines: 6}},
		true); err != nil {
		t.Fatal(err)
	}
	if err := w.publish(); err != nil {
		t.Fatal(err)
	}
	return path
}

// readSegment reads all of a segment.
func readSegment(path string) (docs []meta, tokens [][]uint32, foot footer, err error) {
	s, err := openSegment(atomicfile.Files{}, path)
	if err != nil {
		return nil, nil, foot, err
	}
	defer s.close()
	return readAll(s)
}

func readAll(s *segment) (docs []meta, tokens [][]uint32, foot footer, err error) {
	var r blockReader
	for n := range s.foot.Blocks {
		if err := r.open(s, n, true); err != nil {
			return nil, nil, foot, err
		}
		for {
			more, err := r.next()
			if err != nil {
				return nil, nil, foot, err
			}
			if !more {
				break
			}
			m := r.current
			m.id = bytes.Clone(m.id)
			docs = append(docs, m)
			tokens = append(tokens, s.foot.dtype().AppendDecoded(nil, r.take()))
		}
	}
	return docs, tokens, s.foot, nil
}

// A segment is read as it was written: in the order of writing or, if shuffled, in the order of the
// keys. If any byte changes, reading fails.
func TestSegment(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		width := rapid.SampledFrom([]int{2, 4}).Draw(r, "width")
		shuffled := rapid.Bool().Draw(r, "shuffled")
		var docs []meta
		var tokens [][]uint32
		for i := range rapid.IntRange(0, 60).Draw(r, "documents") {
			ids := make([]uint32, rapid.IntRange(0, 300).Draw(r, "tokens"))
			for j := range ids {
				ids[j] = uint32(i*1000+j*7) % (1 << (8 * min(width, 3)))
			}
			m := meta{tokens: int64(len(ids)), part: i / 10, line: int64(i), offset: int64(i) << 33, text: 7,
				ordinal: int64(i)}
			m.id = []byte(rapid.StringN(0, 9, 20).Draw(r, "id"))
			if shuffled {
				m.key = draw(1, 0, int64(rapid.IntRange(0, 20).Draw(r, "key")))
			}
			docs, tokens = append(docs, m), append(tokens, ids)
		}
		path := writeSegment(t, dir, width, rapid.SampledFrom([]int64{1, 500, 1 << 20}).Draw(r, "limit"), shuffled,
			docs, tokens)
		gotDocs, gotTokens, foot, err := readSegment(path)
		if err != nil {
			r.Fatal(err)
		}
		order := make([]int, len(docs))
		for i := range order {
			order[i] = i
		}
		slices.SortStableFunc(order, func(a, b int) int {
			return compareKeys(docs[a].key, docs[a].part, docs[a].offset, docs[b].key, docs[b].part, docs[b].offset)
		})
		if len(gotDocs) != len(docs) {
			r.Fatalf("%d documents, want %d", len(gotDocs), len(docs))
		}
		for i, n := range order {
			if fmt.Sprint(gotDocs[i]) != fmt.Sprint(docs[n]) || !slices.Equal(gotTokens[i], tokens[n]) {
				r.Fatalf("document %d is %v with %v, want %v with %v", i, gotDocs[i], gotTokens[i], docs[n], tokens[n])
			}
		}
		if !foot.Last || foot.Next != (place{1, true, 5, 6}) || len(foot.Parts) != 2 || foot.Rejects != 1 {
			r.Fatalf("footer %+v", foot)
		}
		var got []rejected
		if err := readRejects(atomicfile.Files{}, rejectName(dir, 3, 1), footerRejects{foot.Rejects, foot.RejectsSum},
			func(bad *rejected) error { got = append(got, *bad); return nil }); err != nil {
			r.Fatal(err)
		}
		if want := []rejected{{1, 2, 3, 44, "é\n", documents.Empty, "it is empty"}}; !slices.Equal(got, want) {
			r.Fatalf("rejects %+v", got)
		}
		for _, path := range []string{path, rejectName(dir, 3, 1)} {
			data, err := os.ReadFile(path)
			if err != nil {
				r.Fatal(err)
			}
			data[rapid.IntRange(0, len(data)-1).Draw(r, "byte")] ^= byte(rapid.IntRange(1, 255).Draw(r, "flip"))
			if err := os.WriteFile(path, data, 0o644); err != nil {
				r.Fatal(err)
			}
		}
		if _, _, _, err := readSegment(path); !errors.Is(err, errDamaged) {
			r.Fatalf("a changed byte: %v", err)
		}
		if err := readRejects(atomicfile.Files{}, rejectName(dir, 3, 1), footerRejects{foot.Rejects, foot.RejectsSum},
			func(*rejected) error { return nil }); !errors.Is(err, errDamaged) {
			r.Fatalf("a changed byte of the rejects: %v", err)
		}
	})
}

// Whatever the bytes, a segment is read or refused as damaged; sums that are right lead the fuzzer
// past them.
func FuzzSegment(f *testing.F) {
	dir := f.TempDir()
	ids := [][]uint32{{1, 2, 3}, {}, {70000}}
	for _, shuffled := range []bool{false, true} {
		path := writeSegment(f, dir, 4, 10, shuffled, []meta{{part: 0, line: 1, id: []byte("a"), key: 5},
			{part: 1, line: 2, key: 3}, {part: 1, line: 3, offset: 9}}, ids)
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
		f.Add(data[:len(data)/2])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if n := len(data); n > segmentTrailer { // a footer with invalid values
			size := int(binary.LittleEndian.Uint32(data[n-segmentTrailer:]))
			if end := n - segmentTrailer; size <= end {
				data = bytes.Clone(data)
				binary.LittleEndian.PutUint32(data[n-segmentTrailer+4:], crc32.Checksum(data[end-size:end], castagnoli))
			}
		}
		s, err := newSegment("s", inMemory{bytes.NewReader(data)}, int64(len(data)))
		if err == nil {
			_, _, _, err = readAll(s)
		}
		if err != nil && !errors.Is(err, errDamaged) {
			t.Error(err)
		}
	})
}

type inMemory struct{ *bytes.Reader }

func (inMemory) Close() error { return nil }

// BenchmarkReadSegment measures the step between segments and shards: reading ids in the order of
// the inputs, with their sums checked.
func BenchmarkReadSegment(b *testing.B) {
	var docs []meta
	var tokens [][]uint32
	for i := range 20_000 {
		docs = append(docs, meta{line: int64(i), offset: int64(i) * 3000, id: []byte("0123456789abcdef")})
		tokens = append(tokens, make([]uint32, 700))
	}
	path := writeSegment(b, b.TempDir(), 2, 64<<20, false, docs, tokens)
	s, err := openSegment(atomicfile.Files{}, path)
	if err != nil {
		b.Fatal(err)
	}
	defer s.close()
	b.SetBytes(2 * s.foot.Tokens)
	b.ReportAllocs()
	var r blockReader
	var ids []uint32
	for b.Loop() {
		for n := range s.foot.Blocks {
			if err := r.open(s, n, true); err != nil {
				b.Fatal(err)
			}
			for {
				more, err := r.next()
				if err != nil {
					b.Fatal(err)
				}
				if !more {
					break
				}
				ids = s.foot.dtype().AppendDecoded(ids[:0], r.take())
			}
		}
	}
}
