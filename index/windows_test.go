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
			t.Fatalf("tokens [%d, %d) of shard %d: %d to %d %v, want %d to %d %v", from, to, shard, gotFirst, gotLast, ok, first, last, found)
		}
	})
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
