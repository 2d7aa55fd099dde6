package audit

import (
	"cmp"
	"encoding/json"
	"os"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// stretches gives what repeats finds in one document that is given in parts of the given lengths,
// the last as long as it takes.
func stretches(ids []uint32, lengths []int) (found []Repeat) {
	r := repeats{found: func(s Repeat) { found = append(found, s) }}
	at := 0
	for _, n := range append(slices.Clone(lengths), len(ids)) {
		end := min(at+n, len(ids))
		history := min(at, maxPeriod)
		r.part(ids[at-history:end], history)
		at = end
	}
	r.finish()
	slices.SortFunc(found, func(a, b Repeat) int {
		return cmp.Or(cmp.Compare(a.First, b.First), cmp.Compare(a.Tokens, b.Tokens), cmp.Compare(a.Period, b.Period))
	})
	return found
}

// naive looks at every token with every period.
func naive(ids []uint32) (found []Repeat) {
	for p := 1; p <= maxPeriod; p++ {
		run := 0
		for i := p; i <= len(ids); i++ {
			if i < len(ids) && ids[i] == ids[i-p] {
				run++
				continue
			}
			if (run+p)/p >= minRepeats {
				found = append(found, Repeat{Document: -1, First: int64(i - run - p), Tokens: int64(run + p),
					Period: p})
			}
			run = 0
		}
	}
	slices.SortFunc(found, func(a, b Repeat) int {
		return cmp.Or(cmp.Compare(a.First, b.First), cmp.Compare(a.Tokens, b.Tokens), cmp.Compare(a.Period, b.Period))
	})
	return found
}

// drawTokens draws few ids with many repetitions.
func drawTokens(t *rapid.T) (ids []uint32) {
	for range rapid.IntRange(0, 5).Draw(t, "stretches") {
		unit := rapid.SliceOfN(rapid.Uint32Range(0, 2), 1, 15).Draw(t, "unit")
		for range rapid.OneOf(rapid.IntRange(1, 4), rapid.IntRange(28, 70)).Draw(t, "times") {
			ids = append(ids, unit...)
		}
		ids = append(ids, rapid.SliceOfN(rapid.Uint32Range(0, 3), 0, 20).Draw(t, "between")...)
	}
	return ids
}

// For all divisions of a document into parts, the repeats equal the repeats that a search at every
// token finds.
func TestRepeatsAgreeWithNaive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := drawTokens(t)
		parts := rapid.SliceOfN(rapid.IntRange(0, 300), 0, 8).Draw(t, "parts")
		if got, want := stretches(ids, parts), naive(ids); !slices.Equal(got, want) {
			t.Fatalf("%v in parts %v: found %v, want %v", ids, parts, got, want)
		}
	})
}

// What OLMo-core's filter finds is found, and nothing else.
func TestRepeatsAgreeWithOLMo(t *testing.T) {
	data, err := os.ReadFile("testdata/repeats.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases []struct {
			Runs  [][2]json.RawMessage
			Found [][3]int64
		}
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	hit := 0
	for n, c := range golden.Cases {
		var ids []uint32
		for _, run := range c.Runs {
			var times int
			var unit []uint32
			if err := cmp.Or(json.Unmarshal(run[0], &times), json.Unmarshal(run[1], &unit)); err != nil {
				t.Fatal(err)
			}
			ids = append(ids, slices.Repeat(unit, times)...)
		}
		var want []Repeat
		for _, f := range c.Found {
			want = append(want, Repeat{-1, f[0], f[1] - f[0], int(f[2])})
		}
		if got := stretches(ids, nil); !slices.Equal(got, want) {
			t.Errorf("case %d: %v, OLMo-core finds %v", n, got, want)
		}
		hit += min(1, len(want))
	}
	if hit < 50 || len(golden.Cases)-hit < 50 {
		t.Errorf("%d of %d cases have repetitions", hit, len(golden.Cases))
	}
}

func FuzzRepeats(f *testing.F) {
	f.Add(slices.Repeat([]byte{1, 2}, 40), uint16(17))
	f.Add(slices.Repeat([]byte{0}, 500), uint16(400))
	f.Fuzz(func(t *testing.T, data []byte, cut uint16) {
		ids := make([]uint32, len(data))
		for i, b := range data {
			ids[i] = uint32(b & 3)
		}
		if got, want := stretches(ids, []int{int(cut), int(cut) / 3}), naive(ids); !slices.Equal(got, want) {
			t.Fatalf("found %v, want %v", got, want)
		}
	})
}
