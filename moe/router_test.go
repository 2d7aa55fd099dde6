package moe

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// The choice is a stable sort by falling weight: of equal weights the lower index comes first.
func TestTopK(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := rapid.IntRange(1, 20).Draw(t, "experts")
		k := rapid.IntRange(1, e).Draw(t, "k")
		p := rapid.SliceOfN(rapid.Map(rapid.IntRange(0, 6), func(i int) float32 { return float32(i) / 6 }), e, e).Draw(t, "p")
		want := make([]int32, e)
		for i := range want {
			want[i] = int32(i)
		}
		slices.SortStableFunc(want, func(a, b int32) int { return cmpFloat(float64(p[b]), float64(p[a])) })
		got := make([]int32, k)
		topK(got, p)
		if !slices.Equal(got, want[:k]) {
			t.Fatalf("%v of %v, want %v", got, p, want[:k])
		}
	})
}

// Rows are ordered by expert, within an expert by token, and lead back to their tokens.
func TestSortRows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := rapid.IntRange(1, 9).Draw(t, "experts")
		k := rapid.IntRange(1, e).Draw(t, "k")
		tokens := rapid.IntRange(1, 40).Draw(t, "tokens")
		r := tokens * k
		st := routing{
			probs: make([]float32, tokens*e), weight: make([]float32, r), chosen: make([]int32, r), rowOf: make([]int32, r),
			tokenOf: make([]int32, r), counts: make([]int, e),
		}
		for i := range st.probs {
			st.probs[i] = float32(i + 1)
		}
		for token := range tokens {
			copy(st.chosen[token*k:][:k], rapid.Permutation(upTo(e)).Draw(t, "chosen"))
		}
		for _, e := range st.chosen {
			st.counts[e]++
		}
		st.sort(k)
		row := 0
		for expert, n := range st.counts {
			last := int32(-1)
			for range n {
				token := st.tokenOf[row]
				if token <= last {
					t.Fatalf("expert %d: token %d comes after %d", expert, token, last)
				}
				last = token
				slot := slices.Index(st.chosen[int(token)*k:][:k], int32(expert))
				if slot < 0 || st.rowOf[int(token)*k+slot] != int32(row) || st.weight[row] != st.probs[int(token)*e+expert] {
					t.Fatalf("row %d (expert %d, token %d) does not belong there", row, expert, token)
				}
				row++
			}
		}
		if row != r {
			t.Fatalf("%d rows, want %d", row, r)
		}
	})
}

func upTo(n int) []int32 {
	s := make([]int32, n)
	for i := range s {
		s[i] = int32(i)
	}
	return s
}
