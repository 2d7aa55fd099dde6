package audit

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// Each length is in one step, steps are in order, and no step is wider than one part in 128 of its
// lengths.
func TestSteps(t *testing.T) {
	last := 0
	for length := int64(0); length < 1<<14; length++ {
		step := stepOf(length)
		if step != last && step != last+1 || largestOf(step) < length || length <= 256 && largestOf(step) != length &&
			length < 256 {
			t.Fatalf("length %d is in step %d, after %d, whose largest is %d", length, step, last, largestOf(step))
		}
		last = step
	}
	rapid.Check(t, func(t *rapid.T) {
		length := rapid.Int64Range(0, math.MaxInt64/2).Draw(t, "length")
		step := stepOf(length)
		if largest := largestOf(step); largest < length || largest-length > length/128 || stepOf(largest) != step ||
			stepOf(largest+1) != step+1 {
			t.Fatalf("length %d is in step %d, whose largest is %d", length, step, largest)
		}
	})
}

// Counts, sums and quantiles equal the results for the sorted list, up to one part in 128, also if
// parts of it were counted separately.
func TestLengthsAgreeWithSorting(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.OneOf(rapid.Int64Range(0, 3), rapid.Int64Range(0, 300),
			rapid.Int64Range(0, 1<<33)), 0, 300).Draw(t, "lengths")
		cut := rapid.IntRange(0, len(list)).Draw(t, "cut")
		var l, rest Lengths
		for _, n := range list[:cut] {
			l.add(n)
		}
		for _, n := range list[cut:] {
			rest.add(n)
		}
		l.merge(&rest)
		l.finish()
		slices.Sort(list)
		sum := int64(0)
		octaves := map[int64]Octave{}
		for _, n := range list {
			sum += n
			from := int64(0)
			if n > 0 {
				from = 1 << int(math.Log2(float64(n)))
			}
			o := octaves[from]
			octaves[from] = Octave{from, o.Documents + 1, o.Tokens + n}
		}
		if l.Documents != int64(len(list)) || l.Tokens != sum || len(l.Octaves) != len(octaves) {
			t.Fatalf("%+v of %v", l, list)
		}
		for i, o := range l.Octaves {
			if octaves[o.From] != o || i > 0 && o.From <= l.Octaves[i-1].From {
				t.Fatalf("%+v, want %+v", l.Octaves, octaves)
			}
		}
		if len(list) == 0 {
			return
		}
		for percent, got := range map[int]int64{50: l.Median, 90: l.P90, 99: l.P99, 100: l.Longest} {
			rank := (len(list)*percent + 99) / 100 // the least number of lengths that is at least percent
			if want := list[rank-1]; got < want || got > want+want/128 {
				t.Fatalf("%d %% is %d, want %d of %v", percent, got, want, list)
			}
		}
	})
}
