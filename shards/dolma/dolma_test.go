package dolma

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"go.uber.org/goleak"

	"mula/shards"
	"mula/shards/layout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// put writes the files of a shard. csv is not compressed yet; put skips it if it is "-".
func put(t testing.TB, dir string, npy []byte, csv string) string {
	t.Helper()
	prefix := filepath.Join(dir, "x")
	os.Remove(prefix + csvExt)
	if err := os.WriteFile(prefix+npyExt, npy, 0o644); err != nil {
		t.Fatal(err)
	}
	if csv == "-" {
		return prefix
	}
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write([]byte(csv))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(prefix+csvExt, z.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return prefix
}

func read(prefix string, h layout.Hints) (docs [][]uint32, origins []shards.DocumentOrigin, err error) {
	r, err := open(prefix, h)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	for d, err := range r.All(context.Background()) {
		if err != nil {
			return docs, origins, err
		}
		docs, origins = append(docs, slices.Clone(d.Tokens)), append(origins, d.Origin)
	}
	if total := int64(len(slices.Concat(docs...))); total != r.Tokens() {
		return docs, origins, fmt.Errorf("x: %d tokens were given of %d", total, r.Tokens())
	}
	return docs, origins, nil
}

func TestReads(t *testing.T) {
	ids := []byte{1, 0, 2, 0, 9, 0, 3, 0, 9, 0, 4, 0}
	two := layout.Hints{VocabSize: 50257, EOD: -1} // two bytes an id
	for name, c := range map[string]struct {
		csv   string
		hints layout.Hints
		want  string // the documents, or what the error says
	}{
		"list":            {"0,3,a,f,1\r\n3,5,b,f,2\r\n5,6,c,f,3\r\n", two, "[[1 2 9] [3 9] [4]]"},
		"empty documents": {"0,0,a,f,1\n0,6,b,f,2\n6,6,c,f,3\n", two, "[[] [1 2 9 3 9 4] []]"},
		"short list":      {"0,3\n3,6\n", two, "[[1 2 9] [3 9 4]]"},
		"no list":         {"-", layout.Hints{DType: "uint16", EOD: 9}, "[[1 2 9] [3 9] [4]]"},
		"no list, bytes":  {"-", layout.Hints{DType: "uint8", EOD: 9}, "[[1 0 2 0 9] [0 3 0 9] [0 4 0]]"},
		"id not there":    {"-", layout.Hints{DType: "uint16", EOD: 70000}, "[[1 2 9 3 9 4]]"},
		"given twice":     {"0,6\n", layout.Hints{DType: "uint16", EOD: 9}, "[[1 2 9 3 9 4]]"},
		"no type":         {"-", layout.Hints{EOD: 9}, "the type of its ids is unknown"},
		"no id":           {"-", layout.Hints{DType: "uint16", EOD: -1}, "give the end-of-document id"},
		"no such type":    {"-", layout.Hints{DType: "float32", EOD: 9}, `ids cannot be "float32"`},
		"wrong type": {"0,6\n", layout.Hints{DType: "uint32", EOD: -1},
			"x.npy has 12 bytes, but 6 ids of type uint32 have 24: it was cut short, or is of another type: corrupt"},
		"short of the end": {"0,3\n", layout.Hints{DType: "uint16", EOD: -1},
			"x.npy has 12 bytes, but 3 ids of type uint16 have 6"},
		"no array":   {"0,5\n", layout.NoHints, "x.npy has 12 bytes, which do not fit 5 ids"},
		"vocabulary": {"0,6\n", layout.Hints{VocabSize: 257, EOD: -1}, "[[1 2 9 3 9 4]]"},
		"of bytes": {"0,6\n", layout.Hints{VocabSize: 256, EOD: -1},
			"6 ids of type uint8 have 6: it was cut short, or is of another type; if its ids are not uint8, the " +
				"type for a vocabulary of 256 ids, give --dtype"},
		"half of uint16": {"0,12\n", two,
			"x.npy has 12 bytes, but 12 ids of type uint16 have 24: it was cut short"},
		"half of uint32": {"0,6\n", layout.Hints{VocabSize: 100278, EOD: -1},
			"x.npy has 12 bytes, but 6 ids of type uint32 have 24: it was cut short"},
		"one byte, undecided": {"0,12\n", layout.NoHints,
			"x.npy has 12 bytes for 12 ids: either ids of 1 bytes, or a truncated array of wider ids; give " +
				"--vocab-size or --dtype"},
		"two, undecided": {"0,6\n", layout.NoHints, "give --vocab-size or --dtype"},
		"four bytes":     {"0,3\n", layout.NoHints, "[[131073 196617 262153]]"},
		"contradiction": {"0,12\n", layout.Hints{DType: "uint8", VocabSize: 257, EOD: -1},
			"a vocabulary of 257 ids does not fit uint8"},
		"gap": {"0,3\n4,6\n", two,
			"document 1 (line 2) has the tokens 4 to 6, but the previous document ends at 3"},
		"backwards":           {"0,3\n3,2\n2,6\n", two, "document 1 (line 2) has the tokens 3 to 2"},
		"no numbers":          {"start,end\n0,6\n", two, `line 1: invalid token offset "start"`},
		"negative":            {"-1,6\n", two, `line 1: invalid token offset "-1"`},
		"another table":       {"0,6,a\n", two, "line 1: 3 fields"},
		"open quotes":         {"0,6,\"a", two, "line 1: the file ends within quotes"},
		"a line without ends": {"0,6," + strings.Repeat("a", maxRow+1), two, "more than 1048576 bytes"},
	} {
		docs, _, err := read(put(t, t.TempDir(), ids, c.csv), c.hints)
		got := fmt.Sprint(docs)
		if err != nil {
			got = err.Error()
		}
		if got != c.want && (err == nil || !strings.Contains(got, c.want)) {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	prefix := put(t, t.TempDir(), []byte("\x93NUMPY\x01\x00"), "0,4\n")
	if _, _, err := read(prefix, layout.NoHints); err == nil || !strings.Contains(err.Error(), "header of numpy.save") {
		t.Errorf("numpy's own file: %v", err)
	}
	prefix = put(t, t.TempDir(), ids[:5], "-")
	if _, _, err := read(prefix, layout.Hints{DType: "uint16", EOD: 9}); err == nil ||
		!strings.Contains(err.Error(), "cut short") {
		t.Errorf("half an id: %v", err)
	}
	if err := os.WriteFile(prefix+csvExt, []byte("0,2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := read(prefix, two); err == nil || !strings.Contains(err.Error(), "x.csv.gz: ") {
		t.Errorf("a list that is not compressed: %v", err)
	}
}

// Lines equal the lines of Python's csv module, which wrote the expected lines, except that line
// breaks are escaped.
func TestFields(t *testing.T) {
	for field, want := range map[string]string{
		"plain": `plain`, "a,b": `"a,b"`, `a"b`: `"a""b"`, " é\t": " é\t", "": "", `\n`: `\n`,
		"two\nlines": `two\nlines`, "a,\r\n": `"a,\r\n"`,
	} {
		if got := string(appendField(nil, field)); got != want {
			t.Errorf("%q is written %s, want %s", field, got, want)
		}
	}
	var text []byte
	var ends []int
	in := bufio.NewReader(strings.NewReader("1,2,\"a,\"\"b\"\"\r\nc\",\"\",x\"y\r3,4\n\n5,6"))
	for _, want := range []string{"[1 2 a,\"b\"\r\nc  x\"y]", "[3 4]", "[]", "[5 6]"} {
		var err error
		if text, ends, err = readRow(in, text[:0], ends[:0]); err != nil {
			t.Fatal(err)
		}
		var fields []string
		start := 0
		for _, end := range ends {
			fields = append(fields, string(text[start:end]))
			start = end
		}
		if got := fmt.Sprint(fields); got != want {
			t.Errorf("read %q, want %q", got, want)
		}
	}
}

// Any id and file name without a line break comes back, and takes one line.
func FuzzFields(f *testing.F) {
	f.Add("a,b", `"`)
	f.Add("\x00", " ")
	f.Fuzz(func(t *testing.T, id, file string) {
		line := appendField(appendField([]byte("0,1,"), id), "")
		line = append(line[:len(line):len(line)], ',')
		line = append(appendField(line, file), ",7\r\n"...)
		if n := bytes.Count(line, []byte{'\n'}) + bytes.Count(line, []byte{'\r'}); n != 2 {
			t.Fatalf("%q has %d line breaks", line, n)
		}
		text, ends, err := readRow(bufio.NewReader(bytes.NewReader(line)), nil, nil)
		if len(id)+len(file) > maxRow/2 {
			return
		}
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		row, err := parseRow(text, ends)
		escape := strings.NewReplacer("\r", `\r`, "\n", `\n`)
		if want := (shards.DocumentOrigin{ID: escape.Replace(id), File: escape.Replace(file), Line: 7}); err != nil ||
			row.origin != want {
			t.Fatalf("%q: %+v, %v, want %+v", line, row.origin, err, want)
		}
	})
}

func FuzzReader(f *testing.F) {
	f.Add([]byte{1, 0, 2, 0, 9, 0}, "0,1,a,f,1\r\n1,3,b,f,2\r\n", "", int64(-1))
	f.Add([]byte{1, 0, 2, 0, 9, 0}, "-", "uint16", int64(2))
	f.Add([]byte{1, 0, 2, 0}, "0,1\n1,9223372036854775807\n", "uint32", int64(2))
	f.Fuzz(func(t *testing.T, npy []byte, csv, dtype string, eod int64) {
		docs, _, err := read(put(t, t.TempDir(), npy, csv), layout.Hints{DType: dtype, EOD: eod})
		if err == nil && csv == "-" {
			for _, d := range docs[:max(len(docs)-1, 0)] {
				if i := slices.IndexFunc(d, func(id uint32) bool { return int64(id) == eod }); i != len(d)-1 {
					t.Errorf("a document has the id %d at %d of %d", eod, i, len(d))
				}
			}
		}
	})
}
