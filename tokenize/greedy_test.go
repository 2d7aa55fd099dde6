package tokenize

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// kindsOfVocabularies are ways to make merges over the letters a to d that training makes and that
// it never makes.
var kindsOfVocabularies = []string{"grown", "all splits", "late splits", "shuffled", "swapped", "unreachable",
	"repeated", "deep"}

// randomVocabulary is a vocabulary and its merges, by their texts.
func randomVocabulary(r *rand.Rand, kind string) (tokens []string, merges [][2]string) {
	tokens = strings.Split("abcd"[:1+r.IntN(4)], "")
	known := map[string]bool{}
	for _, t := range tokens {
		known[t] = true
	}
	for range 1 + r.IntN(60) {
		left, right := tokens[r.IntN(len(tokens))], tokens[r.IntN(len(tokens))]
		if kind == "deep" && r.IntN(4) > 0 { // long chains of merges, all to one side
			left = tokens[len(tokens)-1]
			if len(tokens)%2 == 0 {
				left, right = right, left
			}
		}
		joined := left + right
		if len(joined) > 40 || known[joined] && kind != "repeated" {
			continue
		}
		if !known[joined] {
			known[joined] = true
			tokens = append(tokens, joined)
		}
		if kind != "all splits" {
			merges = append(merges, [2]string{left, right})
			continue
		}
		for i := 1; i < len(joined); i++ {
			if known[joined[:i]] && known[joined[i:]] {
				merges = append(merges, [2]string{joined[:i], joined[i:]})
			}
		}
	}
	if kind == "late splits" || kind == "unreachable" {
		// as files made of tiktoken's ranks have it: also of parts that come later
		merges = nil
		for _, joined := range tokens {
			if kind == "unreachable" && r.IntN(8) == 0 { // no merge makes it, but others have it for a part
				continue
			}
			for i := 1; i < len(joined); i++ {
				if known[joined[:i]] && known[joined[i:]] {
					merges = append(merges, [2]string{joined[:i], joined[i:]})
				}
			}
		}
	}
	if kind == "shuffled" {
		r.Shuffle(len(merges), func(i, j int) { merges[i], merges[j] = merges[j], merges[i] })
	}
	if kind == "swapped" && len(merges) > 0 { // ordered but for a few
		for range 1 + r.IntN(3) {
			i, j := r.IntN(len(merges)), r.IntN(len(merges))
			merges[i], merges[j] = merges[j], merges[i]
		}
	}
	if kind == "repeated" && len(merges) > 0 {
		for range r.IntN(5) {
			merges = append(merges, merges[r.IntN(len(merges))])
		}
	}
	return tokens, merges
}

// vocabularyFile is a tokenizer.json of these.
func vocabularyFile(t testing.TB, tokens []string, merges [][2]string, ignoreMerges bool) []byte {
	t.Helper()
	vocab := map[string]int{}
	for i, s := range tokens {
		vocab[s] = i
	}
	if merges == nil {
		merges = [][2]string{}
	}
	b, err := json.Marshal(map[string]any{
		"version": "1.0", "pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false,
			"use_regex": true, "trim_offsets": true},
		"model": map[string]any{"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignoreMerges},
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestAnyVocabulary compares the encoder with plain merging for vocabularies of all kinds, with and
// without ordered merges.
func TestAnyVocabulary(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	ordered := map[string]int{}
	went := 0 // back
	for _, kind := range kindsOfVocabularies {
		for i := range 80 {
			tokens, merges := randomVocabulary(r, kind)
			tok, err := Parse(vocabularyFile(t, tokens, merges, i%5 == 4), kind)
			if err != nil {
				t.Fatal(err)
			}
			if tok.greedy != nil {
				ordered[kind]++
			}
			e := tok.NewEncoder(EncodeOptions{})
			for range 40 {
				w := randomWord(r, tokens)
				want := mergePlainly(tok, w)
				if id := slices.Index(tokens, string(w)); tok.ignoreMerges && id >= 0 {
					want = []uint32{uint32(id)}
				}
				for range 2 { // the second time from the cache
					if got, err := e.Append(nil, w); err != nil || !slices.Equal(got, want) {
						t.Fatalf("%s: %q becomes %v (%v), want %v; tokens %q, merges %q", kind, w, got, err, want,
							tokens, merges)
					}
				}
			}
			if len(e.merger.dead) > 0 {
				went++
			}
		}
	}
	for kind, want := range map[string][2]int{"grown": {80, 80}, "all splits": {80, 80}, "deep": {80, 80},
		"late splits": {40, 80}, "shuffled": {1, 40}, "swapped": {10, 79}, "unreachable": {10, 80}, "repeated": {1,
			80}} {
		if n := ordered[kind]; n < want[0] || n > want[1] {
			t.Errorf("%s: %d of 80 vocabularies are ordered, want %d to %d", kind, n, want[0], want[1])
		}
	}
	if went < 30 {
		t.Errorf("the search went back for %d vocabularies only: the test tries too little", went)
	}
}

// randomWord is of tokens and stray letters, so that long tokens occur, in one of some lengths.
func randomWord(r *rand.Rand, tokens []string) []byte {
	n := []int{1, 4, 12, 40, 150}[r.IntN(5)]
	var w []byte
	for len(w) < n {
		s := tokens[r.IntN(len(tokens))]
		w = append(w, s[:1+r.IntN(len(s))]...)
	}
	return w
}

func FuzzGreedy(f *testing.F) {
	f.Add([]byte("abcabcaaaabbbb"), uint64(1))
	f.Fuzz(func(t *testing.T, w []byte, seed uint64) {
		if len(w) == 0 || len(w) > 500 {
			return
		}
		r := rand.New(rand.NewPCG(seed, 1))
		tokens, merges := randomVocabulary(r, kindsOfVocabularies[seed%uint64(len(kindsOfVocabularies))])
		tok, err := Parse(vocabularyFile(t, tokens, merges, false), "fuzzed")
		if err != nil {
			t.Fatal(err)
		}
		for i := range w {
			for w[i] = 'a' + w[i]%4; tok.bytes[w[i]] == noToken; w[i]-- {
			}
		}
		if got, err := tok.NewEncoder(EncodeOptions{}).Append(nil, w); err != nil ||
			!slices.Equal(got, mergePlainly(tok, w)) {
			t.Fatalf("%q becomes %v (%v), want %v", w, got, err, mergePlainly(tok, w))
		}
	})
}

func TestPrefixTree(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	for range 40 {
		alphabet, n := 1+r.IntN(256), 1+r.IntN(1000)
		ids := map[string]uint32{}
		var tokens []prefixToken
		for range n {
			w := make([]byte, 1+r.IntN(1+r.IntN(9)))
			for i := range w {
				w[i] = byte(r.IntN(alphabet))
			}
			if _, ok := ids[string(w)]; ok {
				continue
			}
			id := uint32(len(ids))
			ids[string(w)] = id
			info := wholeNode | id
			if id%3 > 0 {
				info |= mergedNode
			}
			tokens = append(tokens, prefixToken{w, info})
		}
		tree := newPrefixTree(slices.Clone(tokens))
		if len(tree.nodes) > 40*len(tokens)+2*treeBlock {
			t.Errorf("%d tokens take %d nodes", len(tokens), len(tree.nodes))
		}
		for range 2000 {
			w := make([]byte, r.IntN(14))
			for i := range w {
				w[i] = byte(r.IntN(alphabet))
			}
			if r.IntN(2) == 0 {
				w = append(slices.Clone(tokens[r.IntN(len(tokens))].text), w...)
			}
			id, ok := tree.whole(w)
			want, known := ids[string(w)]
			if ok != known || ok && id != want {
				t.Fatalf("%x is token %d, %v, want %d, %v", w, id, ok, want, known)
			}
			longest := uint32(noToken)
			for k := 1; k <= len(w); k++ {
				if id, ok := ids[string(w[:k])]; ok && id%3 > 0 {
					longest = id
				}
			}
			if got := tree.longest(w); got != longest {
				t.Fatalf("%x starts with token %d, want %d", w, got, longest)
			}
		}
	}
}

func TestPairTable(t *testing.T) {
	r := rand.New(rand.NewPCG(15, 16))
	for _, n := range []int{0, 1, 10, 3000} {
		table, want := newPairTable(n), map[[2]uint32]merge{}
		for i := range n {
			pair := [2]uint32{r.Uint32N(60), r.Uint32N(60)}
			want[pair] = merge{uint32(i), uint32(n - i)}
			table.put(pair[0], pair[1], want[pair])
		}
		for left := range uint32(62) {
			for right := range uint32(62) {
				m, ok := want[[2]uint32{left, right}]
				if !ok {
					m = noMerge
				}
				if got := table.get(left, right); got != m {
					t.Fatalf("%d merges: the merge of %d, %d is %v, want %v", n, left, right, got, m)
				}
			}
		}
	}
}

// TestCachesHold has more words than the caches, of all lengths, and few enough letters that they
// come again.
func TestCachesHold(t *testing.T) {
	tok := load(t, "testdata/gpt2.json")
	e := tok.NewEncoder(EncodeOptions{})
	e.cache.ring = e.cache.ring[:1<<10]
	r := rand.New(rand.NewPCG(17, 18))
	words := make([][]byte, 1<<15)
	for i := range words {
		words[i] = fmt.Appendf(nil, "%x", r.Uint64()>>(r.IntN(60)))
		if i%3 == 0 {
			words[i] = append(words[i], words[i/2]...)
		}
		if i%2 == 0 { // one word of letters
			for k, c := range words[i] {
				words[i][k] = 'a' + c%16
			}
		}
	}
	found := map[bool]int{}
	for range 8 * len(words) {
		w := words[r.IntN(1+r.IntN(len(words)))]
		var want []uint32
		for s := w; len(s) > 0; {
			n := tok.split.first(tok.classes, s)
			if n <= narrowWord {
				key := narrowKeyOf(s, n)
				if _, ok := e.cache.appendNarrow(nil, key, key.hash()); ok {
					found[false]++
				}
			} else if e.cache.findWide(s[:n], hashWide(s[:n])) != nil {
				found[true]++
			}
			want = append(want, mergePlainly(tok, s[:n])...)
			s = s[n:]
		}
		if got, err := e.Append(nil, w); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%q becomes %v (%v), want %v", w, got, err, want)
		}
	}
	if e.cache.head < 8*uint64(len(e.cache.ring)) {
		t.Errorf("%d numbers were added to the ring: the test tries too little", e.cache.head)
	}
	if found[false] < len(words) || found[true] == 0 {
		t.Errorf("%d narrow and %d wide words came from the cache: the test tries too little", found[false],
			found[true])
	}
}

// BenchmarkOneWord encodes one word of a megabyte, of ten and of forty: the time a byte should stay
// the same.
func BenchmarkOneWord(b *testing.B) {
	e := load(b, "testdata/gpt2.json").NewEncoder(EncodeOptions{})
	r := rand.New(rand.NewPCG(19, 20))
	for _, kind := range []string{"a", "letters"} {
		for _, n := range []int{1e6, 1e7, 4e7} {
			w := make([]byte, n)
			for i := range w {
				w[i] = 'a'
				if kind == "letters" {
					w[i] += byte(r.IntN(26))
				}
			}
			b.Run(fmt.Sprintf("%s-%dMB", kind, n/1e6), func(b *testing.B) {
				var ids []uint32
				var err error
				b.SetBytes(int64(n))
				for b.Loop() {
					if ids, err = e.Append(ids[:0], w); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
