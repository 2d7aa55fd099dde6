package tokenize

import "unicode/utf8"

// wordPiece repeatedly takes the longest token at the start of the rest of a word. A word that
// cannot be spelled this way is one unknown token.
type wordPiece struct {
	tree     prefixTree
	inner    uint32 // root of the tokens that do not start a word
	hasInner bool   // there are such tokens
	unkID    uint32
	maxRunes int // words of more characters are unknown
}

func newWordPiece(vocab map[string]uint32, unk, prefix string, maxRunes int) *wordPiece {
	w := &wordPiece{tree: newVocabularyTree(vocab), inner: treeRoot, hasInner: true, unkID: noToken, maxRunes: maxRunes}
	if id, ok := vocab[unk]; ok {
		w.unkID = id
	}
	for i := 0; i < len(prefix) && w.hasInner; i++ {
		w.inner, _, w.hasInner = w.tree.step(w.inner, prefix[i])
	}
	return w
}

func (w *wordPiece) appendWord(_ *modelScratch, dst []uint32, word []byte) ([]uint32, error) {
	start := len(dst)
	known := len(word) <= w.maxRunes || runeCount(word) <= w.maxRunes
	for rest, begin := word, uint32(treeRoot); known && len(rest) > 0; begin = w.inner {
		id, n := uint32(noToken), 0
		if len(rest) == len(word) || w.hasInner {
			for i, node := 0, begin; i < len(rest); i++ {
				child, info, ok := w.tree.step(node, rest[i])
				if !ok {
					break
				}
				if node = child; info&wholeNode != 0 {
					id, n = info&idMask, i+1
				}
			}
		}
		if known = n > 0; known {
			dst = append(dst, id)
			rest = rest[n:]
		}
	}
	if known {
		return dst, nil
	}
	if w.unkID == noToken {
		return dst[:start], cannotSpell("a part", word)
	}
	return append(dst[:start], w.unkID), nil
}

// runeCount is utf8.RuneCount for valid UTF-8. The function of Go 1.26 allocates.
func runeCount(s []byte) int {
	n := 0
	for _, c := range s {
		if utf8.RuneStart(c) {
			n++
		}
	}
	return n
}

// wordLevel has whole words for tokens.
type wordLevel struct {
	vocab map[string]uint32
	unkID uint32
}

func newWordLevel(vocab map[string]uint32, unk string) *wordLevel {
	w := &wordLevel{vocab: vocab, unkID: noToken}
	if id, ok := vocab[unk]; ok {
		w.unkID = id
	}
	return w
}

func (w *wordLevel) appendWord(_ *modelScratch, dst []uint32, word []byte) ([]uint32, error) {
	id, ok := w.vocab[string(word)]
	if !ok {
		if id = w.unkID; id == noToken {
			return dst, cannotSpell("the word", word)
		}
	}
	return append(dst, id), nil
}
