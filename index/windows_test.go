package index

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestWindows(t *testing.T) {
	// L is 4: windows need 5 tokens, and share one with the next.
	w, err := NewWindows(4, []int64{0, 13, 4, 5, 0, 9})
	if err != nil {
		t.Fatal(err)
	}
	want := []struct {
		shard int
		token int64
	}{{1, 0}, {1, 4}, {1, 8}, {3, 0}, {5, 0}, {5, 4}}
	if w.Count() != int64(len(want)) {
		t.Fatalf("%d windows, want %d", w.Count(), len(want))
	}
	for i, want := range want {
		if shard, token := w.Locate(int64(i)); shard != want.shard || token != want.token {
			t.Errorf("window %d: shard %d token %d, want %v", i, shard, token, want)
		}
	}
}

// Reading agrees with a search through all windows.
func TestReading(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		length := rapid.IntRange(1, 6).Draw(t, "L")
		tokens := rapid.SliceOfN(rapid.Int64Range(0, 40), 1, 5).Draw(t, "tokens")
		w, err := NewWindows(length, tokens)
		if err != nil {
			t.Fatal(err)
		}
		shard := rapid.IntRange(0, len(tokens)-1).Draw(t, "shard")
		from := rapid.Int64Range(0, 45).Draw(t, "from")
		to := rapid.Int64Range(from, 46).Draw(t, "to")
		var first, last int64
		found := false
		for i := range w.Count() {
			s, token := w.Locate(i)
			if token+int64(length)+1 > tokens[s] {
				t.Fatalf("window %d ends behind its shard", i)
			}
			if s == shard && from < to && token < to && token+int64(length) >= from {
				if !found {
					first, found = i, true
				}
				last = i
			}
		}
		gotFirst, gotLast, ok := w.Reading(shard, from, to)
		if ok != found || ok && (gotFirst != first || gotLast != last) {
			t.Fatalf("tokens [%d, %d) of shard %d: %d to %d %v, want %d to %d %v", from, to, shard, gotFirst, gotLast,
				ok, first, last, found)
		}
	})
}

// Locate agrees with a walk over the shards, however unlike they are.
func TestLocate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		length := rapid.IntRange(1, 5000).Draw(t, "L")
		kind := rapid.Custom(func(t *rapid.T) int64 {
			return rapid.Int64Range(0, rapid.SampledFrom([]int64{0, 10, 5000, 1 << 20, 1 << 40}).Draw(t,
				"most")).Draw(t, "tokens")
		})
		tokens := rapid.SliceOfN(kind, 1, 300).Draw(t, "shards")
		w, err := NewWindows(length, tokens)
		if err != nil {
			t.Fatal(err)
		}
		before := int64(0) // windows
		for want, n := range tokens {
			count := max(0, n-1) / int64(length)
			for _, i := range []int64{0, 1, count / 2, count - 1} {
				if i < 0 || i >= count {
					continue
				}
				if shard, token := w.Locate(before + i); shard != want || token != i*int64(length) {
					t.Fatalf("window %d: token %d of shard %d, want %d of %d", before+i, token, shard, i*int64(length),
						want)
				}
			}
			before += count
		}
		if before != w.Count() {
			t.Fatalf("%d windows, want %d", w.Count(), before)
		}
	})
	w, err := NewWindows(1, []int64{0, math.MaxInt64})
	if err != nil {
		t.Fatal(err)
	}
	if shard, token := w.Locate(w.Count() - 1); shard != 1 || token != math.MaxInt64-2 {
		t.Errorf("the last of as many windows as there can be: token %d of shard %d", token, shard)
	}
}

func TestNewWindowsRefuses(t *testing.T) {
	for name, f := range map[string]func() (*Windows, error){
		"length":   func() (*Windows, error) { return NewWindows(0, []int64{10}) },
		"negative": func() (*Windows, error) { return NewWindows(4, []int64{10, -1}) },
		"overflow": func() (*Windows, error) { return NewWindows(1, []int64{math.MaxInt64, math.MaxInt64}) },
	} {
		if w, err := f(); err == nil {
			t.Errorf("%s: no error, %d windows", name, w.Count())
		}
	}
}
