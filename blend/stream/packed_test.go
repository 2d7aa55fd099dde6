package stream

import (
	"errors"
	"io"
	"reflect"
	"slices"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/array"

	"mula/blend/fingerprint"
	"mula/shards"
	"mula/shards/shardtest"
)

// A stream has the tokens, and the bounds of the pieces: by document_starts and lengths, with
// padding behind, on any rank.
func TestPackedStream(t *testing.T) {
	c := newCorpus(t)
	c.shard("web/part-0", shards.UInt16, shardtest.Lengths(40, 12)...)
	c.shard("web/part-1", shards.UInt16, append(shardtest.Lengths(60, 30), 0, 0)...)
	c.shard("web/part-2", shards.UInt16, 3)
	c.shard("wiki/a", shards.UInt16, shardtest.Lengths(45, 50)...)
	c.shard("code/x", shards.Int32, 17, 34, 1, 16, 0, 100, 18, 5)
	_, text := mixed(t)
	d := c.open("packing: best_fit\npad: 7\n" + text)
	const batch = 24
	next := map[int64]bool{}
	for rank := range 2 {
		s, err := New(t.Context(), d, Options{BatchSize: batch, Rank: rank, World: 2, Prefetch: 3})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		for {
			record, err := s.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if v, _ := record.Schema().Metadata().GetValue("mula.padding"); v != "7" {
				t.Fatalf("mula.padding is %q", v)
			}
			b, err := NewBatch(record)
			if err != nil {
				t.Fatal(err)
			}
			column, ok := record.Column(columnLengths).(*array.Int32)
			if !ok || record.ColumnName(columnLengths) != "lengths" || column.NullN() > 0 {
				t.Fatalf("the last column is %s", record.Schema().Field(columnLengths))
			}
			for row := range b.Rows() {
				sample, parts, err := d.Peek(t.Context(), b.Position(row))
				if err != nil {
					t.Fatal(err)
				}
				next[sample.Position] = true
				want := make([]uint32, 17)
				if err := d.Tokens(want, sample); err != nil {
					t.Fatal(err)
				}
				if got := b.AppendTokens(nil, row); !slices.Equal(got, want) {
					t.Fatalf("position %d: %v, want %v", sample.Position, got, want)
				}
				var starts []int32
				for _, p := range parts {
					starts = append(starts, int32(p.From))
				}
				end := parts[len(parts)-1].To
				if !slices.Equal(b.DocumentStarts(row), starts) || b.Length(row) != end ||
					int(column.Value(row)) != end || b.Window(row) != sample.Window {
					t.Fatalf("position %d: starts %v, length %d; want %v, %d", sample.Position, b.DocumentStarts(row),
						b.Length(row), starts, end)
				}
				for _, id := range want[end:] {
					if id != 7 {
						t.Fatalf("position %d is padded with %v", sample.Position, want[end:])
					}
				}
			}
			record.Release()
		}
	}
	if int64(len(next)) != d.Length()-24 { // 24 are skipped
		t.Errorf("%d rows of %d positions", len(next), d.Length())
	}
	// The fingerprints of steps equal the fingerprints of the samples.
	var h fingerprint.Hasher
	for position := range int64(batch) {
		s, err := d.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		tokens := make([]uint32, 17)
		if err := d.Tokens(tokens, s); err != nil {
			t.Fatal(err)
		}
		h.Add(tokens)
	}
	want := h.Step(0, 0)
	err := Hash(t.Context(), d, HashOptions{From: 0, To: 1, BatchSize: batch}, func(s fingerprint.StepHash) error {
		if !reflect.DeepEqual(s, want) {
			t.Errorf("step %+v, want %+v", s, want)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
