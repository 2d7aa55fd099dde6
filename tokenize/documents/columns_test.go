package documents

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
	"github.com/pierrec/lz4/v4"
	"go.uber.org/goleak"

	"mula/internal/longtest"
)

// A columnFile is a file that pyarrow wrote, and what is in it. See testdata/columns.py.
type columnFile struct {
	Name, Text, ID string
	File           []byte
	Documents      [][2]any // the text, -1 for null, and the id
}

func columnFiles(t testing.TB) (files []columnFile) {
	t.Helper()
	data, err := os.ReadFile("testdata/columns.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &files); err != nil {
		t.Fatal(err)
	}
	return files
}

// want writes down the documents as seen does.
func (f columnFile) want() (lines []string) {
	for row, d := range f.Documents {
		switch text := d[0].(type) {
		case string:
			if text == "" {
				lines = append(lines, fmt.Sprintf("%d empty document %s", row, d[1]))
			} else {
				lines = append(lines, fmt.Sprintf("%d %s %q", row, d[1], text))
			}
		default:
			lines = append(lines, fmt.Sprintf("%d no text %s", row, d[1]))
		}
	}
	return lines
}

// seen writes down what the pieces of an input give, by their offsets; the last line is an error
// that ended it.
func seen(t testing.TB, path string, o Options, target int64) (lines []string) {
	t.Helper()
	pieces, err := Pieces(t.Context(), []string{path}, o, target)
	if err != nil {
		return []string{err.Error()}
	}
	for _, p := range pieces {
		some, err := seenPiece(t, p, o)
		if lines = append(lines, some...); err != nil {
			return append(lines, err.Error())
		}
	}
	return lines
}

func seenPiece(t testing.TB, p Piece, o Options) (lines []string, _ error) {
	t.Helper()
	r, err := Open(t.Context(), p, o)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for {
		doc, err := r.Next()
		var bad *DocumentError
		switch {
		case err == nil:
			lines = append(lines, fmt.Sprintf("%d %s %q", doc.Offset, doc.ID, doc.Text))
		case err == io.EOF:
			return lines, nil
		case errors.As(err, &bad) && bad.Kind != BadStream:
			lines = append(lines, fmt.Sprintf("%d %v %s", bad.Offset, bad.Kind, bad.ID))
		default:
			return lines, err
		}
	}
}

func TestColumnFiles(t *testing.T) {
	defer goleak.VerifyNone(t)
	files := columnFiles(t)
	if len(files) < 30 {
		t.Fatalf("%d files", len(files))
	}
	for _, f := range files {
		path := put(t, f.Name, string(f.File))
		o := Options{Text: f.Text, ID: f.ID}
		for _, target := range []int64{1, 300, 1 << 40} {
			if got := seen(t, path, o, target); !slices.Equal(got, f.want()) {
				t.Errorf("%s, pieces of %d bytes:\n%s\nwant\n%s", f.Name, target, strings.Join(got, "\n"),
					strings.Join(f.want(), "\n"))
			}
		}
		pieces, err := Pieces(t.Context(), []string{path}, o, 1)
		if err != nil {
			t.Fatal(err)
		}
		stream := f.File[0] == 0xff
		if want := 3; len(pieces) != want && !stream {
			t.Errorf("%s: %d pieces, want %d", f.Name, len(pieces), want)
		}
		if !strings.HasSuffix(f.Name, ".arrow") {
			continue
		}
		// An Arrow file is read from a pipe and out of a compressed file as well.
		o.Stdin = bytes.NewReader(f.File)
		if got := seen(t, "-", o, 1); !slices.Equal(got, f.want()) {
			t.Errorf("%s on standard input:\n%s", f.Name, strings.Join(got, "\n"))
		}
		if got := seen(t, put(t, "stream.zst", zstded(string(f.File))), o, 1); !slices.Equal(got, f.want()) {
			t.Errorf("%s in zstd:\n%s", f.Name, strings.Join(got, "\n"))
		}
	}
}

// Files cut at every byte give some of the first documents and then an error. An Arrow stream may
// end behind any record batch, by its format.
func TestColumnFilesCut(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, f := range columnFiles(t) {
		if !slices.Contains([]string{"zstd2.0.parquet", "DELTA_BYTE_ARRAY.parquet", "zstd.arrow", "lz4stream.arrow"},
			f.Name) {
			continue
		}
		o, want := Options{Text: f.Text, ID: f.ID}, f.want()
		ends := 0
		path := put(t, f.Name, string(f.File))
		for cut := len(f.File) - 1; cut >= 0; cut-- {
			if err := os.Truncate(path, int64(cut)); err != nil {
				t.Fatal(err)
			}
			got := seen(t, path, o, 1<<40)
			if len(got) < len(want) && slices.Equal(got, want[:len(got)]) && f.File[0] == 0xff && len(got)%5 == 0 {
				ends++
				continue
			}
			whole := slices.Equal(got, want) && f.File[0] == 0xff && cut >= len(f.File)-8 // without its end mark
			if n := len(got) - 1; !whole && (n < 0 || !slices.Equal(got[:n], want[:n]) ||
				!strings.Contains(got[n], f.Name)) {
				t.Fatalf("%s cut at byte %d of %d: %q", f.Name, cut, len(f.File), got)
			}
		}
		if ends > 3 {
			t.Errorf("%s: %d cuts were taken for the end", f.Name, ends)
		}
	}
}

// Files with any byte changed give documents or an error, never a panic.
func TestColumnFilesDamaged(t *testing.T) {
	longtest.SkipIfShort(t)
	defer goleak.VerifyNone(t)
	for _, f := range columnFiles(t) {
		o := Options{Text: f.Text, ID: f.ID, MaxLine: 1 << 20}
		path := filepath.Join(t.TempDir(), f.Name)
		found := 0
		for at := 0; at < len(f.File); at += 43 {
			damaged := bytes.Clone(f.File)
			damaged[at] ^= byte(1 + at*37%255)
			if err := os.WriteFile(path, damaged, 0o644); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(seen(t, path, o, 1), f.want()) {
				found++
			}
		}
		if found == 0 {
			t.Errorf("%s: no damage was noticed", f.Name)
		}
	}
}

func TestColumnsRefused(t *testing.T) {
	files := columnFiles(t)
	find := func(name string) string {
		for _, f := range files {
			if f.Name == name {
				return string(f.File)
			}
		}
		t.Fatal("no", name)
		return ""
	}
	parquet, arrowFile := find("zstd2.0.parquet"), find("zstd.arrow")
	for i, test := range []struct {
		name, content string
		o             Options
		want          string
	}{
		{"a.parquet", parquet, Options{Text: "txt"},
			`no column "txt"; to read the only text column, pass --text-field text`},
		{"a.parquet", parquet, Options{Text: "x"}, `has the type int64, not string`},
		{"a.parquet", parquet, Options{Text: "list.list.element"}, `is inside a list`},
		{"a.parquet", parquet, Options{Text: "list"},
			`the column "list" of the texts has the type list, not string; to read the only text column, pass --text-field text`},
		{"a.parquet", parquet, Options{Text: "list.list"},
			`the column "list.list" of the texts has the type list, not string`},
		{"a.parquet", parquet, Options{Text: "list.none"}, `no column "list.none"`},
		{"a.parquet", parquet, Options{Text: "id.none"}, `no column "id.none"`},
		{"a.parquet", find("nested.parquet"), Options{Text: "m.a"},
			`the column "m.a" of the texts has the type struct, not string; the text columns are m.a.url, m.t\.x`},
		{"a.parquet", parquet, Options{ID: "list"},
			`the column "list" of the ids has the type list, neither string nor integer`},
		{"a.parquet", parquet, Options{ID: "nope"}, `no column "nope" for the ids`},
		{"a.arrow", arrowFile, Options{Text: "txt"},
			`no column "txt"; to read the only text column, pass --text-field text`},
		{"a.arrow", arrowFile, Options{Text: "x"}, `has the type int64, not string`},
		{"a.arrow", arrowFile, Options{ID: "nope"}, `no column "nope" for the ids`},
		{"a.arrow", arrowFile, Options{ID: "list"}, `neither string nor integer`},
		{"a.parquet", find("nested.parquet"), Options{Text: "x", ID: "m.a.url"},
			`no column "x"; to read the only text column, pass --text-field m.t\.x`},
		{"a.parquet.zst", zstded(parquet), Options{}, "save it uncompressed and name the file"},
		{"a.jsonl", parquet, Options{}, "parquet by its first bytes and jsonl by its name"},
		{"a.parquet", arrowFile, Options{}, "arrow by its first bytes and parquet by its name"},
		{"a.arrow", "{}", Options{}, `arrow by its name, but it starts with "{}"`},
		{"a.parquet", "", Options{}, `is empty`},
		{"a", parquet, Options{Format: JSONLines}, "but --input-format is jsonl"},
		{"a", "{}", Options{Format: Parquet}, `--input-format is parquet, but the file starts with "{}"`},
		{"a", "some text", Options{}, "cannot tell the format"},
		{"a.parquet", "PARE" + parquet[4:len(parquet)-1] + "E", Options{}, "encrypted"},
	} {
		got := seen(t, put(t, test.name, test.content), test.o, 1<<40)
		if len(got) != 1 || !strings.Contains(got[0], test.want) || !strings.Contains(got[0], test.name) ||
			strings.Contains(got[0], "fetch it again") != strings.Contains(test.want, "by its name, but") &&
				test.content != "" {
			t.Errorf("%d %s: %q does not say %q", i, test.name, got, test.want)
		}
		// An error about a complete file has no line. The advice must not blame the metadata.
		if strings.Contains(got[0], "(byte 0)") || strings.Contains(got[0], "reading the metadata") {
			t.Errorf("%d %s: %q", i, test.name, got)
		}
	}
}

// Offsets that lead out of a column's bytes are an error of the row.
func TestArrowOffsets(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "text", Type: arrow.BinaryTypes.String, Nullable: true}}, nil)
	good := arrow.Int32Traits.CastToBytes([]int32{0, 5, 5, 6})
	column := array.NewStringData(array.NewData(arrow.BinaryTypes.String, 3,
		[]*memory.Buffer{nil, memory.NewBufferBytes(good), memory.NewBufferBytes([]byte("abcdef"))}, nil, 0, 0))
	var out bytes.Buffer
	w := ipc.NewWriter(&out, ipc.WithSchema(schema))
	if err := w.Write(array.NewRecordBatch(schema, []arrow.Array{column}, 3)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if got := seen(t, put(t, "x.arrow", out.String()), Options{}, 1); !slices.Equal(got,
		[]string{`0  "abcde"`, "1 empty document ", `2  "f"`}) {
		t.Errorf("%q", got)
	}
	for _, offsets := range [][]int32{{0, 5, 3, 6}, {-1, 2, 3, 6}, {0, 7, 7, 6}} {
		content := strings.Replace(out.String(), string(good), string(arrow.Int32Traits.CastToBytes(offsets)), 1)
		got := seen(t, put(t, "x.arrow", content), Options{}, 1)
		if len(got) == 0 || len(got) > 2 || !strings.Contains(got[len(got)-1], "outside of its buffer") {
			t.Errorf("%v: %q", offsets, got)
		}
	}
}

func fuzzColumns(f *testing.F, ending string) {
	for _, file := range columnFiles(f) {
		if strings.HasSuffix(file.Name, ending) {
			f.Add(file.File)
		}
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		path := put(t, "x"+ending, string(content))
		whole := seen(t, path, Options{MaxLine: 1 << 16}, 1<<40)
		if len(whole) > 0 && strings.Contains(whole[len(whole)-1], path) {
			return
		}
		if cut := seen(t, path, Options{MaxLine: 1 << 16}, 1); !slices.Equal(cut, whole) {
			t.Fatalf("whole %q, in pieces %q", whole, cut)
		}
	})
}

func FuzzParquet(f *testing.F) { fuzzColumns(f, ".parquet") }

func FuzzArrow(f *testing.F) { fuzzColumns(f, ".arrow") }

// Hadoop's LZ4, which pyarrow does not write: blocks with their sizes before them, and one block
// without, as some writers left it.
func TestHadoopLZ4(t *testing.T) {
	want := strings.Repeat("Hadoop's LZ4, ", 100)
	var framed []byte
	for _, part := range []string{want[:500], want[500:]} {
		block := make([]byte, lz4.CompressBlockBound(len(part)))
		n, err := lz4.CompressBlock([]byte(part), block, nil)
		if err != nil {
			t.Fatal(err)
		}
		framed = binary.BigEndian.AppendUint32(framed, uint32(len(part)))
		framed = binary.BigEndian.AppendUint32(framed, uint32(n))
		framed = append(framed, block[:n]...)
	}
	plain := make([]byte, lz4.CompressBlockBound(len(want)))
	n, err := lz4.CompressBlock([]byte(want), plain, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, body := range [][]byte{framed, plain[:n]} {
		out := make([]byte, len(want))
		if got, err := hadoopLZ4(out, body); err != nil || string(got) != want {
			t.Errorf("%q %v", got, err)
		}
		if got, err := hadoopLZ4(out, body[:len(body)-3]); err == nil && string(got) == want {
			t.Error("a body that is cut short is taken for whole")
		}
	}
}

// A codec gives what the header of the page says, and allocates nothing for what the compressed
// bytes say beyond it.
func TestCodecsExact(t *testing.T) {
	for name, body := range map[compress.Compression][]byte{
		compress.Codecs.Snappy: {0xff, 0xff, 0xff, 0xff, 0x0f, 0},                      // 4 GiB by its head
		compress.Codecs.Zstd:   {0x28, 0xb5, 0x2f, 0xfd, 0xa0, 0, 0, 0, 0x20, 3, 0, 0}, // 512 MiB
	} {
		codec, err := compress.GetCodec(name)
		if err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		out, err := compress.Decode(codec, make([]byte, 100), body)
		if runtime.ReadMemStats(&after); err == nil || after.TotalAlloc-before.TotalAlloc > 64<<20 {
			t.Errorf("%v: %d bytes, %v, %d bytes allocated", name, len(out), err, after.TotalAlloc-before.TotalAlloc)
		}
	}
}

// A file of columns needs no column of ids unless the caller names one. If it has no column of
// text, the error says that.
func TestColumnsWithoutIDs(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "text", Type: arrow.BinaryTypes.String}}, nil)
	numbers := arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int64}}, nil)
	texts := array.NewStringBuilder(memory.DefaultAllocator)
	texts.AppendValues([]string{"a", "b"}, nil)
	ints := array.NewInt64Builder(memory.DefaultAllocator)
	ints.AppendValues([]int64{1, 2}, nil)
	batch := array.NewRecordBatch(schema, []arrow.Array{texts.NewArray()}, 2)
	noText := array.NewRecordBatch(numbers, []arrow.Array{ints.NewArray()}, 2)
	parquetOf := func(b arrow.RecordBatch) string {
		var out bytes.Buffer
		w, err := pqarrow.NewFileWriter(b.Schema(), &out, nil, pqarrow.DefaultWriterProps())
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.Write(b), w.Close()); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	arrowOf := func(b arrow.RecordBatch) string {
		var out bytes.Buffer
		w := ipc.NewWriter(&out, ipc.WithSchema(b.Schema()))
		if err := errors.Join(w.Write(b), w.Close()); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	for name, of := range map[string]func(arrow.RecordBatch) string{"x.parquet": parquetOf, "x.arrow": arrowOf} {
		path := put(t, name, of(batch))
		if got := read(t, Options{}, path); !slices.Equal(got, []string{name + ` 1@0 ` + name + `:1 "a"`,
			name + ` 2@1 ` + name + `:2 "b"`}) {
			t.Errorf("%s: %q", name, got)
		}
		if got := seen(t, path, Options{ID: "id"}, 1<<40); len(got) != 1 ||
			!strings.Contains(got[0],
				`no column "id" for the ids; the text columns are text; remove --id-field`) {
			t.Errorf("%s: %q", name, got)
		}
		if got := seen(t, put(t, name, of(noText)), Options{}, 1<<40); len(got) != 1 ||
			!strings.HasSuffix(got[0], `the file has no column "text"; no other column has text`) {
			t.Errorf("%s: %q", name, got)
		}
	}
}
