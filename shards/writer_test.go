package shards

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
)

var testInfo = TokenizerInfo{SHA256: strings.Repeat("ab", 32), VocabSize: 50280, EOD: 50279,
	ClassTable: "unicode 16.0.0", Specials: "text"}

// write makes a shard of documents whose tokens are all id; document d has d tokens.
func write(prefix string, id uint32, documents int) error {
	return writeOn(faultfs.New(nil), prefix, id, documents)
}

// writeOn is write on a file system.
func writeOn(fsys filesystem.FS, prefix string, id uint32, documents int) error {
	w, err := CreateOn(fsys, prefix, UInt16, testInfo)
	if err != nil {
		return err
	}
	defer w.Abort()
	for d := range documents {
		if err := w.Append(slices.Repeat([]uint32{id}, d), origin(int64(d))); err != nil {
			return err
		}
	}
	return w.Close()
}

// holds reports whether the shard is complete and equals the shard that write makes: every token,
// every origin, every hash.
func holds(prefix string, id uint32, documents int) error {
	s, err := Open(prefix)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.Verify(context.Background(), nil); err != nil {
		return err
	}
	if s.Manifest().Tokenizer != testInfo {
		return errors.New("another tokenizer")
	}
	if s.Documents() != int64(documents) || s.Tokens() != int64(documents*(documents-1)/2) {
		return errors.New("another number of documents or tokens")
	}
	tokens := make([]uint32, s.Tokens())
	if err := s.Read(tokens, 0); err != nil {
		return err
	}
	if slices.ContainsFunc(tokens, func(t uint32) bool { return t != id }) {
		return errors.New("other tokens")
	}
	origins, err := s.DocumentIDs(context.Background())
	if err != nil {
		return err
	}
	for d := range s.Documents() {
		if o, err := origins.Origin(d); err != nil || o != origin(d) {
			return errors.Join(errors.New("other origins"), err)
		}
	}
	return nil
}

func TestWriter(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "x")
	for _, documents := range []int{0, 1, 90, 5} { // each replaces the one before
		if err := write(prefix, 7, documents); err != nil {
			t.Fatal(err)
		}
		if err := holds(prefix, 7, documents); err != nil {
			t.Fatalf("%d documents: %v", documents, err)
		}
		if got := names(t, filepath.Dir(prefix)); !slices.Equal(got, []string{"x.bin", "x.docs.arrow", "x.idx",
			"x.json", "x.sums"}) {
			t.Fatalf("files %v", got)
		}
	}
	var read int64
	s := open(t, prefix)
	if err := s.Verify(t.Context(), func(n int64) { read += n }); err != nil {
		t.Fatal(err)
	}
	want := int64(0)
	for _, f := range s.Manifest().Files {
		want += f.Bytes
	}
	if read != want || want == 0 {
		t.Errorf("progress counted %d bytes of %d", read, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Verify(ctx, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// Files of several megabytes go to disk in many pieces; their lengths cross the writer's chunks.
func TestWriterStreams(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "x")
	w, err := Create(prefix, Int32, TokenizerInfo{EOD: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	const documents = 2*lengthChunk + 17
	tokens := make([]uint32, 0, 10000)
	for d := range int64(documents) {
		tokens = tokens[:0]
		for i := range d % 10 {
			tokens = append(tokens, uint32(d*10+i))
		}
		if d == documents/2 {
			for i := range uint32(10000) {
				tokens = append(tokens, i)
			}
		}
		if err := w.Append(tokens, DocumentOrigin{ID: "same", File: "-", Line: d + 1}); err != nil {
			t.Fatal(err)
		}
	}
	if w.Manifest() != nil {
		t.Error("a manifest before Close")
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	s := open(t, prefix)
	if err := s.Verify(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	for _, d := range []int64{9, 19, lengthChunk - 7, lengthChunk + 2, documents - 10} {
		got := make([]uint32, 2)
		first, err := s.DocumentStart(d)
		if err := errors.Join(err, s.Read(got, first+1)); err != nil {
			t.Fatal(err)
		}
		if got[0] != uint32(d*10+1) || got[1] != uint32(d*10+2) {
			t.Errorf("document %d begins with %v", d, got)
		}
	}
	origins, err := s.DocumentIDs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []int64{0, documentBatch - 1, documentBatch, documents - 1, 5} {
		if o, err := origins.Origin(d); err != nil || o.Line != d+1 {
			t.Errorf("document %d: %v, %v", d, o, err)
		}
	}
	if found, err := origins.Find(t.Context(), "same"); err != nil || len(found) != documents ||
		found[documentBatch] != documentBatch {
		t.Errorf("found %d documents, %v", len(found), err)
	}
	if w.Manifest().Files["bin"] != s.Manifest().Files["bin"] {
		t.Error("the writer's manifest is another")
	}
}

func TestWriterRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, test := range []struct {
		prefix string
		dtype  DType
		vocab  int
	}{{"x", Float32, 10}, {"x", UInt16, 65537}, {"x", UInt16, -1}, {"sub/x", UInt16, 10}, {"", UInt16, 10}} {
		prefix := filepath.Join(dir, test.prefix)
		if test.prefix == "" {
			prefix += "/"
		}
		if w, err := Create(prefix, test.dtype, TokenizerInfo{VocabSize: test.vocab}); err == nil {
			w.Abort()
			t.Errorf("%+v was accepted", test)
		}
	}

	for _, ending := range []string{".bin", ".idx", ".json", ".docs.arrow", ".sums"} {
		if w, err := Create(filepath.Join(dir, "x"+ending), UInt16, testInfo); err == nil ||
			!strings.Contains(err.Error(), "x"+ending+" ends like one of the files of a shard") {
			w.Abort()
			t.Errorf("a prefix with %s: %v", ending, err)
		}
	}

	for _, content := range []string{`{"id":"a","text":"a document, not a manifest"}`, "[1]"} {
		prefix := filepath.Join(dir, "documents")
		if err := os.WriteFile(prefix+".json", []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if w, err := Create(prefix, UInt16, testInfo); err == nil || !strings.Contains(err.Error(), "documents.json") {
			w.Abort()
			t.Errorf("%s would be replaced: %v", content, err)
		}
	}

	prefix := filepath.Join(dir, "x")
	w, err := Create(prefix, UInt16, TokenizerInfo{VocabSize: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	add := func(want string, o DocumentOrigin, tokens ...uint32) {
		t.Helper()
		switch err := w.Append(tokens, o); {
		case want == "" && err != nil:
			t.Error(err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("error %v does not say %q", err, want)
		}
	}
	add("", origin(0), 1, 99)
	add("token 1 of the document is 100; the largest id is 99", origin(1), 1, 100)
	add("token 0 of the document is 70000", origin(1), 70000)
	add("can store at most 4096", DocumentOrigin{ID: strings.Repeat("x", 4097)}, 1)
	add("is not UTF-8", DocumentOrigin{File: "\xff"}, 1)
	add("", origin(1), 5)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	add("already closed", origin(2), 1)
	if err := w.Close(); err == nil {
		t.Error("closed twice")
	}
	s := open(t, prefix) // what was refused left no trace
	got := make([]uint32, s.Tokens())
	if err := s.Read(got, 0); err != nil || !slices.Equal(got, []uint32{1, 99, 5}) || s.Documents() != 2 {
		t.Errorf("%v in %d documents, %v", got, s.Documents(), err)
	}
}

func TestAbortLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	w, err := Create(filepath.Join(dir, "x"), UInt16, testInfo)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Append([]uint32{1}, origin(0)); err != nil {
		t.Fatal(err)
	}
	w.Abort()
	w.Abort()
	if err := w.Close(); err == nil {
		t.Error("closed after Abort")
	}
	if got := names(t, dir); len(got) != 0 {
		t.Errorf("left behind %v", got)
	}
}

// Whichever operation fails, alone or with all after it: the old shard is whole, or there is none.
// Nothing is ever made of two, and no temporary file stays.
func TestEveryFault(t *testing.T) {
	t.Parallel()
	seen := make(map[faultfs.Op]int)
	for k := int64(1); ; k++ {
		for _, lasting := range []bool{false, true} {
			dir := t.TempDir()
			prefix := filepath.Join(dir, "x")
			if err := write(prefix, 1, 30); err != nil {
				t.Fatal(err)
			}
			nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC, After: lasting}
			err := writeOn(faultfs.New(nth.Fault), prefix, 2, 40)
			failed := nth.Failed()
			op, _, _ := strings.Cut(failed, " /")
			seen[faultfs.Op(op)]++
			if failed == "" { // k is past the last operation
				if err := errors.Join(err, holds(prefix, 2, 40)); err != nil {
					t.Fatal(err)
				}
				// Five files; the directory is synced before the first, before the last and after
				// it. Each with and without lasting.
				for op, n := range map[faultfs.Op]int{faultfs.Create: 5, faultfs.Write: 5, faultfs.Sync: 5,
					faultfs.Rename: 5, faultfs.SyncDir: 3, faultfs.Remove: 1} {
					if seen[op] < 2*n {
						t.Errorf("operation %q failed only %d times", op, seen[op])
					}
				}
				return
			}
			if !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("%s: the error is %v", failed, err)
			}
			// If the files cannot be removed either, the complete new shard may remain.
			complete := lasting && holds(prefix, 2, 40) == nil
			if err := holds(prefix, 1, 30); err != nil && !complete {
				if _, statErr := os.Stat(prefix + ".idx"); !errors.Is(statErr, fs.ErrNotExist) {
					t.Errorf("%s: the old shard is gone (%v), but x.idx is there", failed, err)
				}
				if s, err := Open(prefix); err == nil {
					s.Close()
					t.Errorf("%s: Open accepts what is there", failed)
				}
			}
			for _, name := range names(t, dir) {
				if strings.HasSuffix(name, atomicfile.TempSuffix) {
					t.Errorf("%s: left behind %s", failed, name)
				}
			}
		}
	}
}

// A process that dies before any of its file operations leaves the old shard, or none, or at the
// end the new shard. The test uses the state of the files before each operation.
func TestEveryCrash(t *testing.T) {
	t.Parallel()
	for _, replacing := range []bool{false, true} {
		dir := t.TempDir()
		prefix := filepath.Join(dir, "x")
		if replacing {
			if err := write(prefix, 1, 30); err != nil {
				t.Fatal(err)
			}
		}
		count := make(map[string]int)
		check := func(when string) string {
			if holds(prefix, 1, 30) == nil {
				return "old"
			}
			if holds(prefix, 2, 40) == nil {
				return "new"
			}
			s, err := Open(prefix)
			if err == nil {
				s.Close()
				t.Errorf("before %s: Open accepts a shard that is neither the old nor the new one", when)
			} else if !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("before %s: %v", when, err)
			}
			return "none"
		}
		err := writeOn(faultfs.New(func(op faultfs.Op, path string) error {
			if !op.Reads() {
				count[check(string(op)+" "+path)]++
			}
			return nil
		}), prefix, 2, 40)
		if err != nil || check("the end") != "new" {
			t.Fatal(err, check("the end"))
		}
		if count["none"] < 7 || count["new"] != 1 || (count["old"] > 0) != replacing {
			t.Errorf("replacing %v: seen %v", replacing, count)
		}
	}
}

// A directory loses what was done in it since it was last synced, in any part: x.idx reaches the
// disk after all the others have, and before the first of them is replaced the older one is gone.
// An equal shard stays complete.
func TestPublishIsOrdered(t *testing.T) {
	t.Parallel()
	prefix := filepath.Join(t.TempDir(), "x")
	for i, older := range []string{"none", "equal", "another"} {
		var got []string
		err := writeOn(faultfs.New(func(op faultfs.Op, path string) error {
			switch op {
			case faultfs.Remove, faultfs.Rename:
				got = append(got, string(op)+" "+filepath.Base(path))
			case faultfs.SyncDir:
				got = append(got, "sync")
			}
			return nil
		}), prefix, 2, []int{40, 40, 41}[i])
		if err != nil {
			t.Fatal(err)
		}
		want := "sync, rename x.bin, rename x.docs.arrow, rename x.sums, rename x.json, sync, rename x.idx, sync"
		if older == "another" {
			want = "remove x.idx, " + want
		}
		if s := strings.Join(got, ", "); s != want {
			t.Errorf("older shard: %s: %s", older, s)
		}
	}
}

// A manifest that could not be read is not written.
func TestSealRefusesTooLarge(t *testing.T) {
	dir := t.TempDir()
	m := &Manifest{Layout: "mds", DType: "uint16", Files: make(map[string]FileInfo)}
	sum := strings.Repeat("0", 64)
	refused := 0
	for n := range 8000 {
		m.Files[fmt.Sprintf("shard.%05d.mds", n)] = FileInfo{1 << 26, sum}
		if n < 6000 || n%100 > 0 {
			continue
		}
		path := filepath.Join(dir, "x.json")
		f, err := m.Seal(atomicfile.Files{}, path)
		if err != nil {
			refused++
			continue
		}
		if err := f.Publish(); err != nil {
			t.Fatal(err)
		}
		if back, err := ReadManifest(path); err != nil || len(back.Files) != n+1 {
			t.Fatalf("%d files: %v", n+1, err)
		}
	}
	if refused == 0 || refused == 20 {
		t.Errorf("%d of 20 manifests are refused", refused)
	}
	if got := names(t, dir); len(got) != 1 {
		t.Errorf("left behind %v", got)
	}
}

// Equal input gives equal bytes.
func TestWriterDeterministic(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := errors.Join(write(a, 3, 50), write(b, 3, 50)); err != nil {
		t.Fatal(err)
	}
	for _, ext := range []string{".bin", ".idx", ".json", ".docs.arrow", ".sums"} {
		if !slices.Equal(readFile(t, a+ext), readFile(t, b+ext)) {
			t.Errorf("%s differs", ext)
		}
	}
}

// A byte changed anywhere is found by Verify or before it by Open, and the message names the file.
func TestVerifyFindsEveryChange(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "x")
	if err := write(prefix, 3, 12); err != nil {
		t.Fatal(err)
	}
	for _, ext := range []string{".bin", ".idx", ".docs.arrow", ".sums"} {
		data := readFile(t, prefix+ext)
		for at := 0; at < len(data); at += 1 + len(data)/40 {
			damaged := slices.Clone(data)
			damaged[at] ^= 0x10
			if err := os.WriteFile(prefix+ext, damaged, 0o644); err != nil {
				t.Fatal(err)
			}
			err := func() error {
				s, err := Open(prefix)
				if err != nil {
					return err
				}
				defer s.Close()
				return s.Verify(t.Context(), nil)
			}()
			if err == nil || !strings.Contains(err.Error(), prefix+ext) && !strings.Contains(err.Error(),
				prefix+".bin: expected") {
				t.Errorf("byte %d of %s changed: %v", at, ext, err)
			}
		}
		if err := os.WriteFile(prefix+ext, data[:len(data)-1], 0o644); err != nil {
			t.Fatal(err)
		}
		if err := holds(prefix, 3, 12); err == nil {
			t.Errorf("%s cut by a byte was accepted", ext)
		}
		if err := os.WriteFile(prefix+ext, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := holds(prefix, 3, 12); err != nil {
		t.Fatal(err)
	}
}

func TestManifestOfAnother(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := errors.Join(write(a, 3, 12), write(b, 3, 13)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(b+".json", a+".json"); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(a); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "a.json has tokens 78, ") {
		t.Errorf("another shard's manifest: %v", err)
	}
	for content, want := range map[string]string{
		`{"format": 4}`: "format 4 is not supported", `[`: "is not the manifest", "{}": "format 0 is not",
		strings.Repeat(" ",
			maxManifest+1): "more than",
	} {
		if err := os.WriteFile(a+".json", []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(a); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("manifest %.20q: %v", content, err)
		}
	}
	if err := errors.Join(os.Remove(a+".json"), write(a, 3, 12)); err != nil {
		t.Fatal(err)
	}
	m := open(t, a).Manifest()
	delete(m.Files, "docs")
	if f, err := m.Seal(atomicfile.Files{}, a+".json"); err != nil || f.Publish() != nil {
		t.Fatal(err)
	}
	if _, err := Open(a); !errors.Is(err, ErrCorrupt) ||
		!strings.Contains(err.Error(), "a.json has no SHA-256 of "+a+".docs.arrow") {
		t.Errorf("manifest without docs: %v", err)
	}
	if err := os.Remove(a + ".json"); err != nil {
		t.Fatal(err)
	}
	if s := open(t, a); s.Manifest() != nil {
		t.Error("a manifest without a file")
	}
}

func TestDocumentsMemory(t *testing.T) {
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer mem.AssertSize(t, 0)
	prefix := filepath.Join(t.TempDir(), "x")
	aborted, err := create(nil, prefix, UInt16, testInfo, mem)
	if err != nil {
		t.Fatal(err)
	}
	if err := aborted.Append(nil, origin(1)); err != nil {
		t.Fatal(err)
	}
	aborted.Abort()
	w, err := create(nil, prefix, UInt16, testInfo, mem)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for d := range int64(documentBatch + 9) {
		if err := w.Append([]uint32{1}, origin(d)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	origins := func(rows int64) (*Documents, error) {
		f, err := os.Open(prefix + docsExt)
		if err != nil {
			t.Fatal(err)
		}
		d := &Documents{path: f.Name(), rows: rows, file: f}
		if err := d.open(mem); err != nil {
			f.Close()
			return nil, err
		}
		return d, nil
	}
	d, err := origins(documentBatch + 9)
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range []int64{3, documentBatch + 8, 4, -1, documentBatch + 9} {
		o, err := d.Origin(doc)
		if outside := doc < 0 || doc > documentBatch+8; outside != (err != nil) || !outside && o != origin(doc) {
			t.Errorf("document %d: %v, %v", doc, o, err)
		}
	}
	for _, doc := range []int64{17, documentBatch + 2} {
		if found, err := d.Find(t.Context(), origin(doc).ID); err != nil || !slices.Equal(found, []int64{doc}) {
			t.Errorf("document %d found at %v, %v", doc, found, err)
		}
	}
	if found, err := d.Find(t.Context(), "nobody"); err != nil || found != nil {
		t.Errorf("found %v, %v", found, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Find(ctx, "nobody"); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	for _, rows := range []int64{1, documentBatch, documentBatch + 8, documentBatch + 10, 3 * documentBatch} {
		d, err := origins(rows)
		if err == nil {
			_, err = d.Origin(rows - 1)
			d.Close()
		}
		if !errors.Is(err, ErrCorrupt) {
			t.Errorf("origins of %d documents for a shard of %d: %v", documentBatch+9, rows, err)
		}
	}
}

// A sidecar that is not the manifest's, to the byte, is not read at all.
func TestDocumentsDamaged(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "x")
	if err := write(prefix, 1, 20); err != nil {
		t.Fatal(err)
	}
	s := open(t, prefix)
	whole := readFile(t, prefix+docsExt)
	for at := range len(whole) {
		damaged := slices.Clone(whole)
		damaged[at] ^= 0xff
		if err := os.WriteFile(prefix+docsExt, damaged, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := s.DocumentIDs(t.Context()); !errors.Is(err, ErrCorrupt) ||
			!strings.Contains(err.Error(), prefix+docsExt) {
			t.Fatalf("byte %d changed: %v", at, err)
		}
	}
	if err := os.WriteFile(prefix+docsExt, whole, 0o644); err != nil {
		t.Fatal(err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.DocumentIDs(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancelling: %v", err)
	}
	if _, err := s.DocumentIDs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(prefix + ".json"); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, prefix).DocumentIDs(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "without the manifest") {
		t.Errorf("without a manifest: %v", err)
	}
	if err := os.Remove(prefix + docsExt); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, prefix).DocumentIDs(t.Context()); !errors.Is(err, ErrNoDocuments) {
		t.Errorf("without a sidecar: %v", err)
	}
}

// Files of another shape than the format's are refused without a panic, even where a manifest
// vouches for them.
func TestDocumentsOfAnotherShape(t *testing.T) {
	for _, content := range []string{"", "ARROW1", strings.Repeat("ARROW1\x00\x00", 20), strings.Repeat("\xff", 500) +
		"\x10\x00\x00\x00ARROW1"} {
		path := filepath.Join(t.TempDir(), "x.docs.arrow")
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		d := &Documents{path: path, rows: 20, file: f}
		if err := d.open(memory.NewGoAllocator()); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%.20q: %v", content, err)
		}
	}
}

func names(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
