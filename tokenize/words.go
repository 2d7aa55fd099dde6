package tokenize

import (
	"encoding/binary"
	"math/bits"
	"unsafe"
)

// Most words of a text are tokens of the vocabulary or have been met before. Words of up to 16 bytes are looked up as two
// machine words and their length, longer ones by a hash and their bytes.

const (
	inlineWord = 16 // longest word that is its own key
	cachedWord = 48 // longest word that the cache keeps
)

// wordKey is the bytes of a word of at most inlineWord bytes, padded with zeros.
type wordKey struct{ lo, hi uint64 }

// keyOf returns the key of s[:n], 0 < n <= inlineWord. It reads beyond n where s goes on.
func keyOf(s []byte, n int) wordKey {
	if len(s) < inlineWord {
		var b [inlineWord]byte
		copy(b[:], s)
		s = b[:]
	}
	k := wordKey{binary.LittleEndian.Uint64(s), binary.LittleEndian.Uint64(s[8:])}
	if n <= 8 {
		k.lo &= ^uint64(0) >> (64 - 8*uint(n))
		k.hi = 0
	} else {
		k.hi &= ^uint64(0) >> (128 - 8*uint(n))
	}
	return k
}

func (k wordKey) hash(n int) uint64 {
	hi, lo := bits.Mul64(k.lo^0xa0761d6478bd642f^uint64(n), k.hi^0xe7037ed1a0b428db)
	return hi ^ lo
}

// hashLong is the hash of a word longer than inlineWord.
func hashLong(w []byte) uint64 {
	h := uint64(len(w))
	for i := 0; i+8 < len(w); i += 8 {
		hi, lo := bits.Mul64(binary.LittleEndian.Uint64(w[i:])^0xa0761d6478bd642f, h^0xe7037ed1a0b428db)
		h = hi ^ lo
	}
	hi, lo := bits.Mul64(binary.LittleEndian.Uint64(w[len(w)-8:])^0x8ebc6af09c88c6e3, h^0xe7037ed1a0b428db)
	return hi ^ lo
}

// wordTable holds the words that are one token. It is an open-addressed hash table, at most half full.
type wordTable struct{ slots []wordSlot }

type wordSlot struct {
	key wordKey
	n   uint32 // 0 is an empty slot
	id  uint32
}

func newWordTable(n int) wordTable { return wordTable{make([]wordSlot, 1<<bits.Len(uint(2*n+15)))} }

func (t *wordTable) put(k wordKey, n int, id uint32) {
	mask := uint64(len(t.slots) - 1)
	i := k.hash(n) & mask
	for t.slots[i].n != 0 {
		i = (i + 1) & mask
	}
	t.slots[i] = wordSlot{k, uint32(n), id}
}

func (t *wordTable) get(k wordKey, n int, hash uint64) (uint32, bool) {
	slots := t.slots
	for i := hash; ; i++ {
		s := &slots[i&uint64(len(slots)-1)]
		if s.key == k && s.n == uint32(n) {
			return s.id, true
		}
		if s.n == 0 {
			return 0, false
		}
	}
}

// wordCache remembers the ids of words. It is direct-mapped: a word takes the place of another. It is asked before the table
// of words that are one token, because it is small enough to stay near the processor.
type wordCache struct {
	short [1 << shortBits]shortEntry
	long  [1 << longBits]longEntry
}

const (
	shortBits = 14
	longBits  = 12
)

type shortEntry struct {
	key  wordKey
	n, k uint8 // bytes and ids; n 0 is an empty entry
	ids  [11]uint32
}

type longEntry struct {
	hash uint64
	n, k uint8
	word [cachedWord]byte
	ids  [15]uint32
}

// A short entry is a cache line.
const _ = uint(64 - unsafe.Sizeof(shortEntry{}))

func (c *wordCache) shortEntry(hash uint64) *shortEntry { return &c.short[hash>>(64-shortBits)] }

func (c *wordCache) longEntry(hash uint64) *longEntry { return &c.long[hash>>(64-longBits)] }

func (e *shortEntry) holds(k wordKey, n int) bool { return e.key == k && int(e.n) == n }

func (e *shortEntry) set(k wordKey, n int, ids []uint32) {
	if len(ids) > len(e.ids) {
		return
	}
	e.key, e.n, e.k = k, uint8(n), uint8(len(ids))
	copy(e.ids[:], ids)
}

func (e *longEntry) holds(hash uint64, w []byte) bool {
	return e.hash == hash && int(e.n) == len(w) && string(e.word[:e.n]) == string(w)
}

func (e *longEntry) set(hash uint64, w []byte, ids []uint32) {
	if len(ids) > len(e.ids) {
		return
	}
	e.hash, e.n, e.k = hash, uint8(len(w)), uint8(len(ids))
	copy(e.word[:], w)
	copy(e.ids[:], ids)
}

// fillWords enters every token that merging its bytes gives back. n is how many tokens there are.
func (t *Tokenizer) fillWords(n int) {
	t.words = newWordTable(n)
	z := &merger{}
	var ids []uint32
	for id, s := range t.tokens {
		w := t.text[s.start:s.end]
		if len(w) == 0 || len(w) > inlineWord {
			continue
		}
		var ok bool
		if ids, ok = z.mergeLinear(t, ids[:0], w); ok && len(ids) == 1 && ids[0] == uint32(id) {
			t.words.put(keyOf(w, len(w)), len(w), uint32(id))
		}
	}
}
