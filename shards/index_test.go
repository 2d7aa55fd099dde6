package shards

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// An index is opened without a .bin file, of any of the eight element types, with or without modes.
func TestOpenIndex(t *testing.T) {
	le := binary.LittleEndian
	lengths := []uint32{3, 0, 5, 1<<31 - 1}
	for code, size := range map[byte]uint64{1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2} {
		for _, modes := range []int{0, len(lengths)} {
			idx := append([]byte("MMIDIDX\x00\x00"), 1, 0, 0, 0, 0, 0, 0, 0, code)
			idx = le.AppendUint64(le.AppendUint64(idx, 4), 3)
			var flat []byte
			for _, n := range lengths {
				flat = le.AppendUint32(flat, n)
			}
			idx = append(idx, flat...)
			for _, start := range []uint64{0, 3, 3, 8} {
				idx = le.AppendUint64(idx, start*size)
			}
			for _, end := range []uint64{0, 1, 4} {
				idx = le.AppendUint64(idx, end)
			}
			path := filepath.Join(t.TempDir(), "x.idx")
			if err := os.WriteFile(path, append(idx, make([]byte, modes)...), 0o644); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{path, strings.TrimSuffix(path, ".idx")} {
				x, err := OpenIndex(name)
				if err != nil {
					t.Fatalf("type %d: %v", code, err)
				}
				info, err := os.Stat(path)
				if err != nil {
					t.Fatal(err)
				}
				if x.Path() != path || x.Size() != info.Size() || !x.ModTime().Equal(info.ModTime()) ||
					x.DType().Code() != code || x.DType().Size() != int(size) ||
					x.Sequences() != 4 || x.Documents() != 2 || x.Elements() != 8+1<<31-1 ||
					x.Multimodal() != (modes > 0) || !slices.Equal(x.Lengths(), flat) {
					t.Errorf("type %d: %s of %d bytes, %v, %d sequences, %d documents, %d elements", code, x.Path(),
						x.Size(), x.DType(), x.Sequences(),
						x.Documents(), x.Elements())
				}
				for sequence, want := range []int64{0, 3, 3, 8, 8 + 1<<31 - 1} {
					if start, err := x.SequenceStart(int64(sequence)); start != want || err != nil {
						t.Errorf("type %d: sequence %d starts at %d, %v", code, sequence, start, err)
					}
				}
				for _, sequence := range []int64{-1, 5} {
					if _, err := x.SequenceStart(sequence); err == nil || errors.Is(err, ErrCorrupt) {
						t.Errorf("sequence %d: %v", sequence, err)
					}
				}
				if err := x.Check(t.Context()); err != nil {
					t.Error(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				if err := x.Check(ctx); !errors.Is(err, context.Canceled) {
					t.Errorf("after cancellation: %v", err)
				}
				if err := x.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	}
	if _, err := OpenIndex(filepath.Join(t.TempDir(), "x")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
}

// The length of a document is the sum of the lengths of its sequences. A document that contradicts
// them is named.
func TestDocumentLengths(t *testing.T) {
	idx, bin := foreign(UInt16, [][][]uint32{{{1, 2}, {3}}, {}, {{4, 5, 6, 7}}, {{8}, {}}})
	prefix := place(t, idx, bin)
	read := func() (list []int64, err error) {
		x, err := OpenIndex(prefix)
		if err != nil {
			return nil, err
		}
		defer x.Close()
		for n, err := range x.DocumentLengths() {
			if err != nil {
				return list, err
			}
			list = append(list, n)
		}
		return list, nil
	}
	if got, err := read(); err != nil || !slices.Equal(got, []int64{3, 0, 4, 1}) {
		t.Errorf("%v, %v", got, err)
	}
	const starts, ends = idxHeaderSize + 4*5, idxHeaderSize + 4*5 + 8*5
	for what, change := range map[string]func(idx []byte){
		// of sequence 2, in document 2
		"a start":             func(idx []byte) { binary.LittleEndian.PutUint64(idx[starts+8*2:], 12) },
		"a length":            func(idx []byte) { binary.LittleEndian.PutUint32(idx[idxHeaderSize+4:], 2) },
		"a negative length":   func(idx []byte) { binary.LittleEndian.PutUint32(idx[idxHeaderSize+4:], 1<<31) },
		"an end too far":      func(idx []byte) { binary.LittleEndian.PutUint64(idx[ends+8:], 9) },
		"an end that returns": func(idx []byte) { binary.LittleEndian.PutUint64(idx[ends+8*2:], 1) },
	} {
		damaged := slices.Clone(idx)
		change(damaged)
		if err := os.WriteFile(prefix+idxExt, damaged, 0o644); err != nil {
			t.Fatal(err)
		}
		if got, err := read(); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v, %v", what, got, err)
		}
	}
}

// Each entry of the index that a reader of one document uses is compared with the others: a damaged
// start, length or document entry is an error of [Shard.Span] for the documents that it is about,
// and of no other.
func TestSpanComparesEntries(t *testing.T) {
	const documents = 5
	idx, bin := foreign(UInt16, [][][]uint32{{{1, 2}}, {{3, 4, 5}}, {{6}, {7, 8}}, {{9}}, {{10, 11}}})
	const sequences = 6
	for _, c := range []struct {
		name  string
		at    int // byte of the .idx
		wrong []int64
	}{
		{"length of sequence 1", 34 + 4*1, []int64{1}},
		{"start of sequence 1", 34 + 4*sequences + 8*1, []int64{0, 1}},
		{"start of sequence 4", 34 + 4*sequences + 8*4, []int64{2, 3}},
		// a sequence more for one and less for the other: only a hash can tell
		{"entry 3 of the documents", 34 + 12*sequences + 8*3, nil},
	} {
		damaged := bytes.Clone(idx)
		damaged[c.at] += 2
		if c.wrong == nil {
			damaged[c.at] -= 3
		}
		s := open(t, place(t, damaged, bin))
		for d := range int64(documents) {
			_, err := s.Span(d)
			if got, want := errors.Is(err, ErrCorrupt), slices.Contains(c.wrong, d); got != want {
				t.Errorf("%s: document %d: %v", c.name, d, err)
			}
		}
		if err := s.Check(t.Context()); c.wrong != nil && !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: Check: %v", c.name, err)
		}
		for sequence := range int64(sequences) {
			_, err := s.index.SequenceStart(sequence)
			if wrong := strings.HasSuffix(c.name, fmt.Sprint("sequence ", sequence)); wrong &&
				!errors.Is(err, ErrCorrupt) {
				t.Errorf("%s: SequenceStart(%d): %v", c.name, sequence, err)
			}
		}
	}
}
