package mds

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"mula/internal/filesystem"
	"mula/shards/layout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func read(folder string, h layout.Hints) (docs []string, err error) {
	r, err := open(folder, h)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for d, err := range r.All(context.Background()) {
		if err != nil {
			return docs, err
		}
		docs = append(docs, fmt.Sprint(d.Origin.ID, d.Tokens))
	}
	if r.Documents() != int64(len(docs)) {
		return docs, fmt.Errorf("%d documents were given of %d", len(docs), r.Documents())
	}
	return docs, nil
}

// put writes a folder with one file of samples of the columns id and tokens, and its index.json.
func put(t testing.TB, dir, index string, data []byte) {
	t.Helper()
	for name, content := range map[string][]byte{"index.json": []byte(index), "shard.00000.mds": data} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// fileOf is the bytes of a file with these samples, and the index.json about it; encoding is that
// of the column tokens.
func fileOf(encoding string, values ...string) (index string, data []byte) {
	limit := int64(1 << 26)
	f := file{config: config{ColumnEncodings: []string{"str", encoding}, ColumnNames: []string{"id", "tokens"},
		ColumnSizes: []*int{nil, nil}, Format: "mds",
		Hashes: []string{}, SizeLimit: &limit, Version: 2}, Samples: int64(len(values))}
	s := samples{config: f.config.text()}
	for i, v := range values {
		s.data = binary.LittleEndian.AppendUint32(s.data, 2)
		s.data = binary.LittleEndian.AppendUint32(s.data, uint32(len(v)))
		s.data = append(append(s.data, fmt.Sprint("d", i)...), v...)
		s.ends = append(s.ends, uint32(len(s.data)))
	}
	data = append(s.head(), s.data...)
	f.RawData = contents{Basename: "shard.00000.mds", Bytes: int64(len(data)), Hashes: map[string]string{}}
	return `{"shards": [` + f.text() + `], "version": 2}`, data
}

func TestReads(t *testing.T) {
	int64s := layout.Hints{DType: "int64", EOD: -1}
	for name, c := range map[string]struct {
		encoding string
		values   []string
		hints    layout.Hints
		want     string
	}{
		"bytes":         {"bytes", []string{"\x05\x00\x00\x00\x00\x00\x00\x00", ""}, int64s, "[d0[5] d1[]]"},
		"bytes of what": {"bytes", []string{"\x05\x00"}, layout.NoHints, "the type of the ids in them is unknown"},
		"half a number": {"bytes", []string{"\x05\x00\x00"}, int64s,
			"byte 204: sample 0: the column \"tokens\": 3 bytes are not a multiple of the size of int64"},
		"negative": {"bytes", []string{strings.Repeat("\xff", 8)}, int64s, "element 0 is a negative number"},
		"large":    {"bytes", []string{"\x00\x00\x00\x00\x01\x00\x00\x00"}, int64s, "element 0 is 4294967296"},
		"dynamic": {"ndarray", []string{"\x10\x04\x02\x01\x00\x02\x00", "\x21\x05\x01\x00\x07\x00\x00\x00"},
			layout.NoHints, "[d0[1 2] d1[7]]"},
		"two dimensions": {"ndarray:uint8", []string{"\x08\x02\x03abcdef"}, layout.NoHints,
			"[d0[97 98 99 100 101 102]]"},
		"shape": {"ndarray:uint16:2", []string{"\x01\x00\x02\x00"}, layout.NoHints, "[d0[1 2]]"},
		"wrong shape": {"ndarray:uint16:2", []string{"\x01\x00"}, layout.NoHints,
			"an array of 2 uint16 does not match 2 bytes"},
		"short": {"ndarray:uint16", []string{"\x04\x03\x01\x00"}, layout.NoHints,
			"the shape has more elements than the 2 bytes hold"},
		"no shape": {"ndarray:uint16", []string{""}, layout.NoHints, "an array without a shape"},
		"dimensions": {"ndarray:uint16", []string{"\xff"}, layout.NoHints,
			"an array of 63 dimensions does not fit 1 bytes"},
		"floats":           {"ndarray:float32", []string{""}, layout.NoHints, `ids cannot be "float32"`},
		"dynamic floats":   {"ndarray", []string{"\x22\x04\x01abcd"}, layout.NoHints, "element type 34"},
		"text":             {"str", []string{"x"}, layout.NoHints, `has the encoding "str"`},
		"impossible shape": {"ndarray:uint16:0", []string{""}, layout.NoHints, "with an invalid shape"},
	} {
		dir := t.TempDir()
		index, data := fileOf(c.encoding, c.values...)
		put(t, dir, index, data)
		docs, err := read(dir, c.hints)
		got := fmt.Sprint(docs)
		if err != nil {
			got = err.Error()
		}
		if got != c.want && (err == nil || !strings.Contains(got, c.want)) {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// Contradictory files are an error with the location.
func TestDamaged(t *testing.T) {
	for want, change := range map[string]func(index string, data []byte) (string, []byte){
		"bytes, ":           func(i string, d []byte) (string, []byte) { return i, d[:len(d)-1] },
		"byte 4: 3 samples": func(i string, d []byte) (string, []byte) { d[0] = 3; return i, d },
		"sample 1 has the invalid start 0": func(i string, d []byte) (string, []byte) {
			clear(d[8:12])
			return i,
				d
		},
		"sample 0 has the invalid start 1": func(i string, d []byte) (string,
			[]byte) {
			copy(d[4:], "\x01\x00\x00\x00")
			return i, d
		},
		"the samples end at byte": func(i string, d []byte) (string, []byte) { d[12]--; return i, d },
		"the column \"tokens\" has 255 bytes": func(i string, d []byte) (string, []byte) {
			d[int(binary.LittleEndian.Uint32(d[4:]))+4] = 255
			return i, d
		},
		"1 bytes follow the last column": func(string, []byte) (string, []byte) {
			i, d := fileOf("ndarray:uint16", "\x04\x01a\x00z")
			d[int(binary.LittleEndian.Uint32(d[4:]))+4]--
			return i, d
		},
		"is outside the folder": func(i string, d []byte) (string, []byte) {
			return strings.Replace(i, "shard.00000", "../shard.00000", 1), d
		},
		`no column "tokens"`: func(i string, d []byte) (string, []byte) {
			return strings.Replace(i, `"tokens"]`,
				`"ids"]`, 1), d
		},
		"want version 2": func(i string, d []byte) (string, []byte) {
			return strings.Replace(i, `], "version": 2}`, `], "version": 3}`, 1), d
		},
		"index.json: byte ": func(i string, d []byte) (string, []byte) { return i[:len(i)-1], d },
		"2 column_encodings, 1 c": func(i string, d []byte) (string, []byte) {
			return strings.Replace(i, "[null, null]",
				"[null]", 1), d
		},
		"want mds of version 2": func(i string, d []byte) (string, []byte) {
			return strings.Replace(i, `"mds"`,
				`"jsonl"`, 1), d
		},
	} {
		dir := t.TempDir()
		index, data := fileOf("ndarray:uint16", "\x04\x01a\x00", "\x04\x02a\x00b\x00")
		index, data = change(index, data)
		put(t, dir, index, data)
		if _, err := read(dir, layout.NoHints); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), dir) {
			t.Errorf("error %v does not say %q and which file", err, want)
		}
	}
}

func FuzzReader(f *testing.F) {
	for _, encoding := range []string{"ndarray:uint16", "ndarray", "bytes"} {
		index, data := fileOf(encoding, "\x04\x01a\x00", "\x10\x04\x01a\x00")
		f.Add(index, data)
	}
	f.Fuzz(func(t *testing.T, index string, data []byte) {
		dir := t.TempDir()
		put(t, dir, index, data)
		docs, err := read(dir, layout.Hints{DType: "uint16", EOD: -1})
		if err != nil && !strings.Contains(err.Error(), dir) {
			t.Errorf("an error that names no file: %v", err)
		}
		if err == nil && len(docs) > len(data) && !strings.Contains(index, "},") {
			t.Errorf("%d documents in %d bytes", len(docs), len(data))
		}
	})
}

// Only files that the folder needs stay in it.
func TestStale(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"shard.00000.mds", "shard.00001.mds", "shard.00001.mds.zstd", "shard.1.mds",
		"notes.txt"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := stale(filesystem.OS{}, dir, &encoder{list: []file{{RawData: contents{Basename: "shard.00000.mds"}}}})
	want := []string{filepath.Join(dir, "shard.00001.mds"), filepath.Join(dir, "shard.00001.mds.zstd")}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
}
