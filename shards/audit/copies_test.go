package audit

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// The hash of a document is the same whatever its parts, and another one for another document.
func TestDocumentHash(t *testing.T) {
	seen := map[uint64]string{}
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.OneOf(rapid.Uint32Range(0, 2), rapid.Uint32()), 0, 40).Draw(t, "ids")
		var whole, parted documentHash
		whole.part(ids)
		rest := ids
		for len(rest) > 0 {
			n := rapid.IntRange(0, len(rest)).Draw(t, "part")
			parted.part(rest[:n])
			if rest = rest[n:]; n == 0 {
				parted.part(rest)
				break
			}
		}
		hash, text := whole.finish(), fmt.Sprint(ids)
		if again := parted.finish(); again != hash {
			t.Fatalf("%v in parts has another hash", ids)
		}
		if other, ok := seen[hash]; ok && other != text {
			t.Fatalf("%s and %s have the same hash", text, other)
		}
		seen[hash] = text
	})
}

// A sample does not depend on the order of documents nor on how they were spread over samples; with
// room for all it counts exactly.
func TestSampleDoesNotDependOnOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		kinds := rapid.IntRange(1, 200).Draw(t, "kinds")
		var docs []sampled
		var hashes []uint64
		count := map[uint64]int64{}
		for i := range rapid.IntRange(0, 400).Draw(t, "documents") {
			kind := uint32(rapid.IntRange(0, kinds-1).Draw(t, "kind"))
			var h documentHash
			h.part([]uint32{kind})
			hash := h.finish()
			hashes, docs = append(hashes, hash), append(docs, sampled{times: 1, tokens: int64(kind%7) + 1, shard: i % 3,
				document: int64(i)})
			count[hash]++
		}
		order := make([]int, len(docs))
		for i := range order {
			order[i] = i
		}
		order = rapid.Permutation(order).Draw(t, "order")
		limit := rapid.SampledFrom([]int{5, 40, 1000}).Draw(t, "limit")
		one, parts := newSample(limit), []*sample{newSample(limit), newSample(limit), newSample(limit)}
		for i := range docs {
			one.add(hashes[i], docs[i])
		}
		for n, i := range order {
			parts[n%3].add(hashes[i], docs[i])
		}
		all := newSample(limit)
		for _, p := range parts {
			all.merge(p)
		}
		path := func(shard int) string { return fmt.Sprint(shard) }
		if !reflect.DeepEqual(one.copies(path), all.copies(path)) || one.shift != all.shift {
			t.Fatalf("%+v and %+v", one.copies(path), all.copies(path))
		}
		c := one.copies(path)
		copies := int64(0)
		for _, n := range count {
			copies += n - 1
		}
		if limit == 1000 && (!c.Exact || c.Copies != copies || c.Sampled != int64(len(docs))) {
			t.Fatalf("%+v, want %d copies of %d", c, copies, len(docs))
		}
		if c.Exact != (len(count) <= limit) || len(one.seen) > limit {
			t.Fatalf("%d different documents in a sample of %d: %+v", len(count), limit, c)
		}
	})
}

// Of many documents a sample of few gives the share of copies within its error.
func TestSampleEstimates(t *testing.T) {
	s := newSample(2000)
	const different = 100_000
	for d := range int64(different) {
		var h documentHash
		h.part([]uint32{uint32(d), uint32(d >> 3)})
		hash := h.finish()
		for range 1 + d%4 { // once to four times: of 2.5 documents on average 1.5 are copies
			s.add(hash, sampled{times: 1, tokens: 10, document: d})
		}
	}
	c := s.copies(func(int) string { return "" })
	if c.Exact || c.Share < 0.58 || c.Share > 0.62 || c.TokenShare != c.Share || len(c.Most) != 5 ||
		c.Most[0].Times != 4 ||
		!slices.IsSortedFunc(c.Most, func(a, b Copied) int { return int(a.Document - b.Document) }) {
		t.Errorf("%+v", c)
	}
}
