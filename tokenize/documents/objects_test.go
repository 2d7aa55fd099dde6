package documents

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// upload writes objects into a store in memory. It returns the URL of the store.
func upload(t *testing.T, files map[string]string) objectstest.Place {
	t.Helper()
	store := objectstest.S3(t)
	for name, content := range files {
		if err := objects.WriteFile(t.Context(), store.URL+name, []byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	return store
}

// Objects have the documents of the same files, cut anywhere, with broken connections.
func TestObjects(t *testing.T) {
	files := make(map[string]string)
	options := make(map[string]Options)
	for _, f := range columnFiles(t) {
		files[f.Name] = string(f.File)
		options[f.Name] = Options{Text: f.Text, ID: f.ID}
	}
	var lines strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&lines, `{"id":"d%d","text":%q}`+"\n", i, strings.Repeat("word ", i%97))
	}
	for name, content := range map[string]string{"a.jsonl": lines.String(), "b.jsonl.gz": gzipped(lines.String()),
		"c.jsonl.zst": zstded(lines.String()), "d.txt": "one text", "e.json": `[{"text":"x"},{"text":"y"}]`} {
		files[name] = content
	}
	store := upload(t, files)
	random := rand.New(rand.NewPCG(1, 2))
	for name, content := range files {
		local := put(t, name, content)
		for _, target := range []int64{1, 300, 1 << 40} {
			if target < 300 && len(content) > 10_000 {
				target = 20_000
			}
			want := seen(t, local, options[name], target)
			cut := 20_000 + random.IntN(50_000)
			store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
				if r.Method != http.MethodGet {
					return objectstest.Fault{}
				}
				return objectstest.Fault{Cut: cut}
			})
			if got := seen(t, store.URL+name, options[name], target); !slices.Equal(got, want) {
				t.Errorf("%s, pieces of %d bytes: %d lines, want %d: %.500q, want %.500q", name, target, len(got),
					len(want), got, want)
			}
			store.Proxy.Disturb(nil)
		}
	}
}

// Of a Parquet object only the metadata and the columns of text and id are read.
func TestObjectColumns(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "other", Type: arrow.BinaryTypes.Binary},
		{Name: "text", Type: arrow.BinaryTypes.String}, {Name: "more", Type: arrow.BinaryTypes.Binary}}, nil)
	var file bytes.Buffer
	w, err := pqarrow.NewFileWriter(schema, &file, parquet.NewWriterProperties(parquet.WithDictionaryDefault(false)),
		pqarrow.DefaultWriterProps())
	if err != nil {
		t.Fatal(err)
	}
	const groups, rows = 4, 100
	noise := make([]byte, 10_000)
	chacha := rand.NewChaCha8([32]byte{1})
	text := int64(0)
	for g := range groups {
		b := array.NewRecordBuilder(memory.NewGoAllocator(), schema)
		for r := range rows {
			chacha.Read(noise)
			b.Field(0).(*array.BinaryBuilder).Append(noise)
			s := fmt.Sprintf("%d %x", g*rows+r, noise[:500])
			text += int64(len(s))
			b.Field(1).(*array.StringBuilder).Append(s)
			b.Field(2).(*array.BinaryBuilder).Append(noise)
		}
		if err := w.Write(b.NewRecordBatch()); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	store := upload(t, map[string]string{"x.parquet": file.String()})
	for _, target := range []int64{1, 1 << 40} {
		before := objects.Count()
		got := seen(t, store.URL+"x.parquet", Options{}, target)
		if len(got) != groups*rows || !strings.Contains(got[399], `"399 `) {
			t.Fatalf("%d documents, the last is %.100s", len(got), got[len(got)-1])
		}
		after := objects.Count()
		read, requests := after.BytesRead-before.BytesRead, after.Requests-before.Requests
		// For each piece: the facts, the first bytes, the metadata, and a request for each column.
		pieces := int64(1)
		if target == 1 {
			pieces = groups
		}
		if most := text + text/10 + (pieces+1)*2*smallReads; read > most || requests > 3*(pieces+1)+groups {
			t.Errorf("%d pieces: %d bytes in %d requests, want at most %d of the file's %d bytes", pieces, read,
				requests, most, file.Len())
		}
	}
}

// A folder and a pattern in a store have the files, names and order of the same folder on disk.
func TestFindObjects(t *testing.T) {
	names := []string{"c/a.jsonl", "c/a/b.jsonl", "c/a-b.jsonl", "c/README", "c/.hidden.jsonl", "c/.git/x.jsonl",
		"c/.git/y/z.jsonl", "c/sub/f.md", "c/sub/h.txt", "d/a.jsonl", "d/x y.jsonl"}
	tree(t, names...)
	files := make(map[string]string)
	for _, name := range names {
		files[name] = ""
	}
	store := upload(t, files)
	for _, test := range []struct{ operands, globs, local string }{
		{"c", "", ""}, {"c/", "", ""}, {"c", "*.md", ""}, {"c", "sub/**", ""}, {"c d", "", ""},
		{"c/README d/a.jsonl", "", ""},
		{"c/*.jsonl d/a.jsonl", "", "c/a-b.jsonl c/a.jsonl d/a.jsonl"}, {"d/x?y.jsonl", "", "d/x y.jsonl"},
	} {
		local := strings.Fields(test.operands)
		if test.local == "d/x y.jsonl" {
			local = []string{test.local}
		} else if test.local != "" {
			local = strings.Fields(test.local)
		}
		want, err := Find(t.Context(), local, Auto, strings.Fields(test.globs))
		if err != nil {
			t.Fatal(err)
		}
		var urls []string
		for _, operand := range strings.Fields(test.operands) {
			urls = append(urls, store.URL+operand)
		}
		got, err := Find(t.Context(), urls, Auto, strings.Fields(test.globs))
		if err != nil {
			t.Errorf("%s: %v", test.operands, err)
			continue
		}
		for i, input := range want.Inputs {
			want.Inputs[i] = store.URL + filepath.ToSlash(input)
			if want.Names[i] == filepath.ToSlash(input) { // the complete path
				want.Names[i] = want.Inputs[i]
			}
		}
		if fmt.Sprint(got.Unread) != fmt.Sprint(want.Unread) {
			t.Errorf("%s: unread %v, want %v", test.operands, got.Unread, want.Unread)
		}
		if !slices.Equal(got.Inputs, want.Inputs) || !slices.Equal(got.Names, want.Names) {
			t.Errorf("%s:\n%q\n%q\nwant\n%q\n%q", test.operands, got.Inputs, got.Names, want.Inputs, want.Names)
		}
	}
	for operand, want := range map[string]string{"none": "404", "none/": "no files of documents",
		"none*": "no object matches", "c/[": "malformed"} {
		if _, err := Find(t.Context(), []string{store.URL + operand}, Auto, nil); err == nil ||
			!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), store.URL+operand) {
			t.Errorf("%s: %v, want %q", operand, err, want)
		}
	}
	if _, err := Find(t.Context(), []string{store.URL + "none"}, Auto, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing object: %v", err)
	}
}

// The address of a file on a web server may have credentials, which are neither in documents nor in
// messages.
func TestWebInputs(t *testing.T) {
	server := httptest.NewServer(http.FileServer(http.Dir(filepath.Dir(put(t, "x.jsonl",
		`{"text":"a"}`+"\nbad\n")))))
	defer server.Close()
	clean := server.URL + "/x.jsonl"
	secret := strings.Replace(clean, "http://", "http://me:hidden@", 1) + "?sig=hidden"
	found, err := Find(t.Context(), []string{secret, "-"}, Auto, nil)
	if err != nil || !slices.Equal(found.Inputs, []string{secret, "-"}) || found.Names[0] != "x.jsonl" {
		t.Fatalf("%+v, %v", found, err)
	}
	for _, target := range []int64{1, 1 << 30} {
		pieces, err := Pieces(t.Context(), found.Inputs[:1], Options{}, target)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Open(t.Context(), pieces[0], Options{})
		if err != nil {
			t.Fatal(err)
		}
		doc, err := r.Next()
		if err != nil || doc.File != clean {
			t.Errorf("document %+v, %v", doc, err)
		}
		r.Close()
	}
	for _, test := range [][2]string{{secret, "x.jsonl:2"}, {strings.Replace(secret, "x.jsonl", "none", 1), "404"}} {
		for _, err := range ReadDocuments(t.Context(), []string{test[0]}, Options{}) {
			if err != nil && (strings.Contains(err.Error(), "hidden") || !strings.Contains(err.Error(), test[1])) {
				t.Errorf("error %q, want %q", err, test[1])
			}
		}
	}
	if _, err := Pieces(t.Context(), []string{secret}, Options{Format: Parquet}, 1); err == nil ||
		strings.Contains(err.Error(), "hidden") || !strings.Contains(err.Error(), clean) {
		t.Errorf("another format: %v", err)
	}
}
