//go:build unix

package gpt

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sync/semaphore"

	"mula/internal/mapping"
)

// Lengths in a mapped file are read under the guard of the file, by the kernels and on all threads.
func TestLengthsOfCutFile(t *testing.T) {
	const documents = 100_000
	var data []byte
	for d := range uint32(documents) {
		data = binary.LittleEndian.AppendUint32(data, 1+d%100)
	}
	path := filepath.Join(t.TempDir(), "lengths")
	if err := os.WriteFile(path, data, 0o666); err != nil {
		t.Fatal(err)
	}
	file, err := mapping.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	d := Dataset{Lengths: file.Data, Guard: mapping.Guard, End: documents, SequenceLength: 50, ExtraToken: true,
		Samples: -1}
	l, err := d.Layout()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 4*documents/2); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Layout(); !errors.Is(err, mapping.ErrUnreadable) {
		t.Errorf("the layout: %v", err)
	}
	for _, large := range []int64{0, 1} { // 1: on all threads
		b := Builder{large: large}
		if err := b.Build(context.Background(), &d, l, Files{Documents: discard{}},
			semaphore.NewWeighted(4)); !errors.Is(err, mapping.ErrUnreadable) {
			t.Errorf("the build: %v", err)
		}
		b.Release()
	}
}
