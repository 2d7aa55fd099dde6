package tokenize

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// mergePlainly is the definition of BPE: again and again the pair of lowest rank, of equals the
// leftmost.
func mergePlainly(t *Tokenizer, w []byte) []uint32 {
	var ids []uint32
	for _, c := range w {
		ids = append(ids, t.bytes[c])
	}
	for {
		at, best := -1, noMerge
		for i := range len(ids) - 1 {
			if m := t.pairs.get(ids[i], ids[i+1]); m.rank < best.rank {
				at, best = i, m
			}
		}
		if at < 0 {
			return ids
		}
		ids = slices.Replace(ids, at, at+2, best.id)
	}
}

// randomMerges is a vocabulary over the letters of alphabet whose merges have little order, with
// ranks that tie and overlap as they never do in a trained one.
func randomMerges(r *rand.Rand, alphabet string, n int) *Tokenizer {
	t := &Tokenizer{pairs: newPairTable(n)}
	for c := range t.bytes {
		t.bytes[c] = noToken
	}
	for i := range len(alphabet) {
		t.bytes[alphabet[i]] = uint32(i)
	}
	for i := range n {
		left, right := uint32(r.IntN(len(alphabet)+i)), uint32(r.IntN(len(alphabet)+i))
		t.pairs.put(left, right, merge{uint32(r.IntN(n)), uint32(len(alphabet) + i)})
	}
	return t
}

func checkMerges(t *testing.T, tok *Tokenizer, w []byte) {
	t.Helper()
	want := mergePlainly(tok, w)
	z := &merger{}
	if got, ok := z.mergeHeap(tok, nil, w); !ok || !slices.Equal(got, want) {
		t.Fatalf("heap: %q becomes %v, want %v", w, got, want)
	}
	if len(w) > shortWord {
		return
	}
	if got, ok := z.mergeLinear(tok, nil, w); !ok || !slices.Equal(got, want) {
		t.Fatalf("linear: %q becomes %v, want %v", w, got, want)
	}
}

func TestMerges(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	trained := load(t, "testdata/gpt2.json")
	for range 300 {
		random := randomMerges(r, "abc", 1+r.IntN(60))
		for range 30 {
			w := make([]byte, 1+r.IntN(shortWord+30))
			for i := range w {
				w[i] = "abc"[r.IntN(3)]
			}
			checkMerges(t, random, w)
			for i := range w {
				w[i] = "aehinorst -=01"[r.IntN(14)]
			}
			checkMerges(t, trained, w)
		}
	}
}

func FuzzMerges(f *testing.F) {
	f.Add([]byte("abcabcaaaabbbb"), uint64(1))
	f.Fuzz(func(t *testing.T, w []byte, seed uint64) {
		if len(w) == 0 || len(w) > 500 {
			return
		}
		for i := range w {
			w[i] = 'a' + w[i]%4
		}
		checkMerges(t, randomMerges(rand.New(rand.NewPCG(seed, 0)), "abcd", 1+int(seed%80)), w)
	})
}

func TestPairTableLaterWins(t *testing.T) {
	p := newPairTable(1)
	p.put(0, 0, merge{1, 2})
	p.put(0, 0, merge{3, 4})
	if got := p.get(0, 0); got != (merge{3, 4}) {
		t.Errorf("got %v", got)
	}
	if got := p.get(0, 1); got != noMerge {
		t.Errorf("got %v for an absent pair", got)
	}
}
