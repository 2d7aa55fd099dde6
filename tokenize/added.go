package tokenize

import (
	"math/bits"
	"unicode/utf8"
)

// An addedToken is matched in the text as a whole. The model does not produce it.
type addedToken struct {
	id      uint32
	special bool

	singleWord     bool // matched only if no word character is next to it
	lstrip, rstrip bool // includes the white space before or after it
}

// trims reports whether a match of the token may be longer or shorter than its text, or be
// rejected.
func (a addedToken) trims() bool { return a.singleWord || a.lstrip || a.rstrip }

// trim returns the range of the text that a match of the token at s[start:end] covers, where done
// bytes are already covered. ok is false if the match is rejected. run must belong to the same
// text.
func (a addedToken) trim(s []byte, start, end, done int, run *blankRun) (from, to int, ok bool) {
	if a.singleWord {
		isWord := pinnedRust().is(wordCharacter)
		if before, n := utf8.DecodeLastRune(s[:start]); n > 0 && isWord(before) {
			return 0, 0, false
		}
		if after, n := utf8.DecodeRune(s[end:]); n > 0 && isWord(after) {
			return 0, 0, false
		}
	}
	if a.lstrip {
		run.find(s, start)
		start = max(run.start, done)
	}
	if a.rstrip {
		run.find(s, end)
		end = run.end
	}
	return start, end, true
}

// A blankRun is the white space around a position in a text. It is kept from one token to the next,
// so that a long run is not scanned again for each token in it.
type blankRun struct {
	start, end int
	found      bool
}

func (b *blankRun) find(s []byte, at int) {
	if !b.found || at < b.start || at > b.end {
		*b = blankRun{at - trailingWhiteSpace(s[:at]), at + leadingWhiteSpace(s[at:]), true}
	}
}

// leadingWhiteSpace returns the length of the white space at the start of s.
func leadingWhiteSpace(s []byte) int {
	kinds := pinnedRust().kinds
	i := 0
	for i < len(s) {
		r, n := utf8.DecodeRune(s[i:])
		if kinds.at(r)&whiteSpace == 0 {
			break
		}
		i += n
	}
	return i
}

// trailingWhiteSpace returns the length of the white space at the end of s.
func trailingWhiteSpace(s []byte) int {
	kinds := pinnedRust().kinds
	i := len(s)
	for i > 0 {
		r, n := utf8.DecodeLastRune(s[:i])
		if kinds.at(r)&whiteSpace == 0 {
			break
		}
		i -= n
	}
	return len(s) - i
}

// A trie finds added tokens in text: the leftmost token, and the longest of several.
type trie struct {
	nodes []trieNode // nodes[0] is the root
	first [256]bool
	two   [1 << 16 / 64]uint64 // pairs of first bytes, so that ordinary text is skipped quickly
	short bool                 // some token has one byte
	pairs pairTables
}

// pairTables find pairs of bytes with vector instructions: one table each for the lower and the
// upper half of the first byte, and of the second. Each pair has one of eight bits in all four
// tables, so that the tables also find some other pairs.
type pairTables struct {
	tables [4][16]byte
	n      int // pairs that were added
}

// add adds a pair. Any second byte is found if b is negative.
func (p *pairTables) add(a byte, b int) {
	bit := byte(1) << (p.n & 7)
	p.n++
	p.tables[0][a&15] |= bit
	p.tables[1][a>>4] |= bit
	if b >= 0 {
		p.tables[2][b&15] |= bit
		p.tables[3][b>>4] |= bit
		return
	}
	for i := range 16 {
		p.tables[2][i] |= bit
		p.tables[3][i] |= bit
	}
}

type trieNode struct {
	c              byte
	end            bool  // a token ends here
	child, sibling int32 // 0 is none
	token          addedToken
}

// add reports whether the text, which is not empty, was new.
func (t *trie) add(text []byte, token addedToken) bool {
	if len(t.nodes) == 0 {
		t.nodes = append(t.nodes, trieNode{})
	}
	t.first[text[0]] = true
	if len(text) == 1 {
		t.short = true
		t.pairs.add(text[0], -1)
	} else if k := int(text[0])<<8 | int(text[1]); t.two[k>>6]>>(k&63)&1 == 0 {
		t.two[k>>6] |= 1 << (k & 63)
		t.pairs.add(text[0], int(text[1]))
	}
	at := int32(0)
	for _, c := range text {
		next := t.step(at, c)
		if next == 0 {
			next = int32(len(t.nodes))
			t.nodes = append(t.nodes, trieNode{c: c, sibling: t.nodes[at].child})
			t.nodes[at].child = next
		}
		at = next
	}
	if t.nodes[at].end {
		return false
	}
	t.nodes[at].end, t.nodes[at].token = true, token
	return true
}

func (t *trie) step(at int32, c byte) int32 {
	at = t.nodes[at].child
	for at != 0 && t.nodes[at].c != c {
		at = t.nodes[at].sibling
	}
	return at
}

// find returns the first token in s[from:] and its range in s. end is 0 if there is no token.
func (t *trie) find(s []byte, from int) (start, end int, token addedToken) {
	// Blocks of pairs, which reach one byte further than the block.
	for len(s)-from > pairBlock {
		at, found := findPairs(s[from:], &t.pairs)
		from += at
		if found == 0 {
			break
		}
		for ; found != 0; found &= found - 1 {
			i := from + bits.TrailingZeros32(found)
			if end, token := t.match(s, i); end > 0 {
				return i, end, token
			}
		}
		from += pairBlock
	}
	for i := from; i < len(s); i++ {
		if !t.first[s[i]] {
			continue
		}
		if end, token := t.match(s, i); end > 0 {
			return i, end, token
		}
	}
	return 0, 0, addedToken{}
}

// pairBlock is how many pairs findPairs compares at a time.
const pairBlock = 32

// match returns the longest token at s[i:] and its end in s, or 0.
func (t *trie) match(s []byte, i int) (end int, token addedToken) {
	if !t.short {
		if i+1 == len(s) {
			return 0, addedToken{}
		}
		if k := int(s[i])<<8 | int(s[i+1]); t.two[k>>6]>>(k&63)&1 == 0 {
			return 0, addedToken{}
		}
	}
	at := int32(0)
	for j := i; j < len(s); j++ {
		if at = t.step(at, s[j]); at == 0 {
			break
		}
		if n := &t.nodes[at]; n.end {
			end, token = j+1, n.token
		}
	}
	return end, token
}
