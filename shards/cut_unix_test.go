//go:build unix

package shards

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/mapping"
)

// smallIndex is the open index of a shard of two documents, three sequences and seven tokens.
func smallIndex(t *testing.T) (x *Index, prefix string) {
	t.Helper()
	idx, bin := foreign(UInt16, [][][]uint32{{{1, 2}, {3}}, {{4, 5, 6, 7}}})
	prefix = place(t, idx, bin)
	x, err := OpenIndex(prefix)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x, prefix
}

// Lengths of documents that are read while their file is cut short end with an error.
func TestDocumentLengthsOfCutIndex(t *testing.T) {
	x, prefix := smallIndex(t)
	if err := os.Truncate(prefix+idxExt, 0); err != nil {
		t.Fatal(err)
	}
	var err error
	for _, err = range x.DocumentLengths() {
	}
	if err == nil || !strings.Contains(err.Error(), "cut short") {
		t.Errorf("%v; it is to say that the file was cut short", err)
	}
}

// A reader of a shard whose files are cut short while it is open ends with an error, also if the
// cut is in the last page of a file, which then reads as zeros. Or it returns the same as before
// the cut, if it does not need the missing bytes, or they were zeros before.
func TestReadersOfCutShard(t *testing.T) {
	for _, test := range []struct {
		ending string
		left   int64 // bytes of the file; negative: fewer than it has
	}{{binExt, 0}, {binExt, 100}, {binExt, -1}, {binExt, -10}, {idxExt, 0}, {idxExt, 40}, {idxExt, -1}, {idxExt, -10}} {
		for name, read := range map[string]func(s *Shard) (given string, err error){
			"Verify": func(s *Shard) (string, error) { return "", s.Verify(t.Context(), nil) },
			"VerifyTokens": func(s *Shard) (given string, err error) {
				_, err = s.VerifyTokens(t.Context(), nil, func(ids []uint32) error {
					given += fmt.Sprint(ids)
					return nil
				})
				return given, err
			},
			"Read": func(s *Shard) (string, error) {
				ids := make([]uint32, 1000)
				err := s.Read(ids, s.Tokens()-1000)
				return fmt.Sprint(ids), err
			},
			"Spans": func(s *Shard) (given string, err error) {
				err = s.Guard(func() error {
					for span, err := range s.Spans(0, s.Tokens()) {
						if err != nil {
							return err
						}
						given += fmt.Sprint(span)
					}
					return nil
				})
				return given, err
			},
		} {
			prefix := filepath.Join(t.TempDir(), "x")
			if err := write(prefix, 3, 400); err != nil {
				t.Fatal(err)
			}
			s := open(t, prefix)
			want, err := read(s)
			if err != nil {
				t.Fatal(err)
			}
			size := test.left
			if size < 0 {
				info, err := os.Stat(prefix + test.ending)
				if err != nil {
					t.Fatal(err)
				}
				size += info.Size()
			}
			if err := os.Truncate(prefix+test.ending, size); err != nil {
				t.Fatal(err)
			}
			given, err := read(s)
			if err != nil {
				continue
			}
			switch {
			case given != want:
				t.Errorf("%s of %s with %d bytes left: other than before, and no error", name, test.ending, size)
			case test.left != 0 && test.ending == idxExt && (name == "Read" || name == "VerifyTokens" ||
				name == "Spans" && test.left == -1):
			case test.left != 0 && test.ending == binExt && name == "Spans":
			default:
				t.Errorf("%s of %s with %d bytes left: no error", name, test.ending, size)
			}
		}
	}
}

// What reads the lengths of an index by hand is told of a cut wherever it is.
func TestGuardOfIndex(t *testing.T) {
	for _, left := range []int64{0, 40, 60, 80} {
		x, prefix := smallIndex(t)
		read := func() error {
			return x.Guard(func() error {
				if len(x.Lengths()) != 12 || x.Lengths()[0] > 2 {
					t.Error("the lengths are others")
				}
				return nil
			})
		}
		if err := read(); err != nil {
			t.Error(err)
		}
		if err := os.Truncate(prefix+idxExt, left); err != nil {
			t.Fatal(err)
		}
		if err := read(); !errors.Is(err, mapping.ErrUnreadable) {
			t.Errorf("%d bytes left: %v", left, err)
		}
	}
}

// Whether a shard was replaced is seen from any of its files.
func TestReplaced(t *testing.T) {
	for _, ending := range []string{binExt, idxExt, sumsExt} {
		prefix := filepath.Join(t.TempDir(), "x")
		if err := write(prefix, 3, 12); err != nil {
			t.Fatal(err)
		}
		s := open(t, prefix)
		if s.Replaced() {
			t.Error("replaced by nobody")
		}
		data, err := os.ReadFile(prefix + ending)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(prefix+".new", data, 0o666),
			os.Rename(prefix+".new", prefix+ending)); err != nil {
			t.Fatal(err)
		}
		if !s.Replaced() {
			t.Errorf("%s was replaced", ending)
		}
		if err := s.Read(make([]uint32, s.Tokens()), 0); err != nil { // the open files go on
			t.Error(err)
		}
	}
}

// Sums that are cut short before tokens are compared with them are an error about the sums.
func TestSumsOfCutFile(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "x")
	if err := write(prefix, 700, 400); err != nil {
		t.Fatal(err)
	}
	for _, left := range []int64{0, 30} {
		s := open(t, prefix)
		whole, err := os.ReadFile(prefix + sumsExt)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(prefix+sumsExt, left); err != nil {
			t.Fatal(err)
		}
		if err := s.Read(make([]uint32, 10), s.Tokens()-10); err == nil ||
			!strings.Contains(err.Error(), prefix+sumsExt) {
			t.Errorf("%d bytes of the sums are left: %v", left, err)
		}
		if err := os.WriteFile(prefix+sumsExt, whole, 0o666); err != nil {
			t.Fatal(err)
		}
	}
}

// Zeros after the cut of an index file are not accepted as numbers.
func TestNumbersOfCutIndex(t *testing.T) {
	x, prefix := smallIndex(t)
	if start, err := x.SequenceStart(2); start != 3 || err != nil {
		t.Fatalf("%d, %v", start, err)
	}
	if length, err := x.SequenceLength(2); length != 4 || err != nil {
		t.Fatalf("%d, %v", length, err)
	}
	if err := os.Truncate(prefix+idxExt, idxHeaderSize); err != nil {
		t.Fatal(err)
	}
	for what, read := range map[string]func(int64) (int64, error){"start": x.SequenceStart,
		"length": x.SequenceLength} {
		err := mapping.Guard(func() error {
			_, err := read(2)
			return err
		})
		if err == nil || !strings.Contains(err.Error(), "cut short") {
			t.Errorf("%s: %v; it is to say that the file was cut short", what, err)
		}
	}
}
