package tokenize

import (
	"encoding/binary"
	"math/bits"
)

// A textCache caches the ids of short texts, with the texts themselves as keys. Its size is fixed:
// a new text replaces an old one. A tag, below 256, distinguishes equal texts with different ids.
type textCache struct {
	short []shortSet
	long  longTexts
}

const (
	shortText     = 24  // length in bytes of the longest text with a short entry
	longestCached = 255 // of the longest text in the cache
	shortIDs      = 9   // maximum number of ids of a short entry
)

// A shortSet has the entries of texts with the same bits of the hash. A new text takes the last
// entry, and moves towards the first one whenever it occurs again. So frequent texts stay.
type shortSet [4]shortEntry

type shortKey [shortText / 8]uint64 // the bytes of the text, and zeros after them

type shortEntry struct { // a cache line
	key  shortKey
	kind uint16 // length and tag of the text; 0 if the entry is empty
	k    uint16 // number of ids
	ids  [shortIDs]uint32
}

// newTextCache returns a cache with 1<<shortBits sets of four short entries of 64 bytes, and
// 1<<longBits bytes for long entries.
func newTextCache(shortBits, longBits int) textCache {
	return textCache{make([]shortSet, 1<<shortBits), newLongTexts(longBits)}
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
	for i := 1; i < len(s) && s[i-1].kind != 0; i++ {
		if s[i].key == *key && s[i].kind == kind {
			s[i-1], s[i] = s[i], s[i-1]
			return &s[i-1]
		}
	}
	return nil
}

// remember adds a text that is not in the set.
func (s *shortSet) remember(key *shortKey, kind uint16, ids []uint32) {
	i := len(s) - 1
	for i > 0 && s[i-1].kind == 0 {
		i--
	}
	e := &s[i]
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

// appendIDs appends the ids of s[:n] with this tag, if they are in the cache. It reads beyond n if
// s is longer.
func (c *textCache) appendIDs(dst []uint32, s []byte, n int, tag uint16) (ids []uint32, ok bool) {
	kind := kindOf(n, tag)
	if n <= shortText {
		key := shortKeyOf(s, n)
		if known := c.shortSet(&key, kind).find(&key, kind); known != nil {
			return known.appendTo(dst), true
		}
	}
	if n <= shortIDs || n > longestCached {
		return dst, false
	}
	return c.long.appendIDs(dst, s[:n], kind, hashOf(s[:n], kind))
}

// remember adds s[:n] with this tag, which is not in the cache, if it fits.
func (c *textCache) remember(s []byte, n int, tag uint16, ids []uint32) {
	kind := kindOf(n, tag)
	switch {
	case n <= shortText && len(ids) <= shortIDs:
		key := shortKeyOf(s, n)
		c.shortSet(&key, kind).remember(&key, kind, ids)
	case n > shortIDs && n <= longestCached:
		c.long.remember(s[:n], kind, hashOf(s[:n], kind), ids)
	}
}

// longTexts has the texts with more than shortIDs bytes that have no short entry. The newest ones
// are in a ring buffer, one after the other: the kind, the number of ids as uint16, the text, and
// the ids as uint32.
type longTexts struct {
	ring []byte
	head uint64 // number of bytes ever written
	// By hash: the head before the text was written, shifted left by longTagBits, and a part of the
	// hash. 0 is an empty slot.
	index [][2]uint64
}

const (
	longTagBits = 16
	longHeader  = 4
)

func newLongTexts(sizeBits int) longTexts {
	return longTexts{ring: make([]byte, 1<<sizeBits), head: 1, index: make([][2]uint64, 1<<(sizeBits-8))}
}

func hashOf(text []byte, kind uint16) uint64 {
	h, s := uint64(kind), text
	for ; len(s) > 8; s = s[8:] {
		hi, lo := bits.Mul64(binary.LittleEndian.Uint64(s)^0xa0761d6478bd642f, h^0xe7037ed1a0b428db)
		h = hi ^ lo
	}
	hi, lo := bits.Mul64(binary.LittleEndian.Uint64(text[len(text)-8:])^0x8ebc6af09c88c6e3, h^0x589965cc75374cc3)
	return hi ^ lo
}

// appendIDs appends the ids of the text with this hash, if it is in the cache.
func (c *longTexts) appendIDs(dst []uint32, text []byte, kind uint16, hash uint64) (ids []uint32, ok bool) {
	for _, slot := range c.index[hash>>longTagBits&uint64(len(c.index)-1)] {
		at := slot >> longTagBits
		if slot == 0 || slot<<(64-longTagBits) != hash<<(64-longTagBits) || c.head-at > uint64(len(c.ring)) {
			continue
		}
		entry := c.ring[at&uint64(len(c.ring)-1):]
		if binary.LittleEndian.Uint16(entry) != kind ||
			string(entry[longHeader:longHeader+len(text)]) != string(text) {
			continue
		}
		entry, k := entry[longHeader+len(text):], int(binary.LittleEndian.Uint16(entry[2:]))
		for i := range k {
			dst = append(dst, binary.LittleEndian.Uint32(entry[4*i:]))
		}
		return dst, true
	}
	return dst, false
}

// remember adds a text that is not in the cache. It replaces the oldest texts.
func (c *longTexts) remember(text []byte, kind uint16, hash uint64, ids []uint32) {
	size, ring := uint64(longHeader+len(text)+4*len(ids)), uint64(len(c.ring))
	if size > ring/8 || c.head >= 1<<(64-longTagBits)-2*ring {
		return
	}
	if rest := ring - c.head&(ring-1); rest < size {
		c.head += rest // an entry is contiguous
	}
	entry := c.ring[c.head&(ring-1):]
	binary.LittleEndian.PutUint16(entry, kind)
	binary.LittleEndian.PutUint16(entry[2:], uint16(len(ids)))
	entry = entry[longHeader+copy(entry[longHeader:], text):]
	for i, id := range ids {
		binary.LittleEndian.PutUint32(entry[4*i:], id)
	}
	set := &c.index[hash>>longTagBits&uint64(len(c.index)-1)]
	set[0], set[1] = c.head<<longTagBits|hash&(1<<longTagBits-1), set[0]
	c.head += size
}
