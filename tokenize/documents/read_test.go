package documents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"go.uber.org/goleak"
)

func gzipped(parts ...string) string {
	var b bytes.Buffer
	for _, p := range parts {
		w := gzip.NewWriter(&b)
		io.WriteString(w, p)
		w.Close()
	}
	return b.String()
}

func zstded(parts ...string) string {
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		panic(err)
	}
	var b []byte
	for _, p := range parts {
		b = enc.EncodeAll([]byte(p), b)
	}
	return string(b)
}

// skippable is a zstd frame without content, such as pzstd writes.
const skippable = "\x5a\x2a\x4d\x18\x03\x00\x00\x00abc"

func put(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// read runs through the inputs and writes down what it sees, a line a document or error.
func read(t *testing.T, opts Options, inputs ...string) (lines []string) {
	t.Helper()
	for doc, err := range ReadDocuments(t.Context(), inputs, opts) {
		var bad *DocumentError
		switch {
		case err == nil:
			lines = append(lines, fmt.Sprintf("%s %d@%d %s %q", filepath.Base(doc.File), doc.Line, doc.Offset, doc.ID,
				doc.Text))
		case errors.As(err, &bad):
			lines = append(lines, fmt.Sprintf("%s %d@%d %s: %v", filepath.Base(bad.File), bad.Line, bad.Offset, bad.ID,
				bad.Kind))
		default:
			lines = append(lines, err.Error())
		}
	}
	return lines
}

func TestReadDocuments(t *testing.T) {
	defer goleak.VerifyNone(t)
	const mixed = `{"id":"a","text":"one"}` + "\n" +
		"\n \t\r\n" +
		`{"id":7,"text":"two","x":{}}` + "\r\n" +
		`{"text":"three"}` + "\n" +
		`{"id":"e","text":""}` + "\n" +
		`{"id":"f","text":"\ud800"}` + "\n" +
		`nonsense` + "\n" +
		`{"id":"h","text":"last"}`
	want := []string{
		`NAME 1@0 a "one"`,
		`NAME 4@29 7 "two"`,
		`NAME 5@59 NAME:5 "three"`,
		`NAME 6@93 e: empty document`,
		`NAME 7@115 f: invalid UTF-8`,
		`NAME 8@124 : malformed JSON`,
		`NAME 9@133 h "last"`,
	}
	for name, content := range map[string]string{
		"a.jsonl": mixed, "b.json": mixed, "unnamed": mixed,
		"c.json.gz":    gzipped(mixed),
		"d.jsonl.gz":   gzipped(mixed[:10], mixed[10:60], "", mixed[60:]),
		"e.jsonl.zst":  zstded(mixed),
		"f.json.zst":   skippable + zstded(mixed[:10], mixed[10:60], "", mixed[60:]) + skippable,
		"gzip-unnamed": gzipped(mixed),
	} {
		path := put(t, name, content)
		got := read(t, Options{}, path)
		var named []string
		for _, line := range want {
			named = append(named, strings.ReplaceAll(line, "NAME", name))
		}
		if !slices.Equal(got, named) {
			t.Errorf("%s:\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(named, "\n"))
		}
		got = read(t, Options{Stdin: strings.NewReader(content)}, "-")
		if len(got) != len(want) || got[2] != `- 5@59 -:5 "three"` {
			t.Errorf("%s on standard input: %q", name, got)
		}
	}
	// Decoders serve one file after the other.
	var inputs []string
	for i := range 6 {
		content := fmt.Sprintf(`{"text":"%d"}`, i) + strings.Repeat("\n", i)
		inputs = append(inputs, put(t, fmt.Sprint(i), []string{content, gzipped(content), zstded(content)}[i%3]))
	}
	inputs = append(inputs, put(t, "empty", ""))
	if got := read(t, Options{}, inputs...); len(got) != 6 || got[5] != `5 1@0 5:1 "5"` {
		t.Errorf("six files: %q", got)
	}
}

// A document owns its memory: what comes after does not change it.
func TestDocumentsAreKept(t *testing.T) {
	var content strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&content, `{"id":"%d","text":"\n%s"}`+"\n", i, strings.Repeat(fmt.Sprint(i%10), i))
	}
	var docs []Document
	for doc, err := range ReadDocuments(t.Context(), []string{put(t, "x", zstded(content.String()))}, Options{}) {
		if err != nil {
			t.Fatal(err)
		}
		docs = append(docs, doc)
	}
	for i, doc := range docs {
		if doc.ID != fmt.Sprint(i) || string(doc.Text) != "\n"+strings.Repeat(fmt.Sprint(i%10), i) {
			t.Fatalf("document %d is now %q, %q", i, doc.ID, doc.Text)
		}
		_ = append(doc.Text, "beyond its end"...) // must not reach into another document
	}
}

// Streams cut or damaged anywhere end in one error of kind BadStream; every document before it was
// whole.
func TestBrokenStreams(t *testing.T) {
	defer goleak.VerifyNone(t)
	var content strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&content, `{"id":"%d","text":"document %x"}`+"\n", i, i*i*i)
	}
	for name, whole := range map[string]string{"x.gz": gzipped(content.String()), "x.zst": zstded(content.String())} {
		for cut := 1; cut < len(whole); cut += 1 + len(whole)/50 {
			path := put(t, name, whole[:cut])
			lines := read(t, Options{}, path, put(t, "next", `{"text":"not reached"}`))
			last := len(lines) - 1
			if !strings.HasSuffix(lines[last], "broken stream") || strings.Contains(strings.Join(lines[:last], ""),
				"broken") {
				t.Fatalf("%s cut at byte %d of %d ends with %q", name, cut, len(whole), lines[last])
			}
			for i, line := range lines[:last] {
				if !strings.HasSuffix(line, fmt.Sprintf(" %d %q", i, fmt.Sprintf("document %x", i*i*i))) {
					t.Fatalf("%s cut at byte %d: document %d is %s", name, cut, i, line)
				}
			}
		}
		damaged := []byte(whole)
		damaged[len(damaged)/2] ^= 0x55
		lines := read(t, Options{}, put(t, name, string(damaged)))
		if !strings.HasSuffix(lines[len(lines)-1], "broken stream") {
			t.Errorf("%s damaged ends with %q", name, lines[len(lines)-1])
		}
	}
	for _, err := range ReadDocuments(t.Context(), []string{put(t, "x.zst", zstded(content.String())[:1000])},
		Options{}) {
		var bad *DocumentError
		if errors.As(err, &bad) && (!errors.Is(err, io.ErrUnexpectedEOF) || !strings.Contains(err.Error(), "x.zst:") ||
			!strings.Contains(err.Error(), "truncated here; fetch it again")) {
			t.Errorf("the message is %q", err)
		}
	}
}

// A byte order mark at the start of a file does not belong to a document. Elsewhere it is an error
// or text.
func TestByteOrderMark(t *testing.T) {
	const mark = "\xef\xbb\xbf"
	lines := mark + `{"id":"a","text":"one"}` + "\n" + `{"text":"` + mark + `two"}` + "\n"
	bad := lines + mark + `{"text":"three"}` + "\n" // where two files were put together
	for _, test := range []struct {
		name, content string
		o             Options
		want          []string
	}{
		{"x.jsonl", lines, Options{}, []string{`x.jsonl 1@3 a "one"`, `x.jsonl 2@27 x.jsonl:2 "\ufefftwo"`}},
		{"x.jsonl", bad, Options{}, []string{`x.jsonl 1@3 a "one"`, `x.jsonl 2@27 x.jsonl:2 "\ufefftwo"`,
			`x.jsonl 3@45 : malformed JSON`}},
		{"x.json", lines, Options{}, []string{`x.json 1@3 a "one"`, `x.json 2@27 x.json:2 "\ufefftwo"`}},
		{"x.jsonl.gz", gzipped(lines), Options{}, []string{`x.jsonl.gz 1@3 a "one"`,
			`x.jsonl.gz 2@27 x.jsonl.gz:2 "\ufefftwo"`}},
		{"x.zst", zstded(lines), Options{}, []string{`x.zst 1@3 a "one"`, `x.zst 2@27 x.zst:2 "\ufefftwo"`}},
		{"x.json", mark + `[{"text":"a"}]`, Options{}, []string{`x.json 1@4 x.json:1 "a"`}},
		{"x.txt", mark + "a\nb", Options{}, []string{`x.txt 1@0 x.txt:1 "a\nb"`}},
		{"x.txt", mark + "a\nb", Options{Unit: EachLine}, []string{`x.txt 1@3 x.txt:1 "a"`, `x.txt 2@5 x.txt:2 "b"`}},
		{"x.txt", mark, Options{}, []string{`x.txt 1@0 : empty document`}},
		{"x.jsonl", mark, Options{}, nil},
		{"x.jsonl", lines, Options{KeepMark: true}, []string{`x.jsonl 1@0 : malformed JSON`,
			`x.jsonl 2@27 x.jsonl:2 "\ufefftwo"`}},
		{"x.txt", mark + "a", Options{KeepMark: true}, []string{`x.txt 1@0 x.txt:1 "\ufeffa"`}},
	} {
		path := put(t, test.name, test.content)
		if got := read(t, test.o, path); !slices.Equal(got, test.want) {
			t.Errorf("%q gives %q, want %q", test.content, got, test.want)
		}
		// Pieces see it where the file begins, and a reader that goes on behind the first document
		// passes over it.
		var whole, cut []string
		for _, target := range []int64{1 << 40, 1} {
			whole, cut = cut, seen(t, path, test.o, target)
		}
		if !slices.Equal(whole, cut) {
			t.Errorf("%q gives %q, cut into pieces %q", test.content, whole, cut)
		}
		if len(test.want) < 2 {
			continue
		}
		r, err := Open(t.Context(), Piece{File: path, End: -1}, test.o)
		if err != nil {
			t.Fatal(err)
		}
		first, err := r.Next()
		lines := r.Lines()
		r.Close()
		if test.o.KeepMark || err != nil {
			continue
		}
		if r, err = Open(t.Context(), Piece{File: path, End: -1}, test.o); err != nil {
			t.Fatal(err)
		}
		if err := r.Skip(first.Offset, lines); err != nil {
			t.Fatal(err)
		}
		if second, err := r.Next(); err != nil || !strings.Contains(test.want[1], fmt.Sprintf("@%d ", second.Offset)) {
			t.Errorf("%q goes on with %+v, %v", test.content, second, err)
		}
		r.Close()
	}
}

func TestRefusedFiles(t *testing.T) {
	for name, test := range map[string]struct{ content, want string }{
		"plain.gz":  {`{"text":"a"}`, "neither gzip nor zstd"},
		"empty.gz":  {"", "empty.gz: the file is empty"},
		"empty.zst": {"", "empty.zst: the file is empty"},
		"x.parquet": {"PAR1....", "truncated"},
		"x.arrow":   {"ARROW1\x00\x00", "truncated"},
		"short.gz":  {"\x1f\x8b\x08", "truncated"},
		"cut.gz":    {gzipped(`{"text":"a"}`) + "\x1f", "truncated"},
		"name.gz":   {gzipped(`{"text":"a"}`) + "\x1f\x8b\x08\x08\x00\x00\x00\x00\x00\x03name", "truncated"},
		"trailing.gz": {gzipped(`{"text":"a"}`) + "garbage of length", fmt.Sprintf("(byte 12): data that is "+
			"not gzip follows the compressed data at byte %d of", len(gzipped(`{"text":"a"}`)))},
		"garbage.gz": {gzipped("", strings.Repeat("\n", 9_000_000)) + "x", fmt.Sprintf("at byte %d of",
			len(gzipped("", strings.Repeat("\n", 9_000_000))))},
		"trailing.zst": {zstded(`{"text":"a"}`) + "garbage of length", fmt.Sprintf("(byte 12): data that is not "+
			"zstd follows the compressed data at byte %d of", len(zstded(`{"text":"a"}`)))},
		"garbage.zst": {zstded("", strings.Repeat("\n", 9_000_000)) + "none", fmt.Sprintf("at byte %d of",
			len(zstded("", strings.Repeat("\n", 9_000_000))))},
		// A frame with a window of 4 GiB, alone and behind another; and a block of 2,000 bytes in a
		// window of 1 KiB.
		"window.zst": {"\x28\xb5\x2f\xfd\x00\xb0",
			"the zstd window is above 2 GiB; compress the file again with --long=31 or less"},
		"later.zst": {zstded(`{"text":"a"}`) + "\x28\xb5\x2f\xfd\x00\xb0",
			"the zstd window is above 2 GiB; compress the file again with --long=31 or less"},
		"segment.zst": {"\x28\xb5\x2f\xfd\xe0\x01\x00\x00\x80\x00\x00\x00\x00",
			"the zstd window is above 2 GiB; compress the file again with --long=31 or less"},
		"block.zst": {"\x28\xb5\x2f\xfd\x00\x00\x83\x3e\x00x", "the zstd data is damaged; fetch the file again"},
		"skipped.zst": {"\x50\x2a\x4d\x18\x01\x00\x00\x00xgarbage",
			"not zstd follows the compressed data at byte 9 of"},
	} {
		var last error
		for _, err := range ReadDocuments(t.Context(), []string{put(t, name, test.content)}, Options{}) {
			last = err
		}
		if last == nil || !strings.Contains(last.Error(), test.want) || !strings.Contains(last.Error(), name) {
			t.Errorf("%s: error %v does not say %q", name, last, test.want)
		}
	}
	for _, input := range []string{filepath.Join(t.TempDir(), "absent"), t.TempDir()} {
		var errs []error
		for _, err := range ReadDocuments(t.Context(), []string{input, "-"},
			Options{Stdin: strings.NewReader(`{"text":"a"}`)}) {
			errs = append(errs, err)
		}
		if len(errs) != 1 || errs[0] == nil || !strings.Contains(errs[0].Error(), input) {
			t.Errorf("%s: %v", input, errs)
		}
	}
	for _, err := range ReadDocuments(t.Context(), []string{"/nonexistent"}, Options{}) {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	}
}

// A window above the limit is refused by name instead of taking the memory.
func TestWindow(t *testing.T) {
	for log, ok := range map[int]bool{20: true, 27: true, 31: true, 32: false, 35: false} {
		// A frame with nothing but the window descriptor and one raw block.
		line := `{"text":"a"}`
		frame := "\x28\xb5\x2f\xfd\x00" + string([]byte{byte(log-10) << 3}) + string([]byte{byte(len(line)<<3) | 1, 0,
			0}) + line
		got := read(t, Options{}, put(t, "x.zst", frame))
		if ok != (len(got) == 1 && strings.HasSuffix(got[0], `"a"`)) ||
			!ok != (len(got) == 1 && strings.HasSuffix(got[0], "broken stream")) {
			t.Errorf("window 2^%d: %q", log, got)
		}
	}
}

func TestMaxLine(t *testing.T) {
	line := func(n int) string { // of n bytes
		return `{"text":"` + strings.Repeat("x", n-len(`{"text":""}`)) + `"}`
	}
	for _, limit := range []int{100, readBuffer - 1, readBuffer, readBuffer + 1, 2*readBuffer + 17} {
		content := strings.Join([]string{line(limit), line(limit + 1), line(20), line(limit + 3*readBuffer),
			line(limit), line(limit + 1)}, "\n")
		path := put(t, "x", content)
		got := read(t, Options{MaxLine: limit}, path)
		var kinds []string
		var offsets []string
		for _, l := range got {
			if strings.HasSuffix(l, "line too long") {
				kinds = append(kinds, "long")
			} else {
				kinds = append(kinds, "ok")
			}
			offsets = append(offsets, strings.Fields(l)[1])
		}
		if !slices.Equal(kinds, []string{"ok", "long", "ok", "long", "ok", "long"}) {
			t.Errorf("limit %d: %v", limit, kinds)
			continue
		}
		at := 2*limit + 3
		if want := fmt.Sprintf("3@%d", at); offsets[2] != want {
			t.Errorf("limit %d: the third line is %s, want %s", limit, offsets[2], want)
		}
		if want := fmt.Sprintf("5@%d", at+21+limit+3*readBuffer+1); offsets[4] != want {
			t.Errorf("limit %d: the fifth line is %s, want %s", limit, offsets[4], want)
		}
	}
}

// The message of a document error leads to the place.
func TestDocumentErrorMessage(t *testing.T) {
	path := put(t, "x.jsonl", `{"text":"a"}`+"\n"+`{"text":"b",}`)
	for _, err := range ReadDocuments(t.Context(), []string{path}, Options{}) {
		if err != nil && err.Error() != path+`:2 (byte 25): malformed JSON: found '}', expected the name of a field` {
			t.Errorf("the message is %q", err)
		}
	}
}

func TestReadCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	var last error
	for _, err := range ReadDocuments(ctx, []string{put(t, "x", strings.Repeat(`{"text":"a"}`+"\n", 100))}, Options{}) {
		if n++; n == 3 {
			cancel()
		}
		last = err
	}
	if n != 4 || !errors.Is(last, context.Canceled) {
		t.Errorf("%d documents, then %v", n, last)
	}
	// Standard input that gives nothing does not hold up the end.
	in, out := io.Pipe()
	defer out.Close()
	ctx, cancel = context.WithCancel(t.Context())
	go func() {
		out.Write([]byte(`{"text":"a"}` + "\n" + `{"te`))
		cancel()
	}()
	last = nil
	for _, err := range ReadDocuments(ctx, []string{"-"}, Options{Stdin: in}) {
		last = err
	}
	if !errors.Is(last, context.Canceled) {
		t.Errorf("a pipe that waits: %v", last)
	}
}

// Nor does a pipe that is named as a file, plain or compressed.
func TestReadPipe(t *testing.T) {
	defer goleak.VerifyNone(t)
	const lines = `{"text":"a"}` + "\n" + `{"te`
	zst := zstded(lines, "x")
	for name, content := range map[string]string{"plain": lines, "zst": zst[:len(zst)-1]} {
		for _, leave := range []bool{false, true} { // the loop, or ctx ends
			in, out, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			path := fmt.Sprintf("/dev/fd/%d", in.Fd())
			if _, err := os.Stat(path); err != nil {
				t.Skip("this system does not name open files:", err)
			}
			if _, err := out.WriteString(content); err != nil {
				t.Fatal(err)
			}
			// The pipe is closed after a while, so that a reader that waits for it fails this test
			// instead of holding it up.
			timer := time.AfterFunc(20*time.Second, func() { out.Close() })
			ctx, cancel := context.WithCancel(t.Context())
			var last error
			n := 0
			for _, err := range ReadDocuments(ctx, []string{path}, Options{}) {
				if n++; leave {
					break
				}
				cancel()
				last = err
			}
			cancel()
			if leave && n != 1 || !leave && (n != 2 || !errors.Is(last, context.Canceled)) || !timer.Stop() {
				t.Errorf("%s, leaving %v: %d documents, then %v", name, leave, n, last)
			}
			out.Close()
			in.Close()
		}
	}
}

// Leaving the loop early closes everything.
func TestReadLeftEarly(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, lines := range []int{100, 1_000_000} { // the second is longer than the read-ahead
		path := put(t, "x.zst", zstded(strings.Repeat(`{"text":"a"}`+"\n", lines)))
		for range ReadDocuments(t.Context(), []string{path, path}, Options{}) {
			break
		}
	}
}

// The bytes of the input are reported no sooner than the documents made of them, and all of them.
func TestReadReports(t *testing.T) {
	var text strings.Builder
	for i := range 200_000 {
		fmt.Fprintf(&text, `{"id":%d,"text":"%x"}`+"\n", i, i*i*i)
	}
	for name, content := range map[string]string{"plain": text.String(), "gzip": gzipped(text.String()),
		"zstd": zstded(text.String())} {
		r, err := Open(t.Context(), Piece{put(t, name, content), 0, -1}, Options{Format: JSONLines})
		if err != nil {
			t.Fatal(err)
		}
		var early int64 // at the first document
		for i := 0; ; i++ {
			if _, err := r.Next(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				early = r.BytesRead()
			}
		}
		all := r.BytesRead()
		r.Close()
		if all != int64(len(content)) || early > 3*readBuffer/2 || early == all {
			t.Errorf("%s: %d of %d bytes were reported, %d before the first document", name, all, len(content), early)
		}
	}
}

// Documents share allocations: many small documents are in one.
func TestReadAllocations(t *testing.T) {
	const documents = 1000
	path := put(t, "x", strings.Repeat(`{"id":"abc","text":"a\nb","source":"x"}`+"\n", documents))
	n := testing.AllocsPerRun(3, func() {
		for _, err := range ReadDocuments(context.Background(), []string{path}, Options{}) {
			if err != nil {
				t.Error(err)
			}
		}
	})
	if n > documents/4 {
		t.Errorf("%v allocations for %d documents", n, documents)
	}
}

// FuzzReadDocuments reads anything as a file: no panic, lines that count up, and the same documents
// whether plain or compressed.
func FuzzReadDocuments(f *testing.F) {
	f.Add([]byte(`{"id":"a","text":"b"}`+"\n\n{\"text\":\"\"}\nx"), uint8(40))
	f.Add([]byte(gzipped(`{"text":"b"}`)), uint8(0))
	f.Add([]byte(zstded(`{"text":"b"}`)+skippable), uint8(0))
	f.Add([]byte("\n\n\n{\"text\":\"0123456789\"}\n\n"), uint8(5))
	f.Fuzz(func(t *testing.T, content []byte, limit uint8) {
		see := func(content []byte) (seen []string, ended bool) {
			line := int64(0)
			for doc, err := range ReadDocuments(t.Context(), []string{"-"},
				Options{Format: JSONLines, MaxLine: int(limit), Stdin: bytes.NewReader(content)}) {
				var bad *DocumentError
				switch {
				case err == nil:
					seen = append(seen, fmt.Sprint(doc.Line, doc.Offset, doc.ID, string(doc.Text)))
				case errors.As(err, &bad):
					seen = append(seen, err.Error())
					doc.Line = bad.Line
					ended = ended || bad.Kind == BadStream
				default:
					ended = true
					continue
				}
				if doc.Line <= line {
					t.Fatalf("line %d after line %d", doc.Line, line)
				}
				line = doc.Line
			}
			return seen, ended
		}
		plain, ended := see(content)
		if ended || len(content) > 1<<16 || bytes.HasPrefix(content, []byte("\x1f\x8b")) ||
			bytes.HasPrefix(content, []byte("\x28\xb5\x2f\xfd")) || len(content) > 0 && content[0]&0xf0 == 0x50 {
			return
		}
		for _, packed := range []string{gzipped(string(content)), zstded(string(content))} {
			if got, _ := see([]byte(packed)); !slices.Equal(got, plain) {
				t.Fatalf("%q: plain %q, compressed %q", content, plain, got)
			}
		}
	})
}
