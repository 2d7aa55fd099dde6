package tokenize

import "slices"

// Merging examines every pair of a word repeatedly. For the vocabularies that training produces,
// this file reads a word once, from left to right, and returns the same ids. That relies on these
// facts, for ordered merges, where each merge that happens follows the merges that produce its two
// parts.
//
//  - If the ids of a text have a boundary, the texts on both sides have the same ids
//    separately: no merge ever crossed it.
//  - A sequence of tokens is the result of merging their bytes if merging each token's bytes
//    results in the token, and merging the bytes of each two neighbours results in the two.
//    Suppose that a merge crosses boundaries, and consider the first such merge. Both sides
//    have been merged by then as they would be alone, because ranks only grow during merging.
//    So the merge would also cross between the two neighbours alone.
//  - So for each prefix of a text there is exactly one such sequence, and any search finds it.
//
// The search takes the longest token that fits the previous token, and goes back a token if there
// is none. It never reaches a position again after going back from it, so it is linear in the
// length of the word for a given vocabulary.

// A piece describes how merging produces a token from its bytes.
type piece struct {
	left, right uint32 // the two tokens that the last merge joins; unused for a byte
	// the rank of that merge plus one; 0 for a byte, noToken if merging does not produce the token
	born   uint32
	length uint32 // in bytes
}

// greedy encodes words without merging. It is immutable.
type greedy struct {
	pairs  *pairTable
	tree   *prefixTree
	pieces []piece // by id
	// by id: the longest token that merging produces and that is a proper prefix of this one, or
	// noToken
	shorter []uint32
}

// newGreedy returns nil if the merges are not ordered. tokens are all tokens of the vocabulary;
// newGreedy marks the tokens that merging produces.
//
// Files converted from tiktoken's ranks list every split of a token, including splits with a part
// that is produced later than the token itself. Such a merge never happens, because the token has
// been produced before its two parts can be adjacent. If that is the case, newGreedy ignores the
// merge.
func newGreedy(tokens []prefixToken, size int, alphabet *[256]uint32, pairs *pairTable) *greedy {
	const never = noToken
	g := &greedy{pairs: pairs, pieces: newTable[piece](size), shorter: make([]uint32, size)}
	for id := range g.pieces {
		g.pieces[id].born = never
	}
	for _, id := range alphabet {
		if id != noToken {
			g.pieces[id] = piece{length: 1}
		}
	}
	var late []pairMerge
	for _, m := range pairs.byRank() {
		left, right := &g.pieces[m.left], &g.pieces[m.right]
		switch {
		case left.born == never || right.born == never:
			late = append(late, m)
		case g.pieces[m.id].born == never && g.fit(m.left, m.right, true):
			g.pieces[m.id] = piece{m.left, m.right, m.rank + 1, left.length + right.length}
		}
	}
	for _, m := range late {
		if last := max(g.pieces[m.left].born, g.pieces[m.right].born); last != never && g.pieces[m.id].born >= last {
			return nil
		}
	}
	for i := range tokens {
		if g.pieces[tokens[i].info&idMask].born != never {
			tokens[i].info |= mergedNode
		}
	}
	return g
}

// prepare fills tree and, if the merges allow it, greedy. It needs bytes and pairs.
func (t *Tokenizer) prepare(vocab map[string]uint32) {
	var text []byte
	tokens := make([]prefixToken, 0, len(vocab))
	for token, id := range vocab {
		start := len(text)
		spelt, ok := unspell(text, token)
		if !ok || len(spelt) == start {
			continue // no word has this spelling
		}
		text = spelt
		tokens = append(tokens, prefixToken{text[start:], wholeNode | id})
	}
	t.greedy = newGreedy(tokens, len(t.tokens), &t.bytes, &t.pairs)
	t.tree = newPrefixTree(tokens)
	if t.greedy != nil {
		t.greedy.setTree(&t.tree, tokens)
	}
	t.words = newWordTable(len(tokens))
	for _, token := range tokens {
		if len(token.text) <= narrowWord && (t.ignoreMerges || t.mergesAlone(token)) {
			t.words.put(narrowKeyOf(token.text, len(token.text)), token.info&idMask)
		}
	}
}

// mergesAlone reports whether merging the bytes of a token results in the token.
func (t *Tokenizer) mergesAlone(token prefixToken) bool {
	if t.greedy != nil {
		return token.info&mergedNode != 0
	}
	ids, ok := (&merger{}).merge(t, nil, token.text)
	return ok && len(ids) == 1 && ids[0] == token.info&idMask
}

// setTree completes g with the tree of its tokens.
func (g *greedy) setTree(tree *prefixTree, tokens []prefixToken) {
	g.tree = tree
	for _, t := range tokens {
		g.shorter[t.info&idMask] = tree.longest(t.text[:len(t.text)-1])
	}
}

// fit reports whether merging the bytes of x and y, which merging produces, results in these two
// tokens. It works backwards: it splits the younger of the tokens on both sides of the boundary
// until both are bytes, and checks for each two former neighbours whether a merge would have joined
// them. Equal ranks are merged from left to right. If joining is set, a merge of x and y themselves
// does not count.
func (g *greedy) fit(x, y uint32, joining bool) bool {
	endX, endY := uint32(noToken), uint32(noToken) // the ranks that consume x and y
	for {
		if rank := g.pairs.get(x, y).rank; rank < endX && rank <= endY && rank != noToken && !joining {
			return false
		}
		joining = false
		px, py := &g.pieces[x], &g.pieces[y]
		switch {
		case px.born > py.born:
			endX, x = px.born-1, px.right
		case py.born > 0:
			endY, y = py.born-1, py.left
		default:
			return true
		}
	}
}

// fitsBits is the binary logarithm of how many pairs of tokens merger.fit remembers. They need 256
// kB.
const fitsBits = 15

// fit is g.fit(x, y, false). It remembers the results: most pairs of adjacent tokens of a language
// are few.
func (z *merger) fit(g *greedy, x, y uint32) bool {
	if z.fits == nil {
		z.fits = make([]uint64, 1<<fitsBits)
	}
	pair := (uint64(x)<<32 | uint64(y)) + 1 // at most 54 bits, and not 0
	known := &z.fits[pair*0x9e3779b97f4a7c15>>(64-fitsBits)&(1<<fitsBits-1)]
	if *known>>1 != pair {
		*known = pair << 1
		if g.fit(x, y, false) {
			*known |= 1
		}
	}
	return *known&1 != 0
}

// greedy appends the ids of the word w, which is not empty, to dst. ok is false if no tokens spell
// the word; dst is then unchanged.
func (z *merger) greedy(g *greedy, dst []uint32, w []byte) (ids []uint32, ok bool) {
	start, at := len(dst), 0
	next := g.tree.longest(w)
	// a bit for each position that the search went back from; empty until it does
	dead := z.dead[:0]
	for {
		if next == noToken {
			// No token fits here: a different token must lead here, or past here.
			if len(dst) == start {
				return dst, false
			}
			if len(dead) == 0 {
				dead = slices.Grow(dead, len(w)/64+1)[:len(w)/64+1]
				clear(dead)
				z.dead = dead
			}
			dead[at>>6] |= 1 << (at & 63)
			last := dst[len(dst)-1]
			dst = dst[:len(dst)-1]
			at -= int(g.pieces[last].length)
			next = g.shorter[last]
			continue
		}
		end := at + int(g.pieces[next].length)
		if len(dead) > 0 && dead[end>>6]>>(end&63)&1 != 0 || len(dst) > start && !z.fit(g, dst[len(dst)-1], next) {
			next = g.shorter[next]
			continue
		}
		dst = append(dst, next)
		if end == len(w) {
			return dst, true
		}
		at, next = end, g.tree.longest(w[end:])
	}
}
