//go:build unix

package shards

import (
	"os"
	"strings"
	"testing"
)

// Lengths of documents that are read while their file is cut short end with an error.
func TestDocumentLengthsOfCutIndex(t *testing.T) {
	idx, bin := foreign(UInt16, [][][]uint32{{{1, 2}, {3}}, {{4, 5, 6, 7}}})
	prefix := place(t, idx, bin)
	x, err := OpenIndex(prefix)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if err := os.Truncate(prefix+idxExt, 0); err != nil {
		t.Fatal(err)
	}
	for _, err = range x.DocumentLengths() {
	}
	if err == nil || !strings.Contains(err.Error(), "cut short") {
		t.Errorf("%v; it is to say that the file was cut short", err)
	}
}
