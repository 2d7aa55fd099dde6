package shards

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"mula/internal/atomicfile"
)

// oldManifest is a manifest of format 1, as the program wrote it at commit 6cbb29a.
const oldManifest = `{
  "format": 1,
  "dtype": "uint16",
  "tokens": 12,
  "documents": 3,
  "tokenizer": {
    "sha256": "abababababababababababababababababababababababababababababababab",
    "vocab_size": 300,
    "eod": 299,
    "class_table": "tokenizers-0.23.3",
    "specials": "text"
  },
  "files": {
    "bin": {
      "bytes": 24,
      "sha256": "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd"
    }
  }
}
`

// Format 1 has no sum of its own, so its fields must all be there, once, known and in range.
func TestManifestFields(t *testing.T) {
	if m, err := parseManifest([]byte(oldManifest)); err != nil || m.Tokens != 12 || m.Tokenizer.EOD != 299 {
		t.Fatalf("%+v, %v", m, err)
	}
	hash := strings.Repeat("ab", 32)
	for _, c := range []struct{ old, new, want string }{
		{`"vocab_size"`, `"vocab_sized"`, `unknown field "vocab_sized"`},
		{`"vocab_size"`, `"Vocab_Size"`, `unknown field "Vocab_Size"`},
		{`    "vocab_size": 300,` + "\n", ``, `missing field tokenizer.vocab_size`},
		{`"vocab_size": 300`, `"vocab_size": null`, `missing field tokenizer.vocab_size`},
		{`"vocab_size": 300`, `"vocab_size": 300, "vocab_size": 200`, `duplicate field "vocab_size"`},
		{`"vocab_size": 300`, `"vocab_size": 65537`, `tokenizer.vocab_size: 65537 must be from 0 to 65536`},
		{`"vocab_size": 300`, `"vocab_size": -1`, `tokenizer.vocab_size: -1 must be from 0`},
		{`"eod": 299`, `"eod": -7`, `tokenizer.eod: -7 is neither an id nor -1`},
		{`"eod": 299`, `"eod": 4294967296`, `tokenizer.eod: 4294967296 is neither an id nor -1`},
		{`"eod": 299`, `"eod": 18446744073709551616`, `tokenizer.eod: want a whole number`},
		{`"` + hash, `"a` + hash, `tokenizer.sha256: "a` + hash + `" is not 64 hexadecimal digits`},
		{`"` + hash, `"AB` + hash[2:], `is not 64 hexadecimal digits`},
		{`"text"`, `"texts"`, `tokenizer.specials: "texts" must be "text" or "tokens"`},
		{"\"tokenizer\"", "\"token\xffizer\"", `unknown field "token`},
		{`"tokenizers-0.23.3"`, "\"tokenizers\xff\"", `is not valid UTF-8`},
		{`"dtype": "uint16"`, `"dtype": "int8"`, `dtype: "int8" is not a type of ids`},
		{`"tokens": 12`, `"tokens": -12`, `must not be negative`},
		{`"dtype"`, `"layout": "../x", "dtype"`, `layout: "../x" is not the name of a layout`},
		{`"bin"`, `"bun"`, `files: "bun" is not a file of a shard`},
		{`"bytes": 24`, `"bytes": -24`, `files.bin.bytes: -24 must not be negative`},
		{`"bytes": 24,`, ``, `files.bin: missing field bytes`},
		{`"cdcd`, `"cdcdcd`, `files.bin.sha256: `},
		{`"format": 1,`, `"format": 1, "checksum": "` + hash + `",`, `checksum: not allowed in format 1`},
		{`"format": 1,`, `"format": 2,`, `checksum: "" is not 64 hexadecimal digits`},
		{`"format": 1,`, `"format": 2, "checksum": "` + hash + `",`, `the checksum must be the last field`},
	} {
		text := strings.Replace(oldManifest, c.old, c.new, 1)
		if text == oldManifest {
			t.Fatalf("%s is not in the manifest", c.old)
		}
		_, err := parseManifest([]byte(text))
		if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s for %s: %v, want %s", c.new, c.old, err, c.want)
		}
	}
}

// Format 2 ends with a checksum of the file, which is found as the format page says; a change of
// any bit is an error.
func TestManifestChecksum(t *testing.T) {
	m, err := parseManifest([]byte(oldManifest))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "x.json")
	f, err := m.Seal(atomicfile.Files{}, path)
	if err := errors.Join(err, f.Publish()); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	zeroed := regexp.MustCompile(`("checksum": ")[0-9a-f]{64}`).ReplaceAll(data, []byte("${1}"+strings.Repeat("0", 64)))
	if sum := fmt.Sprintf("%x", sha256.Sum256(zeroed)); !strings.Contains(string(data), sum) || sum != m.Checksum ||
		!bytes.HasSuffix(data, []byte("\"\n}\n")) {
		t.Errorf("checksum %s, the bytes have %s", m.Checksum, sum)
	}
	read, err := ReadManifest(path)
	if err != nil || read.Format != 2 || read.Tokens != m.Tokens {
		t.Fatalf("%+v, %v", read, err)
	}
	for at := range data {
		for bit := range 8 {
			damaged := bytes.Clone(data)
			damaged[at] ^= 1 << bit
			if _, err := parseManifest(damaged); err == nil {
				t.Fatalf("bit %d of byte %d (%q) can be changed", bit, at, data[max(0, at-10):at+1])
			}
		}
	}
}
