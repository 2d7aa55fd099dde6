package formats

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mula/internal/atomicfile"
	"mula/internal/filesystem/faultfs"
	"mula/shards"
	"mula/shards/datatrove"
	"mula/shards/dolma"
	"mula/shards/fms"
	"mula/shards/layout"
	"mula/shards/mds"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var all = All()

var testInfo = shards.TokenizerInfo{SHA256: strings.Repeat("ab", 32), VocabSize: 50280, EOD: 50279,
	ClassTable: "tokenizers-0.23.3", Specials: "text"}

// A document is a document that a test writes and expects back.
type document struct {
	Tokens []uint32
	Origin shards.DocumentOrigin
}

func write(l *layout.Layout, prefix string, info shards.TokenizerInfo, o Options, docs []document) (*shards.Manifest,
	error) {
	w, err := Create(l, prefix, info, o)
	if err != nil {
		return nil, err
	}
	defer w.Abort()
	for _, d := range docs {
		if err := w.Append(d.Tokens, d.Origin); err != nil {
			return nil, err
		}
	}
	if w.Manifest() != nil {
		return nil, errors.New("a manifest before Close")
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return w.Manifest(), nil
}

func read(path string) ([]document, error) {
	r, err := Open(path, layout.NoHints)
	if err != nil {
		return nil, err
	}
	var out []document
	for d, err := range r.All(context.Background()) {
		if err != nil {
			return out, errors.Join(err, r.Close())
		}
		out = append(out, document{slices.Clone(d.Tokens), d.Origin})
	}
	if n := r.Documents(); n >= 0 && n != int64(len(out)) {
		return nil, fmt.Errorf("%d documents, %d were given", n, len(out))
	}
	return out, r.Close()
}

func same(a, b []document) bool {
	return slices.EqualFunc(a, b, func(x, y document) bool {
		return slices.Equal(x.Tokens, y.Tokens) &&
			x.Origin == y.Origin
	})
}

// verify compares the files with the manifest.
func verify(l *layout.Layout, prefix string, m *shards.Manifest) error {
	for name, want := range m.Files {
		data, err := os.ReadFile(l.FilePath(prefix, name))
		if err != nil {
			return err
		}
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != want.SHA256 || int64(len(data)) != want.Bytes {
			return fmt.Errorf("%s is not what the manifest says", name)
		}
	}
	return nil
}

func documents(t *rapid.T, empty bool, vocabulary uint32) []document {
	least := 1
	if empty {
		least = 0
	}
	text := rapid.OneOf(rapid.StringN(0, 12, 40), rapid.SampledFrom([]string{"", `a,"b"`, ",", `"`, "части/é.jsonl",
		" x", "\x00", "\u2028"}))
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) document {
		return document{
			rapid.SliceOfN(rapid.Uint32Range(0, vocabulary-1), least, rapid.SampledFrom([]int{2, 20, 300}).Draw(t,
				"longest")).Draw(t, "tokens"),
			shards.DocumentOrigin{ID: text.Filter(oneLine).Draw(t, "id"), File: text.Filter(oneLine).Draw(t, "file"),
				Line: rapid.Int64Range(0, 1<<40).Draw(t, "line")},
		}
	}), 0, 12).Draw(t, "documents")
}

// oneLine are the texts that x.csv.gz keeps as they are.
func oneLine(s string) bool { return !strings.ContainsAny(s, "\r\n") }

// holdsEmpty are the layouts that hold documents without tokens.
func holdsEmpty(l *layout.Layout) bool { return l != &datatrove.Layout && l != &mds.Layout }

// Whatever is written in a layout, and from it in another, is read back: tokens, boundaries,
// origins, tokenizer.
func TestAnyToAny(t *testing.T) {
	dir := t.TempDir()
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		from, to := rapid.SampledFrom(all).Draw(t, "from"), rapid.SampledFrom(all).Draw(t, "to")
		info := testInfo
		info.VocabSize = rapid.SampledFrom([]int{200, 256, 257, 50280, 65499, 65500, 65536, 65537, 200000}).Draw(t,
			"vocabulary")
		o := Options{SizeLimit: rapid.SampledFrom([]int64{0, 1 << 10, 1 << 11}).Draw(t, "limit"),
			Compression: rapid.SampledFrom([]string{"", "zstd"}).Draw(t, "compression")}
		docs := documents(t, holdsEmpty(from) && holdsEmpty(to), uint32(info.VocabSize))
		a, b := filepath.Join(dir, fmt.Sprint("a", n)), filepath.Join(dir, fmt.Sprint("b", n))
		if _, err := write(from, a, info, o, docs); err != nil {
			t.Fatal(err)
		}
		first, err := read(a)
		if err != nil || !same(first, docs) {
			t.Fatalf("%s: %v, %v, want %v", from.Name, first, err, docs)
		}
		m, err := write(to, b, info, o, first)
		if err != nil {
			t.Fatal(err)
		}
		second, err := read(b)
		if err != nil || !same(second, docs) {
			t.Fatalf("%s by way of %s: %v, %v, want %v", to.Name, from.Name, second, err, docs)
		}
		if err := verify(to, b, m); err != nil {
			t.Fatal(err)
		}
		if m.Layout != to.ID || m.Tokenizer != info || m.Documents != int64(len(docs)) {
			t.Fatalf("manifest %+v", m)
		}
		for _, p := range []string{a, b} {
			paths, _ := filepath.Glob(p + "*")
			for _, path := range paths {
				os.RemoveAll(path)
			}
		}
	})
}

// A shard is found by its prefix, by each of its files and, of MDS, by its folder.
func TestDetect(t *testing.T) {
	docs := []document{{[]uint32{1, 2, 50279}, shards.DocumentOrigin{ID: "a", File: "f", Line: 1}},
		{[]uint32{3}, shards.DocumentOrigin{ID: "b", File: "f", Line: 2}}}
	for _, l := range all {
		dir := t.TempDir()
		prefix := filepath.Join(dir, "x")
		if _, err := write(l, prefix, testInfo, Options{}, docs); err != nil {
			t.Fatal(err)
		}
		paths := []string{prefix}
		if l == &mds.Layout {
			paths = append(paths, prefix+"/", prefix+"/index.json", prefix+"/mula.json", prefix+"/shard.00000.mds")
		} else {
			for _, known := range layouts {
				if known == l {
					for _, ending := range append([]string{known.Marker}, known.Own...) {
						paths = append(paths, prefix+ending)
					}
				}
			}
		}
		for _, path := range paths {
			if got, err := read(path); err != nil || !same(got, docs) {
				t.Errorf("%s: %v, %v", path, got, err)
			}
			if got, p, err := Detect(path); got != l || filepath.Clean(p) != prefix || err != nil {
				t.Errorf("%s: %v, %s, %v", path, got, p, err)
			}
		}
		if parsed, err := Named(l.Name); parsed != l || err != nil {
			t.Errorf("%s: %v, %v", l.Name, parsed, err)
		}
	}

	dir := t.TempDir()
	_, err := Open(filepath.Join(dir, "x"), layout.NoHints)
	for _, l := range layouts {
		if err == nil || !strings.Contains(err.Error(), filepath.Join(dir, "x")+l.Marker) {
			t.Errorf("the error %v does not say that %s was looked for", err, l.Marker)
		}
	}
	for _, ending := range []string{".idx", ".npy"} {
		if err := os.WriteFile(filepath.Join(dir, "x"+ending), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(filepath.Join(dir, "x"), layout.NoHints); err == nil ||
		!strings.Contains(err.Error(), "prefix of several shards") {
		t.Errorf("two shards of one prefix: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "y.arrow"), layout.NoHints); err == nil ||
		!strings.Contains(err.Error(), "y.arrow") {
		t.Errorf("a file that is not there: %v", err)
	}
	if _, err := Named("dlma"); err == nil || !strings.Contains(err.Error(), `did you mean "dolma"?`) {
		t.Errorf("a misspelt layout: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	refused := func(want string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
	}
	for i, l := range all {
		prefix := filepath.Join(dir, fmt.Sprint("x", i))
		w, err := Create(l, prefix, testInfo, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Append([]uint32{1, 2}, shards.DocumentOrigin{ID: "first"}); err != nil {
			t.Fatal(err)
		}
		refused("token 1 of the document is 50280; the largest id is 50279", w.Append([]uint32{1, 50280},
			shards.DocumentOrigin{}))
		refused("can store at most 4096", w.Append([]uint32{1}, shards.DocumentOrigin{ID: strings.Repeat("x", 4097)}))
		refused("is not UTF-8", w.Append([]uint32{1}, shards.DocumentOrigin{File: "\xff"}))
		empty := w.Append(nil, shards.DocumentOrigin{ID: "none", File: "f", Line: 7})
		if holdsEmpty(l) != (l.NoEmpty == "") {
			t.Errorf("%s: empty documents are refused because %q", l.Name, l.NoEmpty)
		}
		if holdsEmpty(l) && empty != nil {
			t.Errorf("%s: %v", l.Name, empty)
		} else if !holdsEmpty(l) {
			refused(`document "none" (f:7) has no tokens`, empty)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		refused("already closed", w.Append([]uint32{1}, shards.DocumentOrigin{}))
		refused("already closed", w.Close())
		docs, err := read(prefix) // what was refused left no trace
		if err != nil || !slices.Equal(docs[0].Tokens, []uint32{1, 2}) || holdsEmpty(l) != (len(docs) == 2) {
			t.Errorf("%s: %v, %v", l.Name, docs, err)
		}
		for _, other := range all {
			if other != l && other != &mds.Layout && l != &mds.Layout {
				_, err := Create(other, prefix, testInfo, Options{})
				refused("choose another prefix", err)
			}
		}
		_, err = Create(l, filepath.Join(dir, "missing", "x"), testInfo, Options{})
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s in a folder that is not there: %v", l.Name, err)
		}
		_, err = Create(l, filepath.Join(dir, "wide"), testInfo, Options{Width: 3})
		refused("bytes", err)
		_, err = Create(l, "", testInfo, Options{})
		refused("name", err)
		big := testInfo
		big.VocabSize = 1 << 17
		if l.Types[0] != shards.UInt32 {
			_, err = Create(l, filepath.Join(dir, "wide"), big, Options{Width: 2})
			refused("does not fit", err)
		}
		if entries, _ := filepath.Glob(filepath.Join(dir, "wide*")); len(entries) > 0 {
			t.Errorf("%s: left behind %v", l.Name, entries)
		}
	}
	_, err := Create(&mds.Layout, filepath.Join(dir, "y"), testInfo, Options{Compression: "br"})
	refused("allowed: zstd", err)
	_, err = Create(&mds.Layout, filepath.Join(dir, "y"), testInfo, Options{SizeLimit: 10})
	refused("size limit", err)
	_, err = Create(&datatrove.Layout, filepath.Join(dir, "y"), testInfo, Options{TokenizerName: "a|b"})
	refused("vertical bar", err)

	foreign := filepath.Join(dir, "foreign")
	if err := errors.Join(os.Mkdir(foreign, 0o755), os.WriteFile(filepath.Join(foreign, "index.json"),
		[]byte(`{"shards": [], "version": 2}`), 0o644)); err != nil {
		t.Fatal(err)
	}
	_, err = Create(&mds.Layout, foreign, testInfo, Options{})
	refused("another program wrote", err)
	if err := os.WriteFile(filepath.Join(dir, "docs.json"), []byte(`{"id":"a","text":"b"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, l := range []*layout.Layout{&dolma.Layout, &datatrove.Layout, &fms.Layout} {
		_, err = Create(l, filepath.Join(dir, "docs"), testInfo, Options{})
		refused("docs.json", err)
	}
}

func TestAbortLeavesNothing(t *testing.T) {
	for _, l := range all {
		dir := t.TempDir()
		w, err := Create(l, filepath.Join(dir, "x"), testInfo, Options{SizeLimit: 1 << 10})
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			if err := w.Append(make([]uint32, 100), shards.DocumentOrigin{}); err != nil {
				t.Fatal(err)
			}
		}
		w.Abort()
		w.Abort()
		if err := w.Close(); err == nil {
			t.Errorf("%s: closed after Abort", l.Name)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
			t.Errorf("%s: left behind %v, %v", l.Name, entries, err)
		}
	}
}

// A reader that stops early leaves nothing open, wherever in the shard it stops.
func TestReadersLeaveNothingOpen(t *testing.T) {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("this system does not say which files are open")
	}
	dir := t.TempDir()
	for _, l := range all {
		for _, compression := range []string{"", "zstd"} {
			if l != &mds.Layout && compression != "" {
				continue
			}
			prefix := filepath.Join(dir, l.Name+compression)
			var docs []document
			for d := range 40 {
				docs = append(docs, document{slices.Repeat([]uint32{7}, 60), shards.DocumentOrigin{ID: fmt.Sprint(d),
					File: "f", Line: 1}})
			}
			if _, err := write(l, prefix, testInfo, Options{SizeLimit: 1 << 10, Compression: compression},
				docs); err != nil {
				t.Fatal(err)
			}
			for enough := range 25 {
				r, err := Open(prefix, layout.NoHints)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				n := 0
				for _, err := range r.All(ctx) {
					if n++; n > enough {
						if cancel(); enough%2 == 0 {
							break
						}
					} else if err != nil {
						t.Fatal(err)
					}
				}
				cancel()
				if err := r.Close(); err != nil {
					t.Errorf("%s: %v", l.Name, err)
				}
			}
		}
	}
	now, err := os.ReadDir("/proc/self/fd")
	if err != nil || len(now) > len(files) {
		t.Errorf("%d files are open, %d were, %v", len(now), len(files), err)
	}
}

// Whichever file operation fails while an older shard is replaced, the path has the older shard,
// the new shard, or no shard that opens; and no temporary file stays.
func TestEveryFault(t *testing.T) {
	t.Parallel()
	docs := func(id uint32, n int) (out []document) {
		for d := range n {
			out = append(out, document{slices.Repeat([]uint32{id}, 60+d), shards.DocumentOrigin{ID: fmt.Sprint(id, d),
				File: "f", Line: int64(d)}})
		}
		return out
	}
	before, after, quick := docs(7, 30), docs(9, 11), t.TempDir()
	for _, l := range all {
		for _, compression := range []string{"", "zstd"} {
			if l != &mds.Layout && compression != "" {
				continue
			}
			states := make(map[string]int)
			for k := int64(1); ; k++ {
				dir := filepath.Join(quick, fmt.Sprint(l.Name, compression, k))
				if err := os.Mkdir(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				prefix := filepath.Join(dir, "x")
				o := Options{SizeLimit: 1 << 11, Compression: compression}
				if _, err := write(l, prefix, testInfo, Options{SizeLimit: 1 << 11}, before); err != nil {
					t.Fatal(err)
				}
				nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC}
				o.FS = faultfs.New(nth.Fault)
				m, err := write(l, prefix, testInfo, o, after)
				failed := nth.Failed()
				if failed == "" {
					got, readErr := read(prefix)
					if err != nil || readErr != nil || !same(got, after) {
						t.Fatalf("%s: without a fault: %v, %v", l.Name, err, readErr)
					}
					folder, want := dir, len(m.Files)+1
					if l == &mds.Layout {
						folder = prefix
					}
					entries, err := os.ReadDir(folder)
					if err != nil || len(entries) != want {
						t.Errorf("%s: %v, %v; want %d files", l.Name, entries, err, want)
					}
					break
				}
				if !errors.Is(err, syscall.ENOSPC) {
					t.Errorf("%s: %s failed: %v", l.Name, failed, err)
				}
				got, err := read(prefix)
				switch {
				case err != nil:
					states["closed"]++
				case same(got, before):
					states["older"]++
				case same(got, after):
					states["newer"]++
				default:
					t.Fatalf("%s: operation %d, %s, failed: a mixture, %v", l.Name, k, failed, got)
				}
				filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
					if strings.HasSuffix(path, atomicfile.TempSuffix) {
						t.Errorf("%s: operation %d, %s, failed: left behind %s", l.Name, k, failed, path)
					}
					return err
				})
				if _, err := write(l, prefix, testInfo, o, after); err != nil { // again
					t.Fatalf("%s: after operation %d, %s, failed: %v", l.Name, k, failed, err)
				}
				if got, err := read(prefix); err != nil || !same(got, after) {
					t.Fatalf("%s: after operation %d, %s, failed and all was written again: %v", l.Name, k, failed,
						err)
				}
			}
			if states["older"] < 5 || states["closed"] < 3 {
				t.Errorf("%s: states after a fault: %v", l.Name, states)
			}
		}
	}
}
