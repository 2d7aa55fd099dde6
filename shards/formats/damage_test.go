package formats

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/atomicfile"
	"mula/shards"
	"mula/shards/datatrove"
	"mula/shards/dolma"
	"mula/shards/fms"
	"mula/shards/layout"
	"mula/shards/mds"
)

// A place is bytes that a document needs, in one of the files of ids.
type place struct {
	file       string
	first, end int
	document   int64
}

// summed lists the layouts whose ids have sums, with the data that is needed to damage them. places
// are the places of documents whose ids end in ids.
var summed = []struct {
	name           string
	layout         *layout.Layout
	options        Options
	ids, list      string // endings of the file of ids and of the list of documents, where they are bare arrays
	sums, manifest string
	places         func(t *testing.T, prefix string, width int, ends []int) []place
}{
	{"dolma", &dolma.Layout, Options{}, ".npy", ".csv.gz", ".sums", ".json", bareArray(".npy")},
	{"datatrove", &datatrove.Layout, Options{}, ".ds", ".ds.index", ".sums", ".json", bareArray(".ds")},
	{"fms", &fms.Layout, Options{}, ".arrow", "", ".sums", ".json", recordBatches},
	{"mds", &mds.Layout, Options{SizeLimit: 150_000}, "/shard.00000.mds", "", "/mula.sums", "/mula.json", samples},
	{"mds, zstd", &mds.Layout, Options{SizeLimit: 150_000, Compression: "zstd"}, "/shard.00000.mds.zstd", "",
		"/mula.sums", "/mula.json", nil},
}

func bareArray(ending string) func(*testing.T, string, int, []int) []place {
	return func(_ *testing.T, prefix string, width int, ends []int) (all []place) {
		start := 0
		for d, end := range ends {
			all = append(all, place{prefix + ending, start * width, end * width, int64(d)})
			start = end
		}
		return all
	}
}

// recordBatches takes the list at the end of an Arrow file, whose size is followed by four bytes
// and the magic.
func recordBatches(t *testing.T, prefix string, _ int, ends []int) (all []place) {
	file := prefix + ".arrow"
	data := content(t, file)
	list := len(data) - 10 - 24*len(ends)
	for d := range ends {
		at := list + 24*d
		start := int(binary.LittleEndian.Uint64(data[at:]))
		all = append(all, place{file, at, at + 24, int64(d)},
			place{file, start, start + int(binary.LittleEndian.Uint32(data[at+8:])) +
				int(binary.LittleEndian.Uint64(data[at+16:])), int64(d)})
	}
	return all
}

// samples takes the table at the beginning of each MDS file.
func samples(t *testing.T, prefix string, _ int, ends []int) (all []place) {
	d := 0
	for n := 0; d < len(ends); n++ {
		file := fmt.Sprintf("%s/shard.%05d.mds", prefix, n)
		data := content(t, file)
		for i := range int(binary.LittleEndian.Uint32(data)) {
			start, end := binary.LittleEndian.Uint32(data[4+4*i:]), binary.LittleEndian.Uint32(data[8+4*i:])
			all = append(all, place{file, 4 + 4*i, 12 + 4*i, int64(d)}, place{file, int(start), int(end), int64(d)})
			d++
		}
	}
	return all
}

func content(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// sumsOf is the file of sums of files of ids, by its description.
func sumsOf(files ...[]byte) (all []byte) {
	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	for _, ids := range files {
		part := append([]byte("MULASUMS\x01\x00\x00\x00\x00\x40\x00\x00"), binary.LittleEndian.AppendUint64(nil,
			uint64(len(ids)))...)
		for block := range slices.Chunk(ids, 1<<14) {
			part = binary.LittleEndian.AppendUint32(part, crc32.Checksum(block, castagnoli))
		}
		all = append(all, binary.LittleEndian.AppendUint32(part, crc32.Checksum(part, castagnoli))...)
	}
	return all
}

// A flipped bit names its file, its block and exactly the documents that have bytes there. Ids that
// are read before it are correct.
func TestFlippedBitNamesDocuments(t *testing.T) {
	const block = 1 << 14
	for _, l := range summed {
		for _, width := range []int{2, 4} {
			if l.layout == &fms.Layout && width == 2 {
				continue
			}
			t.Run(fmt.Sprint(l.name, width), func(t *testing.T) {
				prefix := filepath.Join(t.TempDir(), "x")
				var docs []document
				var ends []int // in ids; in a bare array the second document ends where the first block does
				random := rand.New(rand.NewPCG(1, uint64(width)))
				for d, tokens := range slices.Concat([]int{block/width - 100, 100},
					slices.Repeat([]int{700, 1, 3000, block / width, 2}, 4), []int{30000, 5}, slices.Repeat([]int{1},
						5000)) {
					ids := slices.Repeat([]uint32{uint32(d % 5000)}, tokens)
					for i := range ids { // what does not compress to nothing
						ids[i] += uint32(random.IntN(64))
					}
					docs = append(docs, document{ids, shards.DocumentOrigin{ID: fmt.Sprint("dok-", d), File: "f",
						Line: int64(d + 1)}})
					ends = append(ends, len(ids))
				}
				for d := range ends[1:] {
					ends[d+1] += ends[d]
				}
				options := l.options
				options.Width = width
				m, err := write(l.layout, prefix, testInfo, options, docs)
				if err != nil {
					t.Fatal(err)
				}
				var files []string // of ids
				for _, name := range slices.Sorted(maps.Keys(m.Files)) {
					if path := filepath.ToSlash(l.layout.FilePath(prefix, name)); strings.HasSuffix(path, l.ids) ||
						strings.Contains(path, "/shard.") {
						files = append(files, path)
					}
				}
				if l.layout == &mds.Layout && len(files) < 3 {
					t.Fatal(files)
				}
				whole := map[string][]byte{}
				var list [][]byte
				for _, file := range files {
					whole[file] = content(t, file)
					list = append(list, whole[file])
				}
				if sums, want := content(t, prefix+l.sums), sumsOf(list...); !bytes.Equal(sums, want) {
					t.Fatalf("the sums are %s, want %s", hex.EncodeToString(sums), hex.EncodeToString(want))
				}
				if got, err := read(prefix); err != nil || !same(got, docs) {
					t.Fatal("what is not damaged is not read:", err)
				}
				var places []place
				if l.places != nil {
					places = l.places(t, prefix, width, ends)
				}
				for i, file := range files {
					data := whole[file]
					end := len(data)
					flips := [][]int{{0}, {end - 1}, {end / 2, end - 2}}
					if end > 3*block {
						flips = append(flips, []int{block - 1}, []int{block}, []int{2*block + 77},
							[]int{block + 5, 2*block + 5, end - 2})
					}
					for range 6 {
						flips = append(flips, []int{random.IntN(end)})
					}
					for _, flips := range flips {
						damaged := slices.Clone(data)
						var spans []shards.ByteSpan
						named := map[int64]bool{}
						for _, at := range flips {
							damaged[at] ^= 1 << (at % 8)
							first := at / block * block
							span := shards.ByteSpan{First: int64(first), End: int64(min(first+block, end))}
							if n := len(spans); n > 0 && spans[n-1].End == span.First {
								spans[n-1].End = span.End
							} else if n == 0 || spans[n-1] != span {
								spans = append(spans, span)
							}
							for _, p := range places {
								if p.file == file && p.first < int(span.End) && p.end > first {
									named[p.document] = true
								}
							}
						}
						if err := os.WriteFile(file, damaged, 0o644); err != nil {
							t.Fatal(err)
						}
						got, failed := read(prefix)
						n := len(got)
						if !same(got, docs[:n]) {
							t.Errorf("%s, flipped %v: not what was written in the first %d", file, flips, n)
						}
						if l.places == nil { // compressed: all that is behind the damage in the file
							samples := int64(0)
							for i := range i + 1 {
								samples += samplesOf(t, prefix, i)
							}
							for d := int64(n); d < samples; d++ {
								named[d] = true
							}
						}
						var e *shards.DamageError
						if !errors.As(failed, &e) || !errors.Is(failed, shards.ErrCorrupt) {
							t.Fatalf("%s, flipped %v: %v", file, flips, failed)
						}
						want := slices.Sorted(maps.Keys(named))
						more := max(0, len(want)-1000)
						if filepath.ToSlash(e.Path) != file || !slices.Equal(e.Blocks, spans) ||
							!slices.Equal(e.Documents, want[:len(want)-more]) || e.More != int64(more) {
							t.Errorf("flipped %v: %d documents were read, then %s %v %v +%d, want %s %v %v", flips, n,
								e.Path, e.Blocks, e.Documents, e.More, file, spans, want)
						}
						if int64(n) > want[0] || l.list != "" && int64(n) < want[0] {
							t.Errorf("%s, flipped %v: %d documents were read, the first damaged one is number %d", file,
								flips, n, want[0])
						}
						if want := fmt.Sprintf(` %d ("dok-%d", f:%d)`, want[0], want[0],
							want[0]+1); !strings.Contains(failed.Error(), want) {
							t.Errorf("%v does not say %s", failed, want)
						}
					}
					if err := os.WriteFile(file, data, 0o644); err != nil {
						t.Fatal(err)
					}
				}
			})
		}
	}
}

// samplesOf is the number of samples in file n of a folder of MDS.
func samplesOf(t *testing.T, folder string, n int) int64 {
	t.Helper()
	var index struct{ Shards []struct{ Samples int64 } }
	if err := json.Unmarshal(content(t, folder+"/index.json"), &index); err != nil {
		t.Fatal(err)
	}
	return index.Shards[n].Samples
}

// Damaged sums are not taken for damaged ids; without them, or in a shard whose manifest lists
// none, ids are read as they are; without the list of documents damage is found too.
func TestDamagedSums(t *testing.T) {
	for _, l := range summed {
		prefix := filepath.Join(t.TempDir(), "x")
		info := testInfo
		docs := []document{{append(slices.Repeat([]uint32{7}, 20000), uint32(info.EOD)), shards.DocumentOrigin{ID: "a",
			File: "f", Line: 1}}}
		if _, err := write(l.layout, prefix, info, l.options, docs); err != nil {
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
		restore := set(l.sums, flip(24)) // the first block's
		if _, err := read(prefix); !errors.Is(err, shards.ErrCorrupt) || errors.As(err, &e) ||
			!strings.Contains(err.Error(), l.sums[1:]+" is damaged itself") {
			t.Errorf("%s: %v", l.name, err)
		}
		restore()
		restore = set(l.sums, func(data []byte) []byte { return data[:len(data)-1] })
		if _, err := read(prefix); !errors.Is(err, shards.ErrCorrupt) || !strings.Contains(err.Error(), l.sums[1:]) {
			t.Errorf("%s: %v", l.name, err)
		}
		restore()
		restore = set(l.ids, func(data []byte) []byte { return flip(len(data) / 2)(data) })
		if l.list != "" {
			list, err := os.ReadFile(prefix + l.list)
			if err := errors.Join(err, os.Remove(prefix+l.list)); err != nil {
				t.Fatal(err)
			}
			if _, err := read(prefix); !errors.As(err, &e) || len(e.Documents) > 0 ||
				!strings.Contains(err.Error(), "are damaged, in unknown documents") {
				t.Errorf("%s: without the list: %v", l.name, err)
			}
			if err := os.WriteFile(prefix+l.list, list, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		// The files of MDS have hashes of their own in index.json, which name no documents.
		asTheyAre := func(without string) {
			t.Helper()
			got, err := read(prefix)
			if summed := l.layout == &mds.Layout; (err != nil) != summed || errors.As(err, &e) || same(got, docs) {
				t.Errorf("%s: without %s: %v", l.name, without, err)
			}
		}
		unlisted := set(l.manifest, func(data []byte) []byte {
			var m shards.Manifest
			if err := json.Unmarshal(data, &m); err != nil {
				t.Fatal(err)
			}
			maps.DeleteFunc(m.Files, func(name string, _ shards.FileInfo) bool {
				return strings.HasSuffix(name,
					"sums")
			})
			path := filepath.Join(t.TempDir(), "x.json")
			f, err := m.Seal(atomicfile.Files{}, path)
			if err := errors.Join(err, f.Publish()); err != nil {
				t.Fatal(err)
			}
			return content(t, path)
		})
		asTheyAre("sums in the manifest")
		unlisted()
		if err := os.Remove(prefix + l.sums); err != nil {
			t.Fatal(err)
		}
		asTheyAre("the sums")
		restore()
		if got, err := read(prefix); err != nil || !same(got, docs) {
			t.Errorf("%s: without the sums: %v", l.name, err)
		}
	}
}
