package tokenize

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"unicode/utf8"
)

// This file encodes a text in chunks whose ids do not depend on the text around them, so that the
// ids of a chunk can be cached with its bytes before normalization. Normalizers, pre-tokenizers and
// the model run only for chunks that are not in the cache.
//
// A chunk is a run of blanks, which are spaces and possibly line breaks, and the characters up to
// the next blank. The boundary between two chunks is exact, which means that the ids of both
// together are the ids of each, if it is exact for each step of the pipeline:
//
//   - A normalizer that replaces single characters is exact everywhere.
//   - Normal forms are exact before the characters that start chunks, which neither combine nor
//     compose with previous characters.
//   - The charsmap looks up grapheme clusters. No cluster has a boundary inside unless the last
//     character before it is of the class Prepend, or the boundary is between \r and \n.
//   - Strip, Prepend and Replace act at the ends of the text, or on matches. Both sides must have
//     characters, the left side must not end in white space, and the literal or the run of spaces
//     that Replace looks for must not cross the boundary.
//   - If the first pre-tokenizer removes white space, or cuts before each space (Metaspace), the
//     right side must start with white space after normalization.
//   - Otherwise the model must be a charBPE that no merge crosses the boundary of: see
//     [charBPE.newCharPairs].
//
// What depends on a chunk is checked when its ids are computed: a chunk opens if a boundary may be
// before it, and closes if a boundary may be after it. Only chunks that do both are in the cache.
// The others are encoded together with their neighbours.
type chunking struct {
	p      *pipeline
	blanks [2]byte // equal if only the space is one
	// where the boundary between chunks is
	kind  boundaryKind
	pairs *charPairs // for betweenPairs
	plain *plainRunes
	// Chinese characters are chunks too, because the first normalizers put spaces around them.
	chinese *rustData // nil if not
}

type boundaryKind uint8

const (
	inWhiteSpace boundaryKind = iota // the first pre-tokenizer removes white space
	atSpaces                         // the first pre-tokenizer cuts before each space
	betweenPairs                     // the model cuts at pairs of characters
)

// The tags of chunks in a cache.
const (
	insideText   uint16 = iota
	startsPiece         // nothing is before the chunk, or it is an added token
	startsText          // the chunk starts the document, if that makes a difference
	afterChinese        // a Chinese character is before the chunk
)

// newChunking returns nil if the pipeline has a step for which no boundary is known to be exact.
func (p *pipeline) newChunking(t *Tokenizer) *chunking {
	k := &chunking{p: p}
	if t.composed != nil || !k.findKind() {
		return nil
	}
	for _, n := range p.normalizers {
		if !exactBetweenChunks(n) {
			return nil
		}
	}
	k.findChinese()
	z := newNormalizing(p)
	for i, blank := range []byte{' ', '\n'} {
		// A blank must remain a character that starts chunks.
		if opens, _ := k.normalizeSteps(z, []byte{blank, 'a'}, 0, insideText); !opens {
			break
		}
		for ; i < len(k.blanks); i++ {
			k.blanks[i] = blank
		}
	}
	if k.blanks[0] == 0 {
		return nil
	}
	k.plain = newPlainRunes(k)
	return k
}

// findKind sets kind and pairs. It returns false if there is no boundary.
func (k *chunking) findKind() bool {
	steps := k.p.preTokenizers
	if len(steps) == 0 {
		return false
	}
	switch first := steps[0].(type) {
	case splitRunes:
		if first.kind == whiteSpace && first.behavior == removed {
			k.kind = inWhiteSpace
			return true
		}
		return false
	case wordsAndSymbols:
		k.kind = inWhiteSpace
		return true
	case metaspace:
		if first.replacement != lowerOneEighthBlock {
			return false
		}
		if first.split {
			k.kind = atSpaces
			return true
		}
		steps = steps[1:]
	}
	if len(steps) != 1 {
		return false
	}
	last, ok := steps[0].(cutPairs)
	k.kind, k.pairs = betweenPairs, last.pairs
	return ok && k.pairs.complete
}

// exactBetweenChunks reports whether a normalizer is one of those in the comment on [chunking].
func exactBetweenChunks(n normalizeStep) bool {
	switch n := n.(type) {
	case normalForm, lowercase, replaceRunes, spaceChinese, strip, prepend, *charsmap:
		return true
	case replace:
		if n.regex != nil {
			return n.source == " {2,}"
		}
		// A literal with one of these after its first byte would cross a boundary.
		after := string(n.literal[1:])
		return !bytes.ContainsAny([]byte(after), " \n") && bytes.LastIndex(n.literal, []byte(lowerOneEighthBlock)) < 1
	}
	return false
}

// findChinese sets chinese if a normalizer puts spaces around Chinese characters, and the
// normalizers before it replace single characters. The steps after it are exact at any white space.
func (k *chunking) findChinese() {
	if k.kind != inWhiteSpace {
		return
	}
	for _, n := range k.p.normalizers {
		switch n := n.(type) {
		case spaceChinese:
			k.chinese = n.data
		case replaceRunes, lowercase, normalForm:
			if _, ok := n.(normalForm); ok && k.chinese == nil {
				return
			}
		default:
			k.chinese = nil
			return
		}
	}
}

// next returns the length of the chunk that s, which is not empty, starts with. ascii is false if
// the chunk may have other characters than ASCII.
func (k *chunking) next(s []byte) (n int, ascii bool) {
	b0, b1 := k.blanks[0], k.blanks[1]
	i := 0
	for i < len(s) && (s[i] == b0 || s[i] == b1) {
		i++
	}
	x0, x1, all := uint64(b0)*eachByte, uint64(b1)*eachByte, uint64(0)
	for ; i+8 <= len(s); i += 8 {
		x := binary.LittleEndian.Uint64(s[i:])
		all |= x
		y0, y1 := x^x0, x^x1
		// The lowest set bit is the first blank.
		if found := ((y0-eachByte)&^y0 | (y1-eachByte)&^y1) & highBits; found != 0 {
			return i + bits.TrailingZeros64(found)>>3, all&highBits == 0
		}
	}
	for ; i < len(s) && s[i] != b0 && s[i] != b1; i++ {
		all |= uint64(s[i])
	}
	return i, all&highBits == 0
}

// beforeChinese returns the length of the text before the first Chinese character in s, or of that
// character if it is the first.
func (k *chunking) beforeChinese(s []byte) (n int, isChinese bool) {
	for i := 0; i < len(s); {
		if s[i] < utf8.RuneSelf {
			i++
			continue
		}
		r, size := utf8.DecodeRune(s[i:])
		if k.chinese.kinds.at(r)&bertChinese != 0 {
			if i == 0 {
				return size, true
			}
			return i, false
		}
		i += size
	}
	return len(s), false
}

// normalize normalizes s, whose first origin bytes originate from the first character of the
// document, and reports whether it opens and closes.
func (k *chunking) normalize(z *normalizing, s []byte, origin int, tag uint16) (opens, closes bool) {
	if tag == insideText {
		// The steps before the last have the same ends as far as normalizeSteps checks them.
		if z.begin(nil, 0); k.plain.normalize(z, s, k.blanks) {
			return k.opens(z.text), k.closes(z.text)
		}
	}
	return k.normalizeSteps(z, s, origin, tag)
}

// normalizeSteps is normalize with all normalizers.
func (k *chunking) normalizeSteps(z *normalizing, s []byte, origin int, tag uint16) (opens, closes bool) {
	z.begin(s, origin)
	opens, closes = true, true
	inside := tag == insideText
	for _, n := range k.p.normalizers {
		opens = opens && (k.chinese != nil || startsChunk(z.text))
		switch n := n.(type) {
		case *charsmap:
			last, _ := utf8.DecodeLastRune(z.text)
			closes = closes && last != '\r' && n.data.at(last)&graphemePrepend == 0
		case replace:
			closes = closes && (n.regex == nil || !bytes.HasSuffix(z.text, []byte(" ")))
		case prepend:
			if inside {
				continue
			}
		case strip:
			closes = closes && !endsInWhiteSpace(z.text)
			strip{n.left && !inside, n.right}.normalize(z)
			continue
		}
		n.normalize(z)
	}
	return opens && k.opens(z.text), closes && k.closes(z.text)
}

// startsChunk reports whether s starts with a blank, or with SentencePiece's character for it.
func startsChunk(s []byte) bool {
	return len(s) > 0 && (s[0] == ' ' || s[0] == '\n') || bytes.HasPrefix(s, []byte(lowerOneEighthBlock))
}

func endsInWhiteSpace(s []byte) bool {
	last, _ := utf8.DecodeLastRune(s)
	return pinnedRust().kinds.at(last)&whiteSpace != 0
}

// opens reports whether normalized text may have a boundary before it.
func (k *chunking) opens(s []byte) bool {
	switch k.kind {
	case inWhiteSpace:
		return len(s) > 0 && (s[0] == ' ' || s[0] == '\n')
	case atSpaces:
		return len(s) > 0 && s[0] != '\n' && startsChunk(s)
	}
	return startsChunk(s)
}

// closes reports whether normalized text may have a boundary after it.
func (k *chunking) closes(s []byte) bool {
	if len(s) == 0 {
		return false
	}
	if k.kind != betweenPairs {
		return true
	}
	last, _ := utf8.DecodeLastRune(s)
	return last != ' ' && !k.pairs.beforeBlank(last)
}

// chunkEncoder has the chunks of one goroutine.
type chunkEncoder struct {
	*chunking
	cache textCache
	// The last chunk before the current one: where it starts in the text and its ids start in dst,
	// and its tag.
	at, ids int
	tag     uint16
	blank   int  // the first blank after the current chunk
	ascii   bool // no other characters are between the current chunk and the blank
}

// begin starts a text.
func (c *chunkEncoder) begin() { c.blank = 0 }

// chunk returns the length of the chunk at s[at:], and whether it is a Chinese character.
func (c *chunkEncoder) chunk(s []byte, at int) (n int, isChinese bool) {
	if c.blank <= at {
		n, ascii := c.next(s[at:])
		c.blank, c.ascii = at+n, ascii
	}
	if c.chinese != nil && !c.ascii {
		return c.beforeChinese(s[at:c.blank])
	}
	return c.blank - at, false
}

// appendChunks appends the ids of a piece of a document. first means that the document starts with
// the piece.
func (e *pipelineEncoder) appendChunks(dst []uint32, s []byte, first bool) ([]uint32, error) {
	c := e.chunks
	start := len(dst)
	tag := startsPiece
	if first && e.p.usesOrigin {
		tag = startsText
	}
	c.begin()
	for at := 0; at < len(s); {
		n, isChinese := c.chunk(s, at)
		ids, end := len(dst), at+n
		var known bool
		if dst, known = c.cache.appendIDs(dst, s[at:], n, tag); known {
			c.at, c.ids, c.tag = at, ids, tag
		} else {
			var alone bool
			var err error
			if dst, end, alone, err = e.appendChunk(dst, s, at, n, tag); err != nil {
				return e.appendWhole(dst[:start], s, first)
			}
			if alone {
				c.cache.remember(s[at:], n, tag, dst[ids:])
			}
		}
		at, tag = end, insideText
		if isChinese {
			tag = afterChinese
		}
	}
	return dst, nil
}

// appendChunk appends the ids of the chunk of n bytes at the given position of s, which is not in
// the cache. It returns where the next chunk starts. If the chunk does not open, appendChunk
// replaces the ids of the chunk before it. alone means that the ids belong to the chunk alone.
//
// Chunks that are encoded together at least double in size each time, so that the time is linear in
// the length of the text.
func (e *pipelineEncoder) appendChunk(dst []uint32, s []byte, at, n int, tag uint16) (ids []uint32, end int,
	alone bool, err error) {
	c := e.chunks
	from, end := at, at+n
	e.normalizing.release()
	for {
		origin := 0
		if tag == startsText {
			_, origin = utf8.DecodeRune(s)
		}
		opens, closes := c.normalize(e.normalizing, s[from:end], origin, tag)
		if tag == insideText && !opens {
			from, dst, tag = c.at, dst[:c.ids], c.tag
		} else if closes || end == len(s) {
			alone = from == at && end == at+n && closes && (opens || tag != insideText)
			break
		}
		if end = min(from+2*(end-from), len(s)); end < len(s) {
			n, _ := c.next(s[end:])
			end += n
		}
	}
	c.at, c.ids, c.tag = from, len(dst), tag
	inside := tag == insideText && c.kind != inWhiteSpace
	dst, err = e.appendNormalized(dst, e.normalizing.text, e.normalizing.origin, inside)
	return dst, end, alone, err
}
