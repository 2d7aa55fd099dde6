package tokenize

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// charBPE is a BPE whose first symbols are characters: SentencePiece's, which uses bytes for
// characters without a token, CLIP's, which marks the end of words, and any other that is not
// plainly byte-level.
type charBPE struct {
	t      *Tokenizer
	vocab  map[string]uint32
	prefix string // of tokens that do not start a word
	suffix string // of tokens that end one
	// symbols are the ids of single characters: alone in a word, at its start, inside, at its end.
	symbols      [4]symbolTable
	fallback     [256]uint32 // see fallbackBytes
	byteFallback bool
	unkID        uint32 // noToken if there is none
	fuseUnk      bool
	ignoreMerges bool
}

const (
	atStart = 1 << iota
	atEnd
)

// symbolTable maps characters to the ids of their tokens.
type symbolTable struct {
	low  [0x180]uint32 // ASCII and the byte alphabet
	high map[rune]uint32
}

func (t *symbolTable) of(r rune) uint32 {
	if int(r) < len(t.low) {
		return t.low[r]
	}
	if id, ok := t.high[r]; ok {
		return id
	}
	return noToken
}

func newCharBPE(t *Tokenizer, m *modelJSON) *charBPE {
	vocab := m.Vocab.ids
	b := &charBPE{t: t, vocab: vocab, fuseUnk: isTrue(m.FuseUnk), fallback: fallbackBytes(vocab),
		byteFallback: isTrue(m.ByteFallback), ignoreMerges: isTrue(m.IgnoreMerges), unkID: noToken}
	b.prefix, b.suffix = deref(m.ContinuingSubwordPrefix), deref(m.EndOfWordSuffix)
	if m.UnkToken != nil {
		if id, ok := vocab[*m.UnkToken]; ok {
			b.unkID = id
		}
	}
	for place := range b.symbols {
		s := &b.symbols[place]
		s.high = map[rune]uint32{}
		for r := range s.low {
			s.low[r] = noToken
		}
		prefix, suffix := b.prefix, b.suffix
		if place&atStart != 0 {
			prefix = ""
		}
		if place&atEnd == 0 {
			suffix = ""
		}
		for token, id := range vocab {
			if len(token) > len(prefix)+len(suffix)+utf8.UTFMax || !strings.HasPrefix(token, prefix) ||
				!strings.HasSuffix(token[len(prefix):], suffix) {
				continue
			}
			char := token[len(prefix) : len(token)-len(suffix)]
			r, n := utf8.DecodeRuneInString(char)
			switch {
			case n == 0 || n != len(char):
			case int(r) < len(s.low):
				s.low[r] = id
			default:
				s.high[r] = id
			}
		}
	}
	return b
}

// fallbackBytes returns the ids of <0x00> to <0xFF>, which represent bytes, or noToken.
func fallbackBytes(vocab map[string]uint32) (ids [256]uint32) {
	for c := range ids {
		id, ok := vocab[fmt.Sprintf("<0x%02X>", c)]
		if !ok {
			id = noToken
		}
		ids[c] = id
	}
	return ids
}

// newCharPairs returns the pairs of adjacent characters between which some merge may happen, or nil
// if that does not only depend on two characters.
//
// A merge joins two tokens. They are adjacent in the text, so the last character of the left token
// is next to the first character of the right one. Between two characters for which no merge has
// such tokens, a boundary remains until the end, and the merges on its two sides cannot influence
// each other. Words may therefore be cut there without changing the ids. This requires that every
// symbol is a character with a token or a byte that no merge has, and that a symbol does not depend
// on its position in the word. Two unknown characters are fused, so without bytes for all unknown
// characters, a word may be cut only next to a character with a token.
func (b *charBPE) newCharPairs(merges mergesJSON) *charPairs {
	if b.prefix != "" || b.suffix != "" || b.ignoreMerges || b.symbols[0].of(spaceMark) == noToken {
		return nil
	}
	unknown := map[uint32]bool{}
	for _, id := range b.fallback {
		unknown[id] = b.byteFallback
	}
	complete := b.byteFallback && !unknown[noToken]
	unknown[b.unkID] = true
	found := map[[2]rune]bool{}
	for _, m := range merges {
		if m.comment {
			continue
		}
		if unknown[b.vocab[m.left]] || unknown[b.vocab[m.right]] {
			return nil
		}
		left, _ := utf8.DecodeLastRuneInString(m.left)
		right, _ := utf8.DecodeRuneInString(m.right)
		found[[2]rune{left, right}] = true
	}
	pairs := newCharPairSet(found)
	pairs.complete = complete
	return pairs
}

func (b *charBPE) appendWord(z *modelScratch, dst []uint32, word []byte) ([]uint32, error) {
	if b.ignoreMerges {
		if id, ok := b.vocab[string(word)]; ok {
			return append(dst, id), nil
		}
	}
	ids := z.ids[:0]
	pending := false // an unknown token that is not in ids yet
	for i := 0; i < len(word); {
		r, n := utf8.DecodeRune(word[i:])
		place := 0
		if i == 0 {
			place |= atStart
		}
		if i+n == len(word) {
			place |= atEnd
		}
		id := b.symbols[place].of(r)
		if id == noToken && b.byteFallback {
			// A pending unknown token follows the bytes, as in the library.
			if with, ok := b.appendBytes(z, ids, word[i:i+n], place); ok {
				ids = with
				i += n
				continue
			}
		}
		if id == noToken && b.unkID == noToken {
			return dst, cannotSpell(fmt.Sprintf("%q", word[i:i+n]), word)
		}
		if pending && (id != noToken || !b.fuseUnk) {
			ids = append(ids, b.unkID)
		}
		if pending = id == noToken; !pending {
			ids = append(ids, id)
		}
		i += n
	}
	if pending {
		ids = append(ids, b.unkID)
	}
	if z.ids = ids; len(ids) <= shortWord {
		return z.merger.mergeFew(b.t, dst, ids), nil
	}
	dst = z.merger.mergeSymbols(b.t, dst, ids)
	if cap(ids) > keptScratch {
		z.ids = nil
	}
	return dst, nil
}

// appendBytes appends the ids of the bytes of a character, with the prefix or suffix for its
// position. ok is false if a byte has no id.
func (b *charBPE) appendBytes(z *modelScratch, ids []uint32, char []byte, place int) (with []uint32, ok bool) {
	if b.prefix != "" || b.suffix != "" {
		text := z.bytes[:0]
		if place&atStart == 0 {
			text = append(text, b.prefix...)
		}
		text = append(text, char...)
		if place&atEnd != 0 {
			text = append(text, b.suffix...)
		}
		z.bytes, char = text, text
	}
	for _, c := range char {
		if b.fallback[c] == noToken {
			return nil, false
		}
		ids = append(ids, b.fallback[c])
	}
	return ids, true
}
