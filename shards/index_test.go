package shards

import (
	"context"
	"encoding/binary"
	"errors"
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
				if x.Path() != path || x.Size() != info.Size() || !x.ModTime().Equal(info.ModTime()) || x.DType() != DType(code) || x.DType().Size() != int(size) ||
					x.Sequences() != 4 || x.Documents() != 2 || x.Elements() != 8+1<<31-1 || x.Multimodal() != (modes > 0) || !slices.Equal(x.Lengths(), flat) {
					t.Errorf("type %d: %s of %d bytes, %v, %d sequences, %d documents, %d elements", code, x.Path(), x.Size(), x.DType(), x.Sequences(),
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

// The lengths of documents are those of their sequences together; one that contradicts them is named.
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
		"a start":             func(idx []byte) { binary.LittleEndian.PutUint64(idx[starts+8*2:], 12) }, // of sequence 2, in document 2
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
