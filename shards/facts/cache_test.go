package facts

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"mula/shards"
	"mula/shards/shardtest"
)

// A shard is opened again if one of its files was replaced, whatever tells the two files apart.
func TestReplacedFiles(t *testing.T) {
	shardtest.UserCache(t)
	dir := t.TempDir()
	shardtest.Write(t, dir, "a", shards.UInt16, 30, 40)
	shardtest.Age(t, dir)
	prefix := filepath.Join(dir, "a")
	c := Open()
	known := func() bool {
		if _, err := c.look(t.Context(), prefix); err != nil {
			t.Fatal(err)
		}
		_, _, ok := c.Find(prefix)
		return ok
	}
	if !known() {
		t.Fatal("the facts of an opened shard were not stored")
	}
	later := shardtest.LongAgo.Add(time.Minute)
	for what, change := range map[string]func(string) error{
		"time": func(path string) error { return os.Chtimes(path, later, later) },
		"inode": func(path string) error {
			data, err := os.ReadFile(path)
			return errors.Join(err, os.Rename(path, path+".old"), os.WriteFile(path, data, 0o644),
				os.Chtimes(path, shardtest.LongAgo, shardtest.LongAgo))
		},
		"now":     func(path string) error { now := time.Now(); return os.Chtimes(path, now, now) },
		"future":  func(path string) error { soon := time.Now().Add(time.Hour); return os.Chtimes(path, soon, soon) },
		"missing": os.Remove,
	} {
		for _, ending := range []string{".bin", ".idx", ".json"} {
			shardtest.Age(t, dir)
			if !known() {
				t.Fatalf("before %s of %s: no facts were stored", what, ending)
			}
			saved, err := os.ReadFile(prefix + ending)
			if err := errors.Join(err, change(prefix+ending)); err != nil {
				t.Fatal(err)
			}
			if _, _, ok := c.Find(prefix); ok {
				t.Errorf("%s of %s: was not noticed", what, ending)
			}
			if err := os.WriteFile(prefix+ending, saved, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The facts from the cache are the facts of the opened shard, also for the manifest of a shard that
// another program wrote, which names no tokenizer.
func TestFactsAreKept(t *testing.T) {
	shardtest.UserCache(t)
	dir := t.TempDir()
	shardtest.Write(t, dir, "own", shards.UInt16, 30, 40)
	shardtest.Write(t, dir, "foreign", shards.UInt16, 30, 40)
	shardtest.Write(t, dir, "bare", shards.UInt16, 30, 40)
	foreign, bare := filepath.Join(dir, "foreign"), filepath.Join(dir, "bare")
	if err := errors.Join(os.Remove(foreign+".json"), os.Remove(foreign+".sums"), os.Remove(bare+".json")); err != nil {
		t.Fatal(err)
	}
	if _, err := shards.WriteSidecar(t.Context(), foreign, foreign, func(string, int64, []byte) {},
		func() error { return nil }, func(int64) {}); err != nil {
		t.Fatal(err)
	}
	shardtest.Age(t, dir)
	for _, name := range []string{"own", "foreign", "bare"} {
		prefix := filepath.Join(dir, name)
		c := Open()
		if _, err := c.look(t.Context(), prefix); err != nil {
			t.Fatal(err)
		}
		c.Close()
		got, _, ok := Open().Find(prefix)
		s, err := shards.Open(prefix)
		if err != nil {
			t.Fatal(err)
		}
		if want := Of(s); !ok || got != want {
			t.Errorf("%s: the cache has %t %+v, the shard %+v", name, ok, got, want)
		}
		s.Close()
	}
}

// Pages that were written long ago are removed if the cache is too large.
func TestPrune(t *testing.T) {
	root := shardtest.UserCache(t)
	if err := os.MkdirAll(root, 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		path := filepath.Join(root, fmt.Sprint("page", i))
		at := shardtest.LongAgo.Add(-time.Duration(i) * time.Minute)
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, maxCacheBytes/4),
			os.Chtimes(path, at, at)); err != nil {
			t.Fatal(err)
		}
	}
	Open().prune()
	var left []string
	paths, err := filepath.Glob(filepath.Join(root, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		left = append(left, filepath.Base(path))
	}
	if diff := cmp.Diff([]string{"page0", "page1", "page2", "page3"}, left); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// A written page is read again.
func TestPage(t *testing.T) {
	hash := rapid.Custom(func(t *rapid.T) string { return fmt.Sprintf("%064x", rapid.Uint64().Draw(t, "hash")) })
	rapid.Check(t, func(t *rapid.T) {
		want := map[string]entry{}
		for range rapid.IntRange(0, 5).Draw(t, "entries") {
			var e entry
			for i := range e.Stamps {
				e.Stamps[i] = stamp{rapid.Int64().Draw(t, "size"), rapid.Int64().Draw(t, "changed"),
					rapid.Uint64().Draw(t, "inode")}
			}
			e.DType, e.Tokens, e.Documents = rapid.SampledFrom([]shards.DType{shards.UInt16,
				shards.Int32}).Draw(t, "dtype"), rapid.Int64().Draw(t, "tokens"), rapid.Int64().Draw(t, "documents")
			if e.Manifest = rapid.Bool().Draw(t, "manifest"); rapid.Bool().Draw(t, "tokenizer") {
				e.Tokenizer = Tokenizer{hash.Draw(t, "sha"), rapid.Int().Draw(t, "vocabulary"),
					rapid.Int64().Draw(t, "eod")}
			}
			if rapid.Bool().Draw(t, "hashes") {
				e.Bin, e.Index = hash.Draw(t, "bin"), hash.Draw(t, "idx")
			}
			e.indexed = rapid.Bool().Draw(t, "indexed")
			want[rapid.StringN(1, 20, 300).Draw(t, "name")] = e
		}
		text := (&page{entries: want}).text("/dir/")
		got := page{entries: map[string]entry{}}
		got.parse(text, "/dir/")
		if len(got.entries) != len(want) {
			t.Fatalf("%d entries, want %d", len(got.entries), len(want))
		}
		for name, e := range want {
			if got.entries[name] != e {
				t.Fatalf("%q: %+v, want %+v", name, got.entries[name], e)
			}
		}
		other := page{entries: map[string]entry{}}
		if other.parse(text, "/other/"); len(other.entries) != 0 {
			t.Fatal("the page of another directory was read")
		}
	})
}

// FuzzPage reads pages of any content, with a checksum that is right.
func FuzzPage(f *testing.F) {
	unhashed := strings.Repeat("0", 64)
	e := entry{Stamps{{1, 2, 3}}, 4, Facts{Manifest: true, Tokenizer: Tokenizer{unhashed, 5, 6}, Bin: unhashed,
		Index: unhashed}, true}
	text := (&page{entries: map[string]entry{"a": e, "b": {}}}).text("/")
	f.Add(text[:len(text)-4])
	f.Fuzz(func(t *testing.T, data []byte) {
		p := page{entries: map[string]entry{}}
		p.parse(binary.LittleEndian.AppendUint32(slices.Clone(data), crc32.ChecksumIEEE(data)), "/")
		if len(p.entries) > len(data) {
			t.Fatalf("%d entries of %d bytes", len(p.entries), len(data))
		}
	})
}

// A verification is valid for a week.
func TestVerificationExpires(t *testing.T) {
	shardtest.UserCache(t)
	dir := t.TempDir()
	shardtest.Write(t, dir, "a", shards.UInt16, 30, 40)
	shardtest.Age(t, dir)
	prefix := filepath.Join(dir, "a")
	c := Open()
	f, err := c.look(t.Context(), prefix)
	if err != nil {
		t.Fatal(err)
	}
	s, ok := StampsOf(prefix)
	if !ok || c.VerifiedAt(prefix, s) {
		t.Fatalf("stamps %v, %v, and the shard was verified", s, ok)
	}
	c.NoteVerified(prefix, s, f)
	if !c.VerifiedAt(prefix, s) {
		t.Error("the verification was not stored")
	}
	parent, name := filepath.Split(prefix)
	c.page(parent).note(name, entry{s, time.Now().Add(-verifiedFor - time.Hour).UnixNano(), f, false})
	if c.VerifiedAt(prefix, s) {
		t.Error("a verification of more than a week ago is valid")
	}
}
