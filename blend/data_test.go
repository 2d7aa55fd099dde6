package blend

import (
	"encoding/binary"
	"testing"

	"pgregory.net/rapid"
)

// An id that is too large is found wherever it stands, and no other is taken for one.
func TestReaches(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.OneOf(rapid.SampledFrom([]int{1, 2, 1<<15 - 1, 1 << 15, 1<<15 + 1, 1<<16 - 1}),
			rapid.IntRange(1, 1<<16-1)).Draw(t, "limit")
		near := rapid.OneOf(rapid.IntRange(0, limit-1), rapid.IntRange(0, 1<<16-1), rapid.IntRange(max(limit-2, 0),
			min(limit+1, 1<<16-1)))
		some := rapid.SliceOfN(rapid.OneOf(rapid.IntRange(0, limit-1), near), 0, 40).Draw(t, "ids")
		var ids []byte
		want := false
		for _, id := range some {
			ids = binary.LittleEndian.AppendUint16(ids, uint16(id))
			want = want || id >= limit
		}
		if got := reaches(ids, uint32(limit)); got != want {
			t.Errorf("%v reach %d: %v, want %v", some, limit, got, want)
		}
	})
}
