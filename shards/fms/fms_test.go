package fms

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mula/internal/filesystem/faultfs"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/shards"
	"mula/shards/layout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func write(t rapid.TB, prefix string, docs [][]uint32) {
	t.Helper()
	w, err := Layout.NewShard(prefix, shards.TokenizerInfo{EOD: -1}, layout.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for _, d := range docs {
		if err := w.Append(d, shards.DocumentOrigin{ID: "x"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

func read(prefix string) (docs [][]uint32, err error) {
	r, err := open(prefix)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for d, err := range r.All(context.Background()) {
		if err != nil {
			return nil, err
		}
		docs = append(docs, slices.Clone(d.Tokens))
	}
	return docs, nil
}

// Arrow's own library reads the written files, and this package reads Arrow's files: with other
// columns before, and with other types of numbers.
func TestArrow(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		docs := rapid.SliceOfN(rapid.SliceOfN(rapid.Uint32Range(0, 120), 0, 40), 0, 20).Draw(t, "documents")
		prefix := filepath.Join(dir, "x")
		write(t, prefix, docs)
		data, err := os.ReadFile(prefix + ".arrow")
		if err != nil {
			t.Fatal(err)
		}
		r, err := ipc.NewFileReader(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		want := arrow.NewSchema([]arrow.Field{{Name: "tokens", Type: arrow.PrimitiveTypes.Uint32, Nullable: true}}, nil)
		if !r.Schema().Equal(want) || r.NumRecords() != len(docs) {
			t.Fatalf("%v, %d record batches", r.Schema(), r.NumRecords())
		}
		for i, d := range docs {
			batch, err := r.RecordBatchAt(i)
			if err != nil {
				t.Fatal(err)
			}
			if got := batch.Column(0).(*array.Uint32).Uint32Values(); !slices.Equal(got, d) ||
				batch.NumRows() != int64(len(d)) {
				t.Fatalf("batch %d is %v, want %v", i, got, d)
			}
			batch.Release()
		}

		element := rapid.SampledFrom([]arrow.DataType{arrow.PrimitiveTypes.Uint32, arrow.PrimitiveTypes.Int64,
			arrow.PrimitiveTypes.Uint8, arrow.PrimitiveTypes.Int16}).Draw(t, "type")
		fields := []arrow.Field{{Name: "tokens", Type: element}}
		if rapid.Bool().Draw(t, "other columns") {
			fields = append([]arrow.Field{{Name: "name", Type: arrow.BinaryTypes.String},
				{Name: "lists", Type: arrow.ListOf(arrow.PrimitiveTypes.Float64), Nullable: true}}, fields...)
		}
		schema := arrow.NewSchema(fields, nil)
		var file bytes.Buffer
		w, err := ipc.NewFileWriter(&file, ipc.WithSchema(schema))
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range docs {
			b := array.NewRecordBuilder(memory.NewGoAllocator(), schema)
			for _, id := range d {
				switch c := b.Field(len(fields) - 1).(type) {
				case *array.Uint32Builder:
					c.Append(id)
				case *array.Int64Builder:
					c.Append(int64(id))
				case *array.Uint8Builder:
					c.Append(uint8(id))
				case *array.Int16Builder:
					c.Append(int16(id))
				}
				if len(fields) > 1 {
					b.Field(0).(*array.StringBuilder).Append("n")
					l := b.Field(1).(*array.ListBuilder)
					l.Append(true)
					l.ValueBuilder().(*array.Float64Builder).Append(1)
				}
			}
			batch := b.NewRecordBatch()
			if err := w.Write(batch); err != nil {
				t.Fatal(err)
			}
			batch.Release()
			b.Release()
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		foreign := filepath.Join(dir, "foreign")
		if err := os.WriteFile(foreign+".arrow", file.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		if got, err := read(foreign); err != nil || !slices.EqualFunc(got, docs, slices.Equal) {
			t.Fatalf("%v: %v, %v, want %v", schema, got, err, docs)
		}
	})
}

func TestRefuses(t *testing.T) {
	dir := t.TempDir()
	put := func(schema *arrow.Schema, o ...ipc.Option) string {
		t.Helper()
		var file bytes.Buffer
		w, err := ipc.NewFileWriter(&file, append(o, ipc.WithSchema(schema))...)
		if err != nil {
			t.Fatal(err)
		}
		b := array.NewRecordBuilder(memory.NewGoAllocator(), schema)
		defer b.Release()
		if c, ok := b.Field(0).(*array.Int32Builder); ok {
			c.AppendValues([]int32{1, -5}, nil)
		}
		if c, ok := b.Field(0).(*array.Uint64Builder); ok {
			c.AppendValues([]uint64{1, 1 << 32}, nil)
		}
		if c, ok := b.Field(0).(*array.Uint16Builder); ok {
			c.AppendNull()
		}
		batch := b.NewRecordBatch()
		defer batch.Release()
		if err := w.Write(batch); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "x")
		if err := os.WriteFile(path+".arrow", file.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	column := func(name string, of arrow.DataType) *arrow.Schema {
		return arrow.NewSchema([]arrow.Field{{Name: name, Type: of, Nullable: true}}, nil)
	}
	for want, path := range map[string]func() string{
		"a negative number": func() string { return put(column("tokens", arrow.PrimitiveTypes.Int32)) },
		"4294967296 is not an id; the largest is 2^32-1": func() string {
			return put(column("tokens",
				arrow.PrimitiveTypes.Uint64))
		},
		"1 ids with 1 nulls":            func() string { return put(column("tokens", arrow.PrimitiveTypes.Uint16)) },
		"must have one integer per row": func() string { return put(column("tokens", arrow.PrimitiveTypes.Float32)) },
		`no column "tokens"`:            func() string { return put(column("ids", arrow.PrimitiveTypes.Uint32)) },
		"buffers are compressed": func() string {
			return put(column("tokens", arrow.PrimitiveTypes.Uint32),
				ipc.WithZstd())
		},
		"file does not end as an Arrow file": func() string {
			os.WriteFile(filepath.Join(dir, "x.arrow"), make([]byte, 100), 0o644)
			return filepath.Join(dir, "x")
		},
	} {
		if _, err := read(path()); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "x.arrow: byte ") {
			t.Errorf("error %v does not say %q and where", err, want)
		}
	}
}

// If any byte of a file is changed, reading returns the written ids or an error, and never panics.
func TestEveryByte(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "x")
	write(t, prefix, [][]uint32{{1, 2, 3}, {}, {4}})
	os.Remove(prefix + ".json")
	data, err := os.ReadFile(prefix + ".arrow")
	if err != nil {
		t.Fatal(err)
	}
	failed := 0
	for i := range data {
		changed := slices.Clone(data)
		changed[i] ^= []byte{1, 0x80, 0xff}[i%3]
		if err := os.WriteFile(prefix+".arrow", changed, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := read(prefix); err != nil {
			failed++
		}
	}
	if failed < 100 {
		t.Errorf("only %d changes were found out", failed)
	}
}

func FuzzReader(f *testing.F) {
	prefix := filepath.Join(f.TempDir(), "x")
	write(f, prefix, [][]uint32{{1, 2, 3}, {}, {4}})
	data, err := os.ReadFile(prefix + ".arrow")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	os.Remove(prefix + ".json")
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "x")
		if err := os.WriteFile(path+".arrow", data, 0o644); err != nil {
			t.Fatal(err)
		}
		docs, err := read(path)
		if err != nil && !strings.Contains(err.Error(), "x.arrow") {
			t.Errorf("an error that does not name the file: %v", err)
		}
		if total := len(slices.Concat(docs...)); err == nil && total > 64*len(data) {
			t.Errorf("%d ids in %d bytes", total, len(data))
		}
	})
}

func TestCounts(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"wiki/more", "code"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(root, "wiki", "b"), [][]uint32{{1, 2}, {3}})
	write(t, filepath.Join(root, "wiki", "more", "a"), [][]uint32{{1}})
	write(t, filepath.Join(root, "code", "c"), [][]uint32{{1, 2, 3}})
	os.Remove(filepath.Join(root, "code", "c.json")) // as of another program
	counts := func(folder, want string) string {
		t.Helper()
		path, err := writeCounts(t.Context(), nil, filepath.Join(root, folder))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != "dataset/filename,documents,tokens\n"+want {
			t.Errorf("%s: %q, %v", folder, got, err)
		}
		return path
	}
	first := counts("wiki", "/wiki/b.arrow,2,3\n/wiki/more/a.arrow,1,1\n")
	whole, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	for _, wrong := range []string{"/wiki/b.arrow,3,3\n", "/wiki/b.arrow,2,4\n", "/wiki/b.arrow,2,3\n"} {
		if err := os.WriteFile(first, []byte(strings.Join(countsHeader, ",")+"\n"+wrong), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := read(filepath.Join(root, "wiki", "b"))
		if right := strings.Contains(wrong, "2,3"); right && err != nil ||
			!right && (!errors.Is(err, shards.ErrCorrupt) || !strings.Contains(err.Error(), "found 2 and 3")) {
			t.Errorf("%s: %v", wrong, err)
		}
	}
	if err := os.WriteFile(first, whole, 0o644); err != nil {
		t.Fatal(err)
	}
	if filepath.Base(first) != "combined_counts.csv" {
		t.Errorf("it is called %s", first)
	}
	counts("code", "/code/c.arrow,1,3\n/wiki/b.arrow,2,3\n/wiki/more/a.arrow,1,1\n")
	// The existing file is updated; the rows of shards that were removed from a folder are removed.
	own := filepath.Join(root, "meta", "my_counts.csv")
	if err := os.Rename(first, own); err != nil {
		t.Fatal(err)
	}
	os.RemoveAll(filepath.Join(root, "wiki", "more"))
	if path := counts("wiki", "/code/c.arrow,1,3\n/wiki/b.arrow,2,3\n"); path != own {
		t.Errorf("written to %s", path)
	}
	for want, prepare := range map[string]func(){
		"a separate folder": func() {
			os.WriteFile(filepath.Join(root, "wiki", "x.docs.arrow"), make([]byte, 100),
				0o644)
		},
		"my_counts.csv:2": func() {
			os.WriteFile(own, []byte("dataset/filename,documents,tokens\na,b,c\n"),
				0o644)
		},
		"several files": func() { os.WriteFile(first, nil, 0o644) },
	} {
		before, _ := os.ReadFile(own)
		prepare()
		if _, err := writeCounts(t.Context(), nil, filepath.Join(root, "wiki")); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
		os.Remove(filepath.Join(root, "wiki", "x.docs.arrow"))
		os.Remove(first)
		os.WriteFile(own, before, 0o644)
	}
}

// Many that have published a shard at the same time, in folders of one root, count each other's;
// nothing stays that fms-fsdp would take for a file of counts, and what a killed process left does
// not either.
func TestCountsTogether(t *testing.T) {
	root := t.TempDir()
	var want []string
	var all sync.WaitGroup
	for n := range 6 {
		folder := filepath.Join(root, fmt.Sprintf("set%d", n/2))
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		want = append(want, fmt.Sprintf("/set%d/x%d.arrow,1,%d\n", n/2, n, n))
		all.Go(func() {
			w, err := Layout.NewShard(filepath.Join(folder, fmt.Sprintf("x%d", n)), shards.TokenizerInfo{EOD: -1},
				layout.Options{})
			if err == nil {
				defer w.Abort()
				err = errors.Join(w.Append(make([]uint32, n), shards.DocumentOrigin{}), w.Close())
			}
			if err == nil {
				_, err = writeCounts(t.Context(), nil, folder)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	got, err := os.ReadFile(filepath.Join(root, "meta", countsName))
	if err != nil || string(got) != "dataset/filename,documents,tokens\n"+strings.Join(want, "") {
		t.Errorf("%q, %v", got, err)
	}
	entries, err := os.ReadDir(filepath.Join(root, "meta"))
	if err != nil || len(entries) != 1 {
		t.Errorf("in the folder are %v, %v", entries, err)
	}
	// A crash before the renaming.
	fsys := faultfs.New(func(op faultfs.Op, path string) error {
		if op == faultfs.Rename {
			entries, _ := os.ReadDir(filepath.Join(root, "meta"))
			for _, e := range entries {
				if name := e.Name(); name != countsName && strings.Contains(name, "counts") &&
					strings.Contains(name, "csv") {
					t.Errorf("fms-fsdp would take %s for a file of counts", name)
				}
			}
		}
		return nil
	})
	if _, err := writeCounts(t.Context(), fsys, filepath.Join(root, "set0")); err != nil {
		t.Error(err)
	}
}

// Shards in a store are counted from their manifests. Processes that count at the same time count
// all shards. Shards that cannot be counted are named.
func TestCountsStore(t *testing.T) {
	store := objectstest.S3(t)
	store.Proxy.Disturb(objectstest.Repeat(19, map[int64]objectstest.Fault{
		4: {Status: http.StatusServiceUnavailable}, 9: {Cut: 10}, 15: {Drop: true}}))
	fsys := objectfs.New(t.Context(), nil, t.TempDir())
	put := func(prefix string, docs [][]uint32) error {
		w, err := Layout.NewShard(store.URL+prefix, shards.TokenizerInfo{EOD: -1}, layout.Options{FS: fsys})
		if err != nil {
			return err
		}
		defer w.Abort()
		for _, d := range docs {
			err = errors.Join(err, w.Append(d, shards.DocumentOrigin{ID: "x"}))
		}
		return errors.Join(err, w.Close())
	}
	counts := func(want string) {
		t.Helper()
		got, _, err := objects.ReadFile(t.Context(), store.URL+"meta/"+countsName, 1<<20)
		if err != nil || string(got) != "dataset/filename,documents,tokens\n"+want {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	if err := put("wiki/more/a", [][]uint32{{1, 2}, {3}}); err != nil {
		t.Fatal(err)
	}
	const other = "/other/x.arrow,7,8\n"
	if err := objects.WriteFile(t.Context(), store.URL+"meta/"+countsName,
		[]byte("dataset/filename,documents,tokens\n/wiki/gone.arrow,1,1\n"+other)); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for _, prefix := range []string{"wiki/b", "code/c"} {
		group.Go(func() {
			if err := put(prefix, [][]uint32{{1, 2, 3}}); err != nil {
				t.Error(err)
			}
			if path, err := published(t.Context(), fsys, store.URL+prefix); err != nil ||
				path != store.URL+"meta/"+countsName {
				t.Errorf("%s: %s, %v", prefix, path, err)
			}
		})
	}
	group.Wait()
	const right = "/code/c.arrow,1,3\n" + other + "/wiki/b.arrow,1,3\n/wiki/more/a.arrow,2,3\n"
	counts(right)
	if path, err := published(t.Context(), fsys, strings.TrimSuffix(store.URL, "/")+"/x"); err != nil || path != "" {
		t.Errorf("without a folder: %q, %v", path, err)
	}
	for _, test := range []struct{ name, want string }{
		{"wiki/foreign.arrow", "wiki/foreign.arrow has no manifest of layout fms"},
		{"wiki/x.docs.arrow", "wiki/x.docs.arrow describes the documents of another shard"},
		{"wiki/b.arrow", "wiki/b.arrow has 3 bytes, but " + store.URL + "wiki/b.json has"},
		{"meta/my_counts.csv", "several files of counts"},
	} {
		url := store.URL + test.name
		before, _, _ := objects.ReadFile(t.Context(), url, 1<<20)
		if err := objects.WriteFile(t.Context(), url, []byte("bad")); err != nil {
			t.Fatal(err)
		}
		if _, err := writeCounts(t.Context(), fsys, store.URL+"wiki"); err == nil || !strings.Contains(err.Error(),
			test.want) {
			t.Errorf("%s: %v; want %q", test.name, err, test.want)
		}
		err := objects.Remove(t.Context(), url)
		if before != nil {
			err = objects.WriteFile(t.Context(), url, before)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := writeCounts(t.Context(), fsys, store.URL+"wiki"); err != nil {
		t.Error(err)
	}
	counts(right)
}

// A document costs no memory but four bytes, until the footer is written.
func TestAppendAllocates(t *testing.T) {
	w, err := Layout.NewShard(filepath.Join(t.TempDir(), "x"), shards.TokenizerInfo{}, layout.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	tokens := make([]uint32, 101)
	origin := shards.DocumentOrigin{ID: "x"}
	// The mean of many documents: now and then one has a buffer grow.
	if n := testing.AllocsPerRun(5000, func() {
		if err := w.Append(tokens, origin); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations a document", n)
	}
}
