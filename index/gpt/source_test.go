package gpt

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/fixtures/vectors"
	"mula/shards"
)

func TestOpenTokens(t *testing.T) {
	dir := t.TempDir()
	idx := vectors.Index([]int32{5, 7})
	write := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("a.idx", idx)
	write("b.idx", idx)
	write("b.bin", make([]byte, 24))
	write("c.idx", idx)
	write("c.bin", make([]byte, 22))
	for _, prefix := range []string{"a", "b"} { // without and with a .bin
		x, err := OpenTokens(dir, prefix)
		if err != nil {
			t.Fatal(err)
		}
		if x.Sequences() != 2 {
			t.Errorf("%s: %d sequences", prefix, x.Sequences())
		}
		x.Close()
	}
	for prefix, want := range map[string]string{
		"c":     "expected 24 bytes",
		"a.idx": "remove .idx",
		"b.bin": "remove .bin",
		"d":     "is relative to " + dir,
		// Prefixes come from files, too, which the command does not look into.
		"s3://b/x": "s3://b/x is a URL",
	} {
		_, err := OpenTokens(dir, prefix)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", prefix, err, want)
		}
		if prefix == "c" && !errors.Is(err, shards.ErrCorrupt) {
			t.Errorf("%v is no ErrCorrupt", err)
		}
	}
}
