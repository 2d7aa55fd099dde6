package mds

import (
	"crypto/sha1"
	"encoding/binary"
	"encoding/hex"
	"testing"
)

// The bytes of a file by its description: two samples, of a text and of two bytes an id. The sum
// was computed by a separate program.
func TestFileOfSamples(t *testing.T) {
	limit := int64(1 << 26)
	c := config{ColumnEncodings: []string{"str", "bytes"}, ColumnNames: []string{"id", "tokens"},
		ColumnSizes: []*int{nil, nil}, Format: "mds",
		Hashes: []string{"sha1"}, SizeLimit: &limit, Version: 2}
	want := `{"column_encodings": ["str", "bytes"], "column_names": ["id", "tokens"], "column_sizes": [null, null], "compression": null, ` +
		`"format": "mds", "hashes": ["sha1"], "size_limit": 67108864, "version": 2}`
	if c.text() != want {
		t.Fatalf("the configuration is %s", c.text())
	}
	s := samples{config: c.text()}
	for _, sample := range []struct{ id, tokens string }{{"a", "\x01\x00"}, {"bb", "\x02\x00\x03\x00"}} {
		size := s.size(int64(8 + len(sample.id) + len(sample.tokens)))
		s.data = binary.LittleEndian.AppendUint32(s.data, uint32(len(sample.id)))
		s.data = binary.LittleEndian.AppendUint32(s.data, uint32(len(sample.tokens)))
		s.data = append(append(s.data, sample.id...), sample.tokens...)
		s.ends = append(s.ends, uint32(len(s.data)))
		if got := int64(len(s.head()) + len(s.data)); got != size {
			t.Errorf("the size was foretold as %d, it is %d", size, got)
		}
	}
	file := append(s.head(), s.data...)
	sum := sha1.Sum(file)
	if len(file) != 239 || hex.EncodeToString(sum[:]) != "84830b9f82d584e89603868e9a2233d9e012cf8a" {
		t.Errorf("%d bytes with SHA-1 %x: %x", len(file), sum, file)
	}
	for i, want := range []uint32{2, 214, 225, 239} {
		if got := binary.LittleEndian.Uint32(file[4*i:]); got != want {
			t.Errorf("number %d is %d, want %d", i, got, want)
		}
	}
}
