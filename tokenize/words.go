package tokenize

import (
	"encoding/binary"
	"math/bits"
)

// Most words of a text have occurred before. A word is its own key: its bytes as machine words with
// its length in the last byte, so that comparison needs no loop and an entry is half a cache line
// or a whole one.

const (
	narrowWord = 15 // length in bytes of the longest word with a narrow key
	wideWord   = 31 // of the longest word in the cache
	narrowIDs  = 3  // maximum number of ids of an entry
	wideIDs    = 7
)

type (
	narrowKey [2]uint64
	wideKey   [4]uint64
)

// keyMasks[n] keeps the first n of 16 bytes.
var keyMasks = func() (masks [16][2]uint64) {
	for n := range masks {
		masks[n] = [2]uint64{1<<(8*min(n, 8)) - 1, 1<<(8*max(n-8, 0)) - 1}
	}
	return masks
}()

// narrowKeyOf returns the key of s[:n], 0 < n <= narrowWord. It reads beyond n if s is longer.
func narrowKeyOf(s []byte, n int) narrowKey {
	if len(s) < 16 {
		var b [16]byte
		copy(b[:], s)
		s = b[:]
	}
	mask := &keyMasks[n&15]
	return narrowKey{binary.LittleEndian.Uint64(s) & mask[0], binary.LittleEndian.Uint64(s[8:])&mask[1] | uint64(n)<<56}
}

func (k *narrowKey) hash() uint64 {
	hi, lo := bits.Mul64(k[0]^0xa0761d6478bd642f, k[1]^0xe7037ed1a0b428db)
	return hi ^ lo
}

// wideKeyOf returns the key of s[:n], narrowWord < n <= wideWord. It reads beyond n if s is longer.
func wideKeyOf(s []byte, n int) wideKey {
	if len(s) < 32 {
		var b [32]byte
		copy(b[:], s)
		s = b[:]
	}
	mask := &keyMasks[n&15]
	return wideKey{
		binary.LittleEndian.Uint64(s), binary.LittleEndian.Uint64(s[8:]),
		binary.LittleEndian.Uint64(s[16:]) & mask[0], binary.LittleEndian.Uint64(s[24:])&mask[1] | uint64(n)<<56,
	}
}

func (k *wideKey) hash() uint64 {
	h1, l1 := bits.Mul64(k[0]^0xa0761d6478bd642f, k[1]^0xe7037ed1a0b428db)
	h2, l2 := bits.Mul64(k[2]^0x8ebc6af09c88c6e3, k[3]^0x589965cc75374cc3)
	h, l := bits.Mul64(h1^l1^0x1d8e4e27c47d124f, h2^l2)
	return h ^ l
}

// wordCache caches the ids of words. A set has two entries per word: a new word takes the first,
// and the previous one moves to the second. The cache is small enough for the processor's cache.
type wordCache struct {
	narrow [1 << narrowBits]narrowSet
	wide   [1 << wideBits]wideSet
}

const (
	narrowBits = 15
	wideBits   = 12
)

type (
	narrowSet [2]narrowEntry // a cache line
	wideSet   [2]wideEntry
)

type narrowEntry struct {
	key narrowKey // zero if the entry is empty: no word has length 0
	k   uint32    // number of ids
	ids [narrowIDs]uint32
}

type wideEntry struct {
	key wideKey
	k   uint32
	ids [wideIDs]uint32
}

func (c *wordCache) narrowSet(hash uint64) *narrowSet { return &c.narrow[hash>>(64-narrowBits)] }

func (c *wordCache) wideSet(hash uint64) *wideSet { return &c.wide[hash>>(64-wideBits)] }

// find returns the entry of the word, nil if there is none.
func (s *narrowSet) find(key narrowKey) *narrowEntry {
	if s[0].key == key {
		return &s[0]
	}
	if s[1].key == key {
		return &s[1]
	}
	return nil
}

func (s *wideSet) find(key wideKey) *wideEntry {
	if s[0].key == key {
		return &s[0]
	}
	if s[1].key == key {
		return &s[1]
	}
	return nil
}

// appendTo appends the ids. If dst has the capacity, it writes all ids of the entry, which avoids a
// dependency on their number.
func (e *narrowEntry) appendTo(dst []uint32) []uint32 {
	n := len(dst)
	if cap(dst)-n < narrowIDs {
		return append(dst, e.ids[:e.k]...)
	}
	*(*[narrowIDs]uint32)(dst[n : n+narrowIDs]) = e.ids
	return dst[:n+int(e.k)]
}

func (e *wideEntry) appendTo(dst []uint32) []uint32 {
	n := len(dst)
	if cap(dst)-n < wideIDs {
		return append(dst, e.ids[:e.k]...)
	}
	*(*[wideIDs]uint32)(dst[n : n+wideIDs]) = e.ids
	return dst[:n+int(e.k)]
}

// remember adds a word that is not in the set, unless it has too many ids.
func (s *narrowSet) remember(key narrowKey, ids []uint32) {
	if len(ids) > narrowIDs {
		return
	}
	s[1] = s[0]
	s[0].key, s[0].k = key, uint32(len(ids))
	copy(s[0].ids[:], ids)
}

func (s *wideSet) remember(key wideKey, ids []uint32) {
	if len(ids) > wideIDs {
		return
	}
	s[1] = s[0]
	s[0].key, s[0].k = key, uint32(len(ids))
	copy(s[0].ids[:], ids)
}

// wordTable holds the narrow words that are one token, for all encoders. It is used when the cache
// does not have a word: it reads one cache line, where a search for tokens would read many. Buckets
// are cache lines; a full bucket continues in the next.
type wordTable struct{ buckets []wordBucket }

type wordBucket struct {
	keys [3]narrowKey // zero if empty
	ids  [3]uint32
	_    uint32
}

// newWordTable returns a table for n words: buckets are at most two thirds full on average.
func newWordTable(n int) wordTable { return wordTable{make([]wordBucket, 1<<bits.Len(uint(n/2)))} }

func (t *wordTable) put(k narrowKey, id uint32) {
	mask := uint64(len(t.buckets) - 1)
	for i := k.hash(); ; i++ {
		b := &t.buckets[i&mask]
		for j := range b.keys {
			if b.keys[j] == (narrowKey{}) {
				b.keys[j], b.ids[j] = k, id
				return
			}
		}
	}
}

// get returns the id of the word with this key and hash, noToken if it is not one token.
func (t *wordTable) get(k narrowKey, hash uint64) uint32 {
	buckets := t.buckets
	for i := hash; ; i++ {
		b := &buckets[i&uint64(len(buckets)-1)]
		switch k {
		case b.keys[0]:
			return b.ids[0]
		case b.keys[1]:
			return b.ids[1]
		case b.keys[2]:
			return b.ids[2]
		}
		if b.keys[2] == (narrowKey{}) { // the last one to be filled
			return noToken
		}
	}
}
