package documents

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
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

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

// All pieces of a file, at any target size, have the documents and errors of the complete file.
// Their hashes cover every byte of the file once. A reader that skips to any document continues
// with the next document, and has the same hash.
func TestPiecesAreTheWhole(t *testing.T) {
	defer goleak.VerifyNone(t)
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		var content strings.Builder
		line := rapid.OneOf(
			rapid.SampledFrom([]string{"", " ", "\t", `{"id":"a","text":"b"}`, `{"text":"\u00e9\n"}`, `{"text":""}`,
				`nonsense`, `{"text":"` + strings.Repeat("x", 300) + `"}`, `{"text":"日本"} `}),
			rapid.StringMatching(`[ -~]{0,10}`))
		for range rapid.IntRange(0, 12).Draw(rt, "lines") {
			content.WriteString(line.Draw(rt, "line"))
			content.WriteString(rapid.SampledFrom([]string{"\n", "\n", "\r\n", "\n\n"}).Draw(rt, "end"))
		}
		content.WriteString(rapid.SampledFrom([]string{"", `{"text":"last"}`, "\n", "x"}).Draw(rt, "last"))
		path := filepath.Join(dir, "x.jsonl")
		if err := os.WriteFile(path, []byte(content.String()), 0o644); err != nil {
			rt.Fatal(err)
		}
		o := Options{Format: JSONLines, MaxLine: 200}
		if rapid.Bool().Draw(rt, "text") {
			o.Format, o.Unit = Text, EachLine
		}
		whole := seen(t, path, o, 1<<40)
		target := rapid.Int64Range(1, int64(content.Len())+2).Draw(rt, "target")
		if got := seen(t, path, o, target); !slices.Equal(got, whole) {
			rt.Fatalf("pieces of %d bytes: %q, whole %q", target, got, whole)
		}
		pieces, err := Pieces(t.Context(), []string{path}, o, target)
		if err != nil {
			rt.Fatal(err)
		}
		lines, at := int64(0), int64(0)
		for _, p := range pieces {
			if p.Start != at || p.End < 0 && len(pieces) > 1 {
				rt.Fatalf("pieces %v", pieces)
			}
			at = p.End
			n := checkPiece(t, rt, p, o)
			lines += n
		}
		want := int64(strings.Count(content.String(), "\n"))
		if content.Len() > 0 && !strings.HasSuffix(content.String(), "\n") {
			want++
		}
		if lines != want {
			rt.Fatalf("%d lines in all pieces, want %d", lines, want)
		}
	})
}

// checkPiece reads a piece, compares its hash and skips to each of its documents. It gives the
// number of its lines.
func checkPiece(t *testing.T, rt interface{ Fatalf(string, ...any) }, p Piece, o Options) int64 {
	type mark struct{ offset, lines int64 }
	var marks []mark
	var all []string
	read := func(r *Reader) (got []string) {
		for {
			doc, err := r.Next()
			var bad *DocumentError
			switch {
			case err == io.EOF:
				return got
			case err == nil:
				got = append(got, fmt.Sprint(doc.Line, doc.Offset, doc.ID, string(doc.Text)))
				if doc.Line > r.Lines()+1 {
					rt.Fatalf("line %d after %d lines were passed", doc.Line, r.Lines())
				}
			case errors.As(err, &bad) && bad.Kind != BadStream:
				got = append(got, err.Error())
				doc.Offset = bad.Offset
			default:
				rt.Fatalf("%v", err)
			}
			if all == nil || len(marks) < len(got) {
				marks = append(marks, mark{doc.Offset, r.Lines()})
			}
		}
	}
	open := func() *Reader {
		r, err := Open(t.Context(), p, o)
		if err != nil {
			rt.Fatalf("%v", err)
		}
		return r
	}
	r := open()
	defer r.Close()
	all = read(r)
	content, err := os.ReadFile(p.File)
	if err != nil {
		rt.Fatalf("%v", err)
	}
	if p.End >= 0 {
		content = content[p.Start:p.End]
	}
	sum := sha256.Sum256(content)
	if want := hex.EncodeToString(sum[:]); r.SHA256() != want || r.BytesRead() != int64(len(content)) {
		rt.Fatalf("%v: hash %s of %d bytes, want %s of %d", p, r.SHA256(), r.BytesRead(), want, len(content))
	}
	for i, m := range slices.Clone(marks) {
		if i%3 == 2 && i < len(marks)-1 { // not all of many
			continue
		}
		again := open()
		if again.SHA256() != "" {
			rt.Fatalf("a hash before the end")
		}
		if err := again.Skip(m.offset, m.lines); err != nil {
			rt.Fatalf("skipping to %v: %v", m, err)
		}
		if got := read(again); !slices.Equal(got, all[i+1:]) {
			rt.Fatalf("behind %q: %q, want %q", all[i], got, all[i+1:])
		}
		if again.SHA256() != r.SHA256() || again.Lines() != r.Lines() {
			rt.Fatalf("after skipping, hash %s and %d lines, want %s and %d", again.SHA256(), again.Lines(), r.SHA256(),
				r.Lines())
		}
		again.Close()
	}
	return r.Lines()
}

// The same for what is one piece, or pieces of rows.
func TestSkip(t *testing.T) {
	defer goleak.VerifyNone(t)
	lines := `{"id":"a","text":"b"}` + "\n\nbad\n" + `{"text":"c"}` + "\r\n" + `{"text":"d` + "\n" + `{"text":"e"}`
	array := "\n[ {\"text\":\n\"a\"},{\"text\":\"b\"} ,\n\n{\"text\":\"\"}, {\"text\":\"c\",} , {\"text\":\n\"d\"}]\n\n"
	for name, content := range map[string]string{
		"a.jsonl": lines, "a.jsonl.gz": gzipped(lines), "a.jsonl.zst": zstded(lines, "", "\n", lines), "a.json": array,
		"a.json.zst":  zstded(array),
		"stream.json": "{\"text\":\n\"a\"}{\"text\":\"b\"}\n{\"text\":\n\"c\"}", "a.txt": "some\ntext\n",
		"long.txt": strings.Repeat("x", 3*readBuffer),
	} {
		checkPiece(t, t, Piece{put(t, name, content), 0, -1}, Options{})
	}
	for _, f := range columnFiles(t) {
		checkPiece(t, t, Piece{put(t, f.Name, string(f.File)), 0, -1}, Options{Text: f.Text, ID: f.ID})
	}
}

// The bytes of the pieces of a Parquet or Arrow file are the whole file's: their numbers say so,
// and a change anywhere changes one hash.
func TestHashesOfRows(t *testing.T) {
	for _, f := range columnFiles(t) {
		if f.Name != "snappy1.0.parquet" && f.Name != "lz4.arrow" {
			continue
		}
		path := put(t, f.Name, string(f.File))
		hashes := func(pieces []Piece) (sums []string, all int64) {
			for _, p := range pieces {
				r, err := Open(t.Context(), p, Options{})
				if err != nil {
					return nil, 0
				}
				for {
					if _, err = r.Next(); err != nil && !recoverable(err) {
						break
					}
				}
				sums = append(sums, r.SHA256())
				all += r.BytesRead()
				r.Close()
			}
			return sums, all
		}
		pieces, err := Pieces(t.Context(), []string{path}, Options{}, 1)
		if err != nil {
			t.Fatal(err)
		}
		sums, all := hashes(pieces)
		if len(sums) != 3 || all != int64(len(f.File)) || slices.Contains(sums, "") {
			t.Fatalf("%s: %q of %d bytes, the file has %d", f.Name, sums, all, len(f.File))
		}
		for at := 0; at < len(f.File); at += 11 {
			damaged := bytes.Clone(f.File)
			damaged[at] ^= 1
			if err := os.WriteFile(path, damaged, 0o644); err != nil {
				t.Fatal(err)
			}
			if got, _ := hashes(pieces); slices.Equal(got, sums) {
				t.Fatalf("%s: the change of byte %d changes no hash", f.Name, at)
			}
		}
	}
}

func TestPiecesOfInputs(t *testing.T) {
	lines := strings.Repeat(`{"text":"a"}`+"\n", 100)
	jsonl := put(t, "a.jsonl", lines)
	pieces, err := Pieces(t.Context(), []string{jsonl, "-", put(t, "b.jsonl.gz", gzipped(lines)),
		put(t, "c.json", "["+lines), put(t, "d.txt", lines)}, Options{}, 400)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range pieces {
		got = append(got, fmt.Sprintf("%s %d %d", filepath.Base(p.File), p.Start, p.End))
	}
	want := []string{"a.jsonl 0 433", "a.jsonl 433 866", "a.jsonl 866 1300", "- 0 -1", "b.jsonl.gz 0 -1", "c.json 0 -1",
		"d.txt 0 -1"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	// A file that is shorter than when it was cut is noticed.
	for _, size := range []int64{600, 436, 433, 400} { // the piece begins in a line that ends at byte 442
		if err := os.Truncate(jsonl, size); err != nil {
			t.Fatal(err)
		}
		if _, err := seenPiece(t, pieces[1], Options{}); err == nil || !strings.Contains(err.Error(), "changed since") {
			t.Errorf("a file shortened to %d bytes: %v", size, err)
		}
	}
	for _, input := range []string{filepath.Join(t.TempDir(), "absent"), t.TempDir(), put(t, "x.gz", "plain")} {
		if _, err := Pieces(t.Context(), []string{input}, Options{}, 1); err == nil ||
			!strings.Contains(err.Error(), input) {
			t.Errorf("%s: %v", input, err)
		}
	}
	for _, bad := range []string{`a\b`, `a..b`, `.`, `a\`} {
		if _, err := Pieces(t.Context(), nil, Options{Text: bad}, 1); err == nil ||
			!strings.Contains(err.Error(), fmt.Sprintf("%q", bad)) {
			t.Errorf("the field %s: %v", bad, err)
		}
	}
}

func TestFields(t *testing.T) {
	for _, test := range []struct{ line, text, id, want string }{
		{`{"a":{"b":"x","c":1},"id":"no"}`, "a.b", "a.c", `0 1 "x"`},
		{`{"a.b":"x","a":{"b":"y"}}`, `a\.b`, "a.b", `0 y "x"`},
		{`{"a\\b":"x"}`, `a\\b`, "", `0  "x"`},
		{`{"a":{"b":"x"},"a":{}}`, "a.b", "", `0 no text `},
		{`{"a":{"b":"x"},"a":7}`, "a.b", "", `0 no text `},
		{`{"a":[{"b":"x"}]}`, "a.b", "", `0 no text `},
		{`{"a":{"b":{"c":"x"},"c":"no"},"c":"no","b":{"c":"no"}}`, "a.b.c", "", `0  "x"`},
		{`{"a":{"b":"x"}}`, "a", "a.b", `5 text is not a string x`},
		{`{"a":"x"}`, "a", "a", `0 x "x"`},
		{`{"\u0061":{"\u0062":"\u0078"}}`, "a.b", "", `0  "x"`},
		{`{"日本":{"é":"x"}}`, "日本.é", "", `0  "x"`},
	} {
		got := seen(t, put(t, "x.jsonl", test.line), Options{Text: test.text, ID: test.id}, 1<<40)
		if !slices.Equal(got, []string{test.want}) {
			t.Errorf("%s, %s, %s: %q, want %q", test.line, test.text, test.id, got, test.want)
		}
	}
}

func TestFormats(t *testing.T) {
	for i, test := range []struct {
		name, content string
		o             Options
		want          string
	}{
		{"a.json", `{"text":"a"}` + "\n" + `{"text":"b"}`, Options{}, `0  "a"|13  "b"`},
		{"a.json", "\n\n" + `{"text":"a"}` + "\n" + `bad` + "\n" + `{"text":"b"}`, Options{},
			`2  "a"|15 malformed JSON |19  "b"`},
		{"a.json", `bad` + "\n" + `{"text":"b"}`, Options{}, `0 malformed JSON |4  "b"`},
		{"a.json", `{"text":"bad` + "\n" + `{"text":"b"}`, Options{}, `8 malformed JSON |13  "b"`},
		{"a.json", "{\n" + `"text":"a"}` + "\n{\n" + `"text":"b"}`, Options{}, `0  "a"|14  "b"`},
		{"a.json", `[{"text":"a"},` + "\n" + `{"text":"b","x":[{"y":"}]\"\\"}]}]` + "\n", Options{}, `1  "a"|15  "b"`},
		{"a.json", ` [ ] `, Options{}, ``},
		{"a.json", ` `, Options{}, ``},
		{"a", `[{"text":"a"}]`, Options{}, `1  "a"`},
		{"a", `{"text":"a"}{"text":"b"}`, Options{}, `0  "a"|12  "b"`},
		{"a.jsonl", `[{"text":"a"}]`, Options{}, `0 malformed JSON `},
		{"a.jsonl", `[{"text":"a"}]`, Options{Format: JSON}, `1  "a"`},
		{"a.json", `[{"text":"a"},]`, Options{}, `1  "a"|']' instead of an object`},
		{"a.json", `[{"text":"a"}{"text":"b"}]`, Options{}, `1  "a"|'{' instead of a comma`},
		{"a.json", `[{"text":"a"}`, Options{}, `1  "a"|ends inside its array`},
		{"a.json", `[{"text":"a"},{"text":"b"`, Options{}, `1  "a"|ends inside an object`},
		{"a.json", `[{"text":"a"}] x`, Options{}, `1  "a"|'x' after the end of the array`},
		{"a.json", `[{"text":"a",},{"text":"b"},{"text":"\ud800"},{"text":"` + "\xff" + `"},7]`, Options{},
			`13 malformed JSON |15  "b"|37 invalid UTF-8 |55 invalid UTF-8 |'7' instead of an object`},
		{"a.json", `[{"text":"0123456789012345"},{"text":"b"}]`, Options{MaxLine: 20}, `1 line too long |29  "b"`},
		{"a.json", "[]\x00", Options{}, `'\x00' after the end of the array`},
		{"a.json", "\x00", Options{Format: JSON}, `'\x00' instead of an object`},
		{"a.txt", "one\ntwo\n", Options{}, `0  "one\ntwo\n"`},
		{"a.txt.gz", gzipped("one\n", "two\n"), Options{}, `0  "one\ntwo\n"`},
		{"a.txt", "one\r\n\n \ntwo\rx\nlast", Options{Unit: EachLine}, `0  "one"|8  "two\rx"|14  "last"`},
		{"a.txt", "", Options{}, `0 empty document `},
		{"a.txt", "ab\xffc", Options{}, `2 invalid UTF-8 `},
		{"a.txt", "abcdef", Options{MaxLine: 5}, `0 line too long `},
		{"a.txt", "{", Options{}, `0  "{"`},
		{"a.ndjson", `{"text":"a"}`, Options{}, `0  "a"`},
		{"a", "one\n", Options{Format: Text}, `0  "one\n"`},
	} {
		lines := seen(t, put(t, test.name, test.content), test.o, 1<<40)
		want := strings.Split(test.want, "|")
		if test.want == "" {
			want = nil
		}
		ok := len(lines) == len(want)
		for i := range lines {
			ok = ok && (lines[i] == want[i] || strings.Contains(lines[i], "x:") || i == len(lines)-1 &&
				strings.Contains(lines[i], test.name) && strings.Contains(lines[i], want[i]))
		}
		if !ok {
			t.Errorf("%d: %s %q: %q, want %q", i, test.name, test.content, lines, want)
		}
	}
}

// JSON over several lines gives the objects that encoding/json finds in it.
func FuzzJSON(f *testing.F) {
	f.Add([]byte("[{\"text\":\n\"a\"},{\"text\":\"b\",\"x\":[{}]} ]"))
	f.Add([]byte("{\"text\":\n\"a\"}\n{\"text\":\"b\"}"))
	f.Add([]byte(`[{"text":"a"},]`))
	f.Fuzz(func(t *testing.T, content []byte) {
		got, err := seenPiece(t, Piece{put(t, "x.json", string(content)), 0, -1}, Options{Format: JSON})
		var bad *DocumentError
		if err != nil && (!errors.As(err, &bad) || bad.Offset < 0 || bad.Offset > int64(len(content))) {
			t.Fatalf("%q: %v", content, err)
		}
		// The objects by encoding/json, as long as it finds no fault.
		decoder := json.NewDecoder(bytes.NewReader(content))
		array := bytes.HasPrefix(bytes.TrimLeft(content, " \t\r\n"), []byte("["))
		if array {
			decoder.Token()
		}
		n := 0
		for decoder.More() {
			var object json.RawMessage
			if decoder.Decode(&object) != nil || object[0] != '{' {
				if err == nil && !slices.ContainsFunc(got, func(s string) bool {
					return strings.Contains(s, " malformed JSON ") || strings.Contains(s, " invalid UTF-8 ")
				}) {
					t.Fatalf("%q: no error", content)
				}
				return
			}
			if n == len(got) {
				t.Fatalf("%q: %q and %v lack %s", content, got, err, object)
			}
			at := decoder.InputOffset() - int64(len(object))
			wantID, wantText, kind := reference(object)
			want := fmt.Sprintf("%d %s %q", at, wantID, wantText)
			if kind == 0 && got[n] != want || kind != 0 && !strings.Contains(got[n], kind.String()) {
				t.Fatalf("%q: %s, want %s (%v)", content, got[n], want, kind)
			}
			n++
		}
	})
}

// A repeated gives head, then block n times, then tail.
type repeated struct {
	head, block, tail string
	n                 int
}

func (r *repeated) Read(p []byte) (int, error) {
	for r.head == "" {
		switch {
		case r.n > 0:
			r.head, r.n = r.block, r.n-1
		case r.tail != "":
			r.head, r.tail = r.tail, ""
		default:
			return 0, io.EOF
		}
	}
	n := copy(p, r.head)
	r.head = r.head[n:]
	return n, nil
}

// A document of 200 MB on one line needs memory for itself and little more. A document above the
// limit needs none.
func TestMemoryOfGiant(t *testing.T) {
	const block = 8 << 20
	giant := func() *repeated {
		return &repeated{`{"text":"`, strings.Repeat("01234567", block/8), "\"}\n{\"text\":\"b\"}\n", 25}
	}
	for limit, most := range map[int]uint64{0: 3 * 25 * block, 10 << 20: 8 * block} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		r, err := Open(t.Context(), Piece{"-", 0, -1}, Options{Stdin: giant(), MaxLine: limit})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		doc, err := r.Next()
		if limit == 0 && (err != nil || len(doc.Text) != 25*block) || limit > 0 && !recoverable(err) {
			t.Fatal(len(doc.Text), err)
		}
		if next, err := r.Next(); err != nil || string(next.Text) != "b" {
			t.Fatal(next, err)
		}
		runtime.ReadMemStats(&after)
		// The sum of all allocations does not depend on when the garbage collector runs.
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > most {
			t.Errorf("limit %d: %d MiB were allocated, want at most %d", limit, allocated>>20, most>>20)
		}
	}
}

func TestHasEnding(t *testing.T) {
	for name, want := range map[string]bool{
		"a.jsonl": true, "a.json.gz": true, "a.ndjson.zst": true, "a.TXT": true, "a.parquet": true, "a.arrow": true,
		"a.feather": true, "a.b.jsonl.gz": true,
		"a.parquet.gz": false, "a.gz": false, "a.npy": false, "jsonl": false, "a.jsonl.bak": false, "a.csv": false,
	} {
		if hasEnding(name) != want {
			t.Errorf("%s: %v", name, !want)
		}
	}
}
