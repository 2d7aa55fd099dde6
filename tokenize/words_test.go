package tokenize

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestWordKeys(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	keys := map[narrowKey]string{}
	for range 60000 {
		s := make([]byte, 1+r.IntN(48))
		for i := range s {
			s[i] = byte(r.IntN(2)) // zero bytes are bytes too
		}
		n := 1 + r.IntN(min(len(s), narrowWord))
		w := string(s[:n])
		k := narrowKeyOf(s, n)
		if k != narrowKeyOf(slices.Clone(s[:n]), n) {
			t.Fatalf("the key of %x depends on what follows", w)
		}
		if had, ok := keys[k]; ok && had != w {
			t.Fatalf("%x and %x have one key", w, had)
		}
		keys[k] = w
	}
	if len(keys) < 5000 {
		t.Errorf("%d keys are too few to tell", len(keys))
	}
}

// TestWordCache adds many more words than the cache has room for: it finds a word with its ids or
// not at all.
func TestWordCache(t *testing.T) {
	c := newWordCache(maxVocabulary)
	c.ring = c.ring[:1<<16]
	r := rand.New(rand.NewPCG(7, 8))
	word := func(i uint64) ([]byte, []uint32) {
		w := binary.LittleEndian.AppendUint64(nil, i)
		w = append(w, make([]byte, i%40)...)[:1+max(7, i%40)]
		ids := make([]uint32, 1+i%9)
		for k := range ids {
			ids[k] = uint32(i*uint64(k+1)) % maxVocabulary
		}
		return w, ids
	}
	const n = 1 << 20
	found := 0
	for range 2 * n {
		w, ids := word(r.Uint64N(1 + r.Uint64N(n)))
		if len(w) > narrowWord {
			hash := hashWide(w)
			if got := c.findWide(w, hash); got == nil {
				c.addWide(w, hash, ids)
			} else if found++; !slices.Equal(got, ids) {
				t.Fatalf("%x has the ids %v, want %v", w, got, ids)
			}
			continue
		}
		key := narrowKeyOf(w, len(w))
		if got, ok := c.appendNarrow(nil, key, key.hash()); !ok {
			c.addNarrow(key, key.hash(), ids)
		} else if found++; !slices.Equal(got, ids) {
			t.Fatalf("%x has the ids %v, want %v", w, got, ids)
		}
	}
	if found < n/4 || found > n*7/4 {
		t.Errorf("%d words were found: the test tries too little", found)
	}
}
