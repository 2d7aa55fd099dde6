package tokenize

import (
	"math/bits"
	"slices"
	"unicode/utf8"
)

// charPairs is a set of pairs of characters, for [charBPE.newCharPairs]. It may also report pairs
// that are not in the set, about one in 16: a word is then not cut where it could be.
type charPairs struct {
	ascii    [utf8.RuneSelf][utf8.RuneSelf / 64]uint64 // exact, by the left character
	others   []uint64                                  // a bit for each hash
	shift    uint                                      // of a hash, for a bit of others
	before   []rune                                    // the left characters of pairs with a blank
	complete bool                                      // no character is unknown
}

// newCharPairSet returns a set of pairs.
func newCharPairSet(pairs map[[2]rune]bool) *charPairs {
	b := bits.Len(uint(16*len(pairs) + 63))
	p := &charPairs{others: make([]uint64, 1<<b/64), shift: uint(64 - b)}
	for pair := range pairs {
		left, right := pair[0], pair[1]
		if right == spaceMark || right == ' ' || right == '\n' {
			p.before = append(p.before, left)
		}
		if left|right < utf8.RuneSelf {
			p.ascii[left][right>>6] |= 1 << (right & 63)
			continue
		}
		bit := p.bit(left, right)
		p.others[bit>>6] |= 1 << (bit & 63)
	}
	slices.Sort(p.before)
	return p
}

func (p *charPairs) bit(left, right rune) uint64 {
	return (uint64(left)<<32 | uint64(right)) * 0x9e3779b97f4a7c15 >> p.shift
}

func (p *charPairs) has(left, right rune) bool {
	if left|right < utf8.RuneSelf {
		return p.ascii[left][right>>6]>>(right&63)&1 != 0
	}
	if right == spaceMark {
		return p.beforeBlank(left)
	}
	bit := p.bit(left, right)
	return p.others[bit>>6]>>(bit&63)&1 != 0
}

// beforeBlank reports whether a pair has this left character, and a space, a line break or U+2581
// on the right.
func (p *charPairs) beforeBlank(left rune) bool {
	_, found := slices.BinarySearch(p.before, left)
	return found
}

// cutPairs cuts between the characters that no merge joins.
type cutPairs struct{ pairs *charPairs }

// SentencePiece's character for a space.
const (
	lowerOneEighthBlock = "\u2581"
	spaceMark           = '\u2581'
)

func (k cutPairs) cut(c *cutting) {
	for _, p := range c.pieces {
		start := p.start
		last, n := utf8.DecodeRune(c.text[start:p.end])
		for i := start + n; i < p.end; i += n {
			var r rune
			if r, n = rune(c.text[i]), 1; r >= utf8.RuneSelf {
				r, n = decodeMany(c.text[i:p.end])
			}
			if (k.pairs.complete || r == spaceMark) && !k.pairs.has(last, r) {
				c.add(p, start, i)
				start = i
			}
			last = r
		}
		c.add(p, start, p.end)
	}
}
