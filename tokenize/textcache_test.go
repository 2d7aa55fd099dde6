package tokenize

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestTextCache compares a cache that is too small for its texts with a map.
func TestTextCache(t *testing.T) {
	c := newTextCache(4, 14)
	r := rand.New(rand.NewPCG(11, 12))
	type key struct {
		text string
		tag  uint16
	}
	want := map[key][]uint32{}
	hits, long := 0, 0
	for range 200_000 {
		n := 1 + r.IntN(40)
		if r.IntN(10) == 0 {
			n = 1 + r.IntN(longestCached+20)
		}
		text := make([]byte, n, n+r.IntN(30))
		letters := 1 + r.IntN(3)
		for i := range text {
			text[i] = byte(r.IntN(letters) * (1 + i%2))
		}
		k := key{string(text), uint16(r.IntN(3))}
		ids, ok := c.appendIDs([]uint32{5}, text[:cap(text)], n, k.tag)
		if ok {
			if !slices.Equal(ids[1:], want[k]) {
				t.Fatalf("%q, tag %d: ids %v, want %v", k.text, k.tag, ids[1:], want[k])
			}
			if hits++; n > shortText {
				long++
			}
			continue
		}
		if want[k] == nil {
			for range 1 + r.IntN(2*n) {
				want[k] = append(want[k], r.Uint32())
			}
		}
		c.remember(text[:cap(text)], n, k.tag, want[k])
	}
	if hits < 20_000 || long < 100 {
		t.Errorf("%d texts were found, %d of them long", hits, long)
	}
}
