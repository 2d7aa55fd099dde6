package formats

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/shards"
	"mula/shards/layout"
)

// bareArrays are the layouts whose ids have x.sums, with the ending of the ids and of the list of documents.
var bareArrays = []struct {
	layout    shards.Layout
	ids, list string
}{{shards.Dolma, ".npy", ".csv.gz"}, {shards.Datatrove, ".ds", ".ds.index"}}

// A flipped bit names its block and exactly the documents that have tokens there; those before the block are read.
func TestFlippedBitNamesDocuments(t *testing.T) {
	const block = 1 << 14
	for _, l := range bareArrays {
		for _, width := range []int{2, 4} {
			t.Run(fmt.Sprint(Name(l.layout), width), func(t *testing.T) {
				prefix := filepath.Join(quickDir(t), "x")
				var docs []document
				var ends []int // in bytes; the second document ends where the first block does
				end := 0
				for d, tokens := range slices.Concat([]int{block/width - 100, 100}, slices.Repeat([]int{700, 1, 3000, block / width, 2}, 4), []int{30000, 5}) {
					docs = append(docs, document{slices.Repeat([]uint32{uint32(d)}, tokens), shards.DocumentOrigin{ID: fmt.Sprint("dok-", d), File: "f", Line: int64(d + 1)}})
					end += tokens * width
					ends = append(ends, end)
				}
				if _, err := write(l.layout, prefix, testInfo, Options{Width: width}, docs); err != nil {
					t.Fatal(err)
				}
				whole, err := os.ReadFile(prefix + l.ids)
				if err != nil || len(whole) != end {
					t.Fatal(len(whole), err)
				}
				sums, err := os.ReadFile(prefix + ".sums")
				if err != nil {
					t.Fatal(err)
				}
				castagnoli := crc32.MakeTable(crc32.Castagnoli)
				want := append([]byte("MULASUMS\x01\x00\x00\x00\x00\x40\x00\x00"), binary.LittleEndian.AppendUint64(nil, uint64(end))...)
				for part := range slices.Chunk(whole, block) {
					want = binary.LittleEndian.AppendUint32(want, crc32.Checksum(part, castagnoli))
				}
				if want = binary.LittleEndian.AppendUint32(want, crc32.Checksum(want, castagnoli)); !bytes.Equal(sums, want) {
					t.Fatalf("x.sums is %s, want %s", hex.EncodeToString(sums), hex.EncodeToString(want))
				}
				for _, flips := range [][]int{{0}, {block - 1}, {block}, {3*block + 77}, {end - 1}, {block + 5, 2*block + 5, end - 2}} {
					damaged := slices.Clone(whole)
					var spans []shards.ByteSpan
					var named []int64
					for _, at := range flips {
						damaged[at] ^= 1 << (at % 8)
						first := at / block * block
						span := shards.ByteSpan{First: int64(first), End: int64(min(first+block, end))}
						if n := len(spans); n > 0 && spans[n-1].End == span.First {
							spans[n-1].End = span.End
						} else {
							spans = append(spans, span)
						}
						for d := range docs {
							if ends[d]-len(docs[d].Tokens)*width < int(span.End) && ends[d] > first && !slices.Contains(named, int64(d)) {
								named = append(named, int64(d))
							}
						}
					}
					if err := os.WriteFile(prefix+l.ids, damaged, 0o644); err != nil {
						t.Fatal(err)
					}
					r, err := Open(prefix, layout.NoHints)
					if err != nil {
						t.Fatal(err)
					}
					n, failed := 0, error(nil)
					for doc, err := range r.All(t.Context()) {
						if failed = err; err != nil {
							break
						}
						if !slices.Equal(doc.Tokens, docs[n].Tokens) {
							t.Errorf("flipped %v: document %d is not what was written", flips, n)
						}
						n++
					}
					if err := r.Close(); err != nil {
						t.Error(err)
					}
					var e *shards.DamageError
					if !errors.As(failed, &e) || !errors.Is(failed, shards.ErrCorrupt) {
						t.Fatalf("flipped %v: %v", flips, failed)
					}
					if e.Path != prefix+l.ids || !slices.Equal(e.Blocks, spans) || !slices.Equal(e.Documents, named) || e.More != 0 || n != int(named[0]) {
						t.Errorf("flipped %v: %d documents were read, then %s %v %v, want %v %v", flips, n, e.Path, e.Blocks, e.Documents, spans, named)
					}
					if want := fmt.Sprintf(`number %d ("dok-%d", f:%d)`, named[0], named[0], named[0]+1); !strings.Contains(failed.Error(), want) {
						t.Errorf("%v does not say %s", failed, want)
					}
				}
			})
		}
	}
}

// Damaged sums are not taken for damaged ids; without them, or in a shard whose manifest lists none, ids are read as they are; without the list of
// documents damage is found too.
func TestDamagedSums(t *testing.T) {
	for _, l := range bareArrays {
		prefix := filepath.Join(quickDir(t), "x")
		info := testInfo
		docs := []document{{append(slices.Repeat([]uint32{7}, 20000), uint32(info.EOD)), shards.DocumentOrigin{ID: "a", File: "f", Line: 1}}}
		if _, err := write(l.layout, prefix, info, Options{}, docs); err != nil {
			t.Fatal(err)
		}
		set := func(ending string, change func([]byte) []byte) (restore func()) {
			t.Helper()
			was, err := os.ReadFile(prefix + ending)
			if err == nil {
				err = os.WriteFile(prefix+ending, change(slices.Clone(was)), 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
			return func() {
				if err := os.WriteFile(prefix+ending, was, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		flip := func(at int) func([]byte) []byte {
			return func(data []byte) []byte { data[at] ^= 1; return data }
		}
		var e *shards.DamageError
		restore := set(".sums", flip(24)) // the first block's
		if _, err := read(prefix); !errors.Is(err, shards.ErrCorrupt) || errors.As(err, &e) || !strings.Contains(err.Error(), "x.sums is damaged itself") {
			t.Errorf("%s: %v", Name(l.layout), err)
		}
		restore()
		restore = set(".sums", func(data []byte) []byte { return data[:len(data)-1] })
		if _, err := read(prefix); !errors.Is(err, shards.ErrCorrupt) || !strings.Contains(err.Error(), "x.sums") {
			t.Errorf("%s: %v", Name(l.layout), err)
		}
		restore()
		restore = set(l.ids, flip(3))
		list, err := os.ReadFile(prefix + l.list)
		if err := errors.Join(err, os.Remove(prefix+l.list)); err != nil {
			t.Fatal(err)
		}
		if _, err := read(prefix); !errors.As(err, &e) || len(e.Documents) > 0 || !strings.Contains(err.Error(), "bytes 0 to 16383 are damaged, in documents that cannot be told") {
			t.Errorf("%s: without the list: %v", Name(l.layout), err)
		}
		if err := os.WriteFile(prefix+l.list, list, 0o644); err != nil {
			t.Fatal(err)
		}
		unlisted := set(".json", func(data []byte) []byte { return bytes.ReplaceAll(data, []byte(`"sums"`), []byte(`"other"`)) })
		if got, err := read(prefix); err != nil || same(got, docs) {
			t.Errorf("%s: a manifest without sums: %v", Name(l.layout), err)
		}
		unlisted()
		if err := os.Remove(prefix + ".sums"); err != nil {
			t.Fatal(err)
		}
		if got, err := read(prefix); err != nil || same(got, docs) {
			t.Errorf("%s: without x.sums: %v", Name(l.layout), err)
		}
		restore()
	}
}
