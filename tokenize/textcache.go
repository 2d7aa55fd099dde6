package tokenize

import (
	"encoding/binary"
	"math/bits"
)

// A textCache caches the ids of short texts, with the texts themselves as keys. Its size is fixed:
// a new text replaces an old one. A tag, below 256, distinguishes equal texts with different ids.
type textCache struct {
	short []shortSet
	long  []longText
}

const (
	shortText     = 24 // length in bytes of the longest text with a short entry
	longestCached = 96 // of the longest text in the cache
	shortIDs      = 9  // maximum number of ids of an entry
	longIDs       = 23
)

// A shortSet has the entries of texts with the same bits of the hash. A new text takes the second
// entry, and moves to the first one when it occurs again. So frequent texts stay.
type shortSet [2]shortEntry

type shortKey [shortText / 8]uint64 // the bytes of the text, and zeros after them

type shortEntry struct { // a cache line
	key  shortKey
	kind uint16 // length and tag of the text; 0 if the entry is empty
	k    uint16 // number of ids
	ids  [shortIDs]uint32
}

type longText struct { // three cache lines
	kind uint16
	k    uint16
	text [longestCached]byte
	ids  [longIDs]uint32
}

// newTextCache returns a cache with 1<<shortBits sets of two short entries of 64 bytes, and
// 1<<longBits long entries of 192 bytes.
func newTextCache(shortBits, longBits int) textCache {
	return textCache{make([]shortSet, 1<<shortBits), make([]longText, 1<<longBits)}
}

// kindOf returns the kind of a text of n bytes, 0 < n <= longestCached.
func kindOf(n int, tag uint16) uint16 { return tag<<8 | uint16(n) }

// shortMasks[n] keeps the first n bytes of a key.
var shortMasks = func() (masks [shortText + 1]shortKey) {
	for n := range masks {
		for i := range masks[n] {
			masks[n][i] = 1<<(8*min(max(n-8*i, 0), 8)) - 1
		}
	}
	return masks
}()

// shortKeyOf returns the key of s[:n], 0 < n <= shortText. It reads beyond n if s is longer.
func shortKeyOf(s []byte, n int) shortKey {
	if len(s) < shortText {
		var b [shortText]byte
		copy(b[:], s)
		s = b[:]
	}
	mask := &shortMasks[n]
	return shortKey{binary.LittleEndian.Uint64(s) & mask[0], binary.LittleEndian.Uint64(s[8:]) & mask[1],
		binary.LittleEndian.Uint64(s[16:]) & mask[2]}
}

// shortSet returns the set of a text, which depends on its key and kind.
func (c *textCache) shortSet(key *shortKey, kind uint16) *shortSet {
	h1, l1 := bits.Mul64(key[0]^0xa0761d6478bd642f, key[1]^0xe7037ed1a0b428db)
	h2, l2 := bits.Mul64(key[2]^uint64(kind)<<48^0x8ebc6af09c88c6e3, h1^l1^0x589965cc75374cc3)
	return &c.short[(h2^l2)&uint64(len(c.short)-1)]
}

// find returns the entry of the text, nil if there is none.
func (s *shortSet) find(key *shortKey, kind uint16) *shortEntry {
	if s[0].key == *key && s[0].kind == kind {
		return &s[0]
	}
	if s[1].key == *key && s[1].kind == kind {
		s[0], s[1] = s[1], s[0]
		return &s[0]
	}
	return nil
}

// remember adds a text that is not in the set, unless it has too many ids.
func (s *shortSet) remember(key *shortKey, kind uint16, ids []uint32) {
	if len(ids) > shortIDs {
		return
	}
	e := &s[1]
	if s[0].kind == 0 {
		e = &s[0]
	}
	e.key, e.kind, e.k = *key, kind, uint16(len(ids))
	copy(e.ids[:], ids)
}

// appendTo appends the ids. If dst has the capacity, it writes all ids of the entry, which avoids a
// dependency on their number.
func (e *shortEntry) appendTo(dst []uint32) []uint32 {
	n := len(dst)
	if cap(dst)-n < shortIDs {
		return append(dst, e.ids[:e.k]...)
	}
	*(*[shortIDs]uint32)(dst[n : n+shortIDs]) = e.ids
	return dst[:n+int(e.k)]
}

// longText returns the only entry that can have the text, of shortText to longestCached bytes.
func (c *textCache) longText(text []byte, kind uint16) *longText {
	h := uint64(kind)
	s := text
	for ; len(s) > 8; s = s[8:] {
		hi, lo := bits.Mul64(binary.LittleEndian.Uint64(s)^0xa0761d6478bd642f, h^0xe7037ed1a0b428db)
		h = hi ^ lo
	}
	hi, lo := bits.Mul64(binary.LittleEndian.Uint64(text[len(text)-8:])^0x8ebc6af09c88c6e3,
		h^uint64(len(text))^0x589965cc75374cc3)
	return &c.long[(hi^lo)&uint64(len(c.long)-1)]
}

func (e *longText) holds(text []byte, kind uint16) bool {
	return e.kind == kind && string(e.text[:len(text)]) == string(text)
}

// remember replaces the entry, unless the text has too many ids.
func (e *longText) remember(text []byte, kind uint16, ids []uint32) {
	if len(ids) > longIDs {
		return
	}
	e.kind, e.k = kind, uint16(len(ids))
	copy(e.text[:], text)
	copy(e.ids[:], ids)
}
