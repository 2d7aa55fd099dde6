package rebuild

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/mapping"
)

func fileOf(data []byte) *File {
	return &File{Size: int64(len(data)), mapped: mapping.File{Data: data}}
}

// For all pieces and all their orders, the first difference, the count and the row equal the
// results of a plain comparison.
func TestComparer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(t, "want")
		have := bytes.Clone(want)
		for range rapid.IntRange(0, 4).Draw(t, "changes") {
			if len(have) > 0 {
				have[rapid.IntRange(0, len(have)-1).Draw(t, "at")] ^= 0x55
			}
		}
		have = append(have, rapid.SliceOfN(rapid.Byte(), 0, 5).Draw(t, "more")...)
		have = have[:len(have)-rapid.IntRange(0, min(len(have), 9)).Draw(t, "cut")]

		first, different := -1, max(0, len(have)-len(want))
		for i := range want {
			if i >= len(have) || have[i] != want[i] {
				different++
				if first < 0 {
					first = i
				}
			}
		}
		if first < 0 && len(have) > len(want) {
			first = len(want)
		}

		const row, piece = 8, 32 // rows lie within pieces
		c := &Comparer{file: fileOf(have), row: row, count: rapid.Bool().Draw(t, "count")}
		starts := make([]int, (len(want)+piece-1)/piece)
		for i := range starts {
			starts[i] = i * piece
		}
		var group sync.WaitGroup
		for _, at := range rapid.Permutation(starts).Draw(t, "order") {
			group.Go(func() {
				p := want[at:min(at+piece, len(want))]
				if n, err := c.WriteAt(p, int64(at)); n != len(p) || err != nil {
					t.Errorf("%d bytes, %v", n, err)
				}
			})
		}
		group.Wait()
		c.end(int64(len(want)))
		at, met := c.First()
		if met != (first >= 0) || met && at != int64(first) {
			t.Fatalf("first difference at %d (%v), want %d", at, met, first)
		}
		if c.count && c.Different() != int64(different) {
			t.Errorf("%d bytes differ, want %d", c.Different(), different)
		}
		if got, begin := c.Want(); met && first < len(want) {
			low := first / row * row
			if begin != int64(low) || !bytes.Equal(got, want[low:min(low+row, len(want))]) {
				t.Errorf("row %x at %d, want %x at %d", got, begin, want[low:min(low+row, len(want))], low)
			}
		}
	})
}

func TestComparerStops(t *testing.T) {
	c := &Comparer{file: fileOf([]byte("abcdef")), stop: true}
	if _, err := c.WriteAt([]byte("abc"), 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := c.WriteAt([]byte("dEf"), 3); !errors.Is(err, errDiffers) {
			t.Errorf("a difference: %v", err)
		}
	}
	if at, met := c.First(); at != 4 || !met {
		t.Errorf("%d, %v", at, met)
	}
}
