//go:build unix

package blend

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/blend/fingerprint"
	"mula/internal/mapping"
	"mula/shards"
	"mula/shards/shardtest"
	"mula/shards/verifier"
)

// restore gives a file its content by renaming, as what replaces shards does.
func restore(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := errors.Join(os.WriteFile(path+".restored", content, 0o666),
		os.Rename(path+".restored", path)); err != nil {
		t.Fatal(err)
	}
}

// A shard that was cut short, or damaged, is read again after it has been restored, by processes
// that have the plan open. Another shard with its path is refused.
func TestShardIsReadAgainOnceRestored(t *testing.T) {
	for _, ending := range []string{".bin", ".idx"} {
		for _, summed := range []bool{true, false} {
			c := newCorpus(t)
			c.shard("good", shards.UInt16, shardtest.Lengths(200, 60)...)
			c.shard("bad", shards.UInt16, shardtest.Lengths(500, 60)...)
			if !summed {
				for _, file := range []string{"bad.sums", "bad.json", "bad.docs.arrow"} {
					if err := os.Remove(filepath.Join(c.dir, file)); err != nil {
						t.Fatal(err)
					}
				}
			}
			const text = "sequence_length: 32\nsources:\n  - {name: good, shards: [good]}\n  - {name: bad, shards: " +
				"[bad]}\n"
			d := c.open(text)
			want := tokensOf(t, c.open(text))
			read := func() error {
				if err := readAll(t.Context(), d, 0, d.Length()); err != nil {
					return err
				}
				tokens := make([]uint32, 33)
				for _, row := range want {
					s, err := d.Locate(row.position)
					if err == nil {
						err = d.Tokens(tokens, s)
					}
					if err != nil {
						return err
					}
					if fingerprint.SampleHash(tokens) != fingerprint.SampleHash(row.tokens) {
						t.Fatalf("position %d has other tokens", row.position)
					}
				}
				return nil
			}
			// One reader has the shard all the time.
			held, err := d.pool.Acquire(1)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(c.dir, "bad"+ending)
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(path, 0); err != nil {
				t.Fatal(err)
			}
			if err := read(); !errors.Is(err, mapping.ErrUnreadable) {
				t.Errorf("%s cut: %v", ending, err)
			}
			for range 2 {
				if err := read(); err == nil || !strings.Contains(err.Error(), path) {
					t.Errorf("%s still cut: %v", ending, err)
				}
			}
			restore(t, path, whole)
			if err := read(); err != nil {
				t.Errorf("%s restored: %v", ending, err)
			}
			if err := held.Read(make([]uint32, 1), 0); err == nil && ending == ".bin" {
				t.Error("the file that was cut short can be read")
			}
			d.pool.Release(1)

			// What takes the place of a shard that fails must be that shard.
			c.shard("other", shards.UInt16, shardtest.Lengths(499, 60)...)
			if err := os.Truncate(path, 0); err != nil {
				t.Fatal(err)
			}
			if err := read(); err == nil {
				t.Errorf("%s cut again: no error", ending)
			}
			for _, file := range shards.Files(filepath.Join(c.dir, "bad")) {
				data, err := os.ReadFile(filepath.Join(c.dir, "other"+filepath.Ext(file)))
				if filepath.Ext(file) == ".arrow" {
					data, err = os.ReadFile(filepath.Join(c.dir, "other.docs.arrow"))
				}
				if err != nil {
					t.Fatal(err)
				}
				restore(t, file, data)
			}
			if err := read(); err == nil || !strings.Contains(err.Error(), "was replaced since the plan was opened") {
				t.Errorf("another shard in its place: %v", err)
			}
		}
	}
}

// A sound shard whose name another file has taken is read as it was opened; one with a damaged
// block until that is met.
func TestReplacedShardIsReadUntilItFails(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, shardtest.Lengths(9000, 60)...)
	d := c.open("sequence_length: 32\nsources:\n  - {name: a, shards: [a]}\n")
	path := filepath.Join(c.dir, "a.bin")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	tokens := make([]uint32, 33)
	readAt := func(token int64) error { return d.Tokens(tokens, Sample{Source: 0, Shard: 0, Token: token}) }
	if err := readAt(0); err != nil {
		t.Fatal(err)
	}
	was := shardOf(t, d, 0, 0)
	restore(t, path, bytes.Repeat([]byte{1}, len(whole)))
	if err := readAt(0); err != nil || shardOf(t, d, 0, 0) != was {
		t.Errorf("a shard that nothing is wrong with was opened anew, or: %v", err)
	}
	restore(t, path, whole)
	if err := readAt(0); err != nil || shardOf(t, d, 0, 0) != was {
		t.Errorf("a shard that nothing is wrong with was opened anew, or: %v", err)
	}

	d = c.open("sequence_length: 32\nsources:\n  - {name: a, shards: [a]}\n")
	last := int64(len(whole)/2) - 33
	for _, check := range d.Checks { // whose blocks have been read
		s, err := d.Locate(check.Position)
		if err != nil {
			t.Fatal(err)
		}
		for s.Token/(1<<13) == last/(1<<13) || s.Token/(1<<13) == (last+32)/(1<<13) ||
			(s.Token+32)/(1<<13) == last/(1<<13) {
			last -= 1 << 13
		}
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{whole[2*last] ^ 1}, 2*last); err != nil {
		t.Fatal(err)
	}
	was = shardOf(t, d, 0, 0)
	for range 2 {
		if err := readAt(last); !errors.Is(err, shards.ErrCorrupt) || shardOf(t, d, 0, 0) != was {
			t.Errorf("a damaged block that nobody has restored: %v", err)
		}
	}
	restore(t, path, whole)
	if err := readAt(last); !errors.Is(err, shards.ErrCorrupt) {
		t.Errorf("the damaged file is still the open one: %v", err)
	}
	if err := readAt(last); err != nil {
		t.Errorf("restored: %v", err)
	}
}

// If complete files are verified, a shard without sums that was cut short is not read again,
// because its replacement was not verified. A shard with sums is read again.
func TestVerifiedShardIsReadAgainBySumsAlone(t *testing.T) {
	shardtest.UserCache(t)
	for _, summed := range []bool{true, false} {
		for _, first := range []bool{true, false} {
			c := newCorpus(t)
			c.shard("a", shards.UInt16, shardtest.Lengths(500, 60)...)
			if !summed {
				for _, file := range []string{"a.sums", "a.json", "a.docs.arrow"} {
					if err := os.Remove(filepath.Join(c.dir, file)); err != nil {
						t.Fatal(err)
					}
				}
			}
			d, err := Open(t.Context(), c.seal("sequence_length: 32\nsources:\n  - {name: a, shards: [a]}\n"),
				OpenOptions{Verify: &verifier.Options{First: first}})
			if err != nil {
				t.Fatal(err)
			}
			d.verifier.Await(t.Context(), 0)
			path, tokens := filepath.Join(c.dir, "a.bin"), make([]uint32, 33)
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Tokens(tokens, Sample{}); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(path, 0); err != nil {
				t.Fatal(err)
			}
			if err := d.Tokens(tokens, Sample{}); !errors.Is(err, mapping.ErrUnreadable) {
				t.Errorf("cut, sums %v, first %v: %v", summed, first, err)
			}
			restore(t, path, whole)
			if err := d.Tokens(tokens, Sample{}); summed && err != nil ||
				!summed && !errors.Is(err, mapping.ErrUnreadable) {
				t.Errorf("restored, sums %v, first %v: %v", summed, first, err)
			}
			d.Close()
		}
	}
}
