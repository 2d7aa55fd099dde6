package blend

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/fixtures/vectors"
	"mula/shards"
	"mula/shards/facts"
	"mula/shards/shardtest"
)

// hollow writes a shard of documents of 2^30 tokens in a .bin file without a byte on the disk, with
// a manifest that it would have if its hashes were right, and gives its tokens.
func hollow(t testing.TB, prefix string, documents int) int64 {
	t.Helper()
	idx := vectors.Index(slices.Repeat([]int32{1 << 30}, documents))
	tokens := int64(documents) << 30
	m := shards.Manifest{Format: 1, DType: "uint16", Tokens: tokens, Documents: int64(documents),
		Tokenizer: shardtest.Tokenizer(), Files: map[string]shards.FileInfo{
			"bin": {Bytes: 2 * tokens, SHA256: unhashed}, "idx": {Bytes: int64(len(idx)),
				SHA256: fmt.Sprintf("%x", sha256.Sum256(idx))}, "docs": {SHA256: unhashed}}}
	text, err := json.Marshal(m)
	if err == nil {
		err = errors.Join(os.WriteFile(prefix+".idx", idx, 0o644), os.WriteFile(prefix+".json", text, 0o644),
			os.WriteFile(prefix+".bin", nil, 0o644),
			os.Truncate(prefix+".bin", 2*tokens))
	}
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// vast is a configuration over sources with the given numbers of shards, 1.5 · 2^30 tokens a shard.
func vast(t testing.TB, sources ...int) *Config {
	t.Helper()
	dir := t.TempDir()
	text := "sequence_length: 4096\nseed: 6198\nvalidation: 0.001\nsources:\n"
	for i, n := range sources {
		name := fmt.Sprint("source", i)
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		for k := range n {
			hollow(t, filepath.Join(dir, name, fmt.Sprintf("part-%05d", k)), 1+k%2)
		}
		text += fmt.Sprintf("  - {name: %s, shards: [%s/part-*.idx]}\n", name, name)
	}
	shardtest.Age(t, dir)
	c, err := ParseConfig([]byte(text), "blend.yaml", dir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A plan that was opened before opens without opening its shards, except the shards of the check
// values. Later damage of a shard is noticed when the shard is used.
func TestOpenLazily(t *testing.T) {
	shardtest.UserCache(t)
	c := vast(t, 100, 3, 2)
	p, err := Seal(t.Context(), c, SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	checked := map[int]bool{}
	for _, check := range p.Checks {
		if s, err := p.Locate(check.Position); err != nil {
			t.Fatal(err)
		} else if s.Source == 0 {
			checked[s.Shard] = true
		}
	}
	other := 0 // the last damaged shard
	for k := range p.Sources[0].Shards {
		if !checked[k] {
			flip(t, p.ShardPath(0, k)+".idx", 0)
			other = k
		}
	}
	shardtest.Age(t, c.dir)
	d, err := Open(t.Context(), p, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Tokens(make([]uint32, d.SequenceLength+1), Sample{Shard: other}); err == nil ||
		!strings.Contains(err.Error(), "not an MMIDIDX index") {
		t.Errorf("reading from the damaged shard: %v", err)
	}
}

// BenchmarkVast seals and opens a plan over 3,000 shards of seven sources, 4.8T tokens: at first,
// when nothing is known of them, and then.
func BenchmarkVast(b *testing.B) {
	c := vast(b, 2800, 80, 60, 40, 10, 8, 2)
	path := filepath.Join(c.dir, "plan.json")
	for _, name := range []string{"seal-first", "seal"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			defer processTime(b)()
			for range b.N {
				if name == "seal-first" {
					cache, _ := os.UserCacheDir()
					os.RemoveAll(filepath.Join(cache, "mula"))
				}
				p, err := Seal(context.Background(), c, SealOptions{})
				if err != nil {
					b.Fatal(err)
				}
				if err := p.Write(path); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("open", func(b *testing.B) {
		b.ReportAllocs()
		defer processTime(b)()
		for range b.N {
			p, err := ReadPlan(path)
			if err != nil {
				b.Fatal(err)
			}
			d, err := Open(context.Background(), p, OpenOptions{})
			if err != nil {
				b.Fatal(err)
			}
			d.Close()
		}
	})
}

// pagesOf lists the pages of a cache of shard facts.
func pagesOf(t testing.TB, root string) (paths []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(root, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// A plan is the same whether the facts come from the shards or from the cache. Changed
// shards are opened again.
func TestFactsFromCache(t *testing.T) {
	root := shardtest.UserCache(t)
	c, text := mixed(t)
	config, err := ParseConfig([]byte(text), "blend.yaml", c.dir)
	if err != nil {
		t.Fatal(err)
	}
	seal := func() *Plan {
		t.Helper()
		p, err := Seal(t.Context(), config, SealOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	fresh := seal()
	if pages := pagesOf(t, root); len(pages) != 0 {
		t.Fatalf("files that were changed a moment ago are in the cache: %v", pages)
	}
	shardtest.Age(t, c.dir)
	if p := seal(); p.Fingerprint() != fresh.Fingerprint() {
		t.Error("another plan of the same shards")
	}
	pages := pagesOf(t, root)
	if len(pages) == 0 {
		t.Fatal("nothing was noted")
	}
	if p := seal(); p.Fingerprint() != fresh.Fingerprint() {
		t.Error("another plan with the cache")
	}

	// The cache is read, and its values are used.
	path, err := absolutePath(fresh.ShardPath(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	l := facts.Open()
	f, before, ok := l.Find(path)
	if !ok {
		t.Fatal("a shard is not in the cache")
	}
	if s, err := shards.Open(path); err != nil || facts.Of(s) != f {
		t.Fatalf("%+v is in the cache, %v", f, err)
	} else {
		s.Close()
	}
	wrong := f
	wrong.Documents++
	l.Note(path, wrong, before)
	l.Close()
	if _, err := Open(t.Context(), fresh, OpenOptions{}); err == nil || !strings.Contains(err.Error(), "documents") {
		t.Errorf("with a wrong number of documents in the cache: %v", err)
	}

	// Damage of any kind, and pages that cannot be read or written, have the effect of an empty
	// cache.
	whole := map[string][]byte{}
	for _, page := range pages {
		if whole[page], err = os.ReadFile(page); err != nil {
			t.Fatal(err)
		}
	}
	open := func(what string) {
		t.Helper()
		d, err := Open(t.Context(), fresh, OpenOptions{})
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		d.Close()
	}
	for what, damage := range map[string]func([]byte) []byte{
		"empty":       func([]byte) []byte { return nil },
		"cut":         func(b []byte) []byte { return b[:len(b)/2] },
		"a byte":      func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"other files": func(b []byte) []byte { return []byte("not a page of shard facts") },
	} {
		for page, data := range whole {
			if err := os.WriteFile(page, damage(slices.Clone(data)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		open(what)
	}
	if err := errors.Join(os.RemoveAll(root), os.WriteFile(root, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	open("a file in place of the directory")
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	open("no directory at all")
}

func copyFile(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o644)
}
