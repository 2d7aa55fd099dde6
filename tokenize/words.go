package tokenize

import (
	"encoding/binary"
	"math/bits"
	"unsafe"
)

// Most words of a text have occurred before. A short word is its own key: its bytes as machine
// words with its length in the last byte, so that comparison needs no loop and two entries are a
// cache line.

const (
	narrowWord = 15  // length in bytes of the longest word with a narrow key
	cachedWord = 512 // of the longest word in the cache
	narrowIDs  = 8   // maximum number of ids in a narrow entry
)

type narrowKey [2]uint64

// keyMasks[n] keeps the first n of 16 bytes, but not the last, which is for the length.
var keyMasks = func() (masks [maskedBytes][2]uint64) {
	for n := range masks {
		masks[n] = [2]uint64{1<<(8*min(n, 8)) - 1, 1<<(8*min(max(n-8, 0), 7)) - 1}
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
	return narrowKeyIn((*[16]byte)(s), n)
}

// narrowKeyIn returns the key of s[:n], 0 < n <= narrowWord.
func narrowKeyIn(s *[16]byte, n int) narrowKey {
	mask := &keyMasks[n&(maskedBytes-1)]
	return narrowKey{
		binary.LittleEndian.Uint64(s[:]) & mask[0], binary.LittleEndian.Uint64(s[8:])&mask[1] | uint64(n)<<56,
	}
}

func (k *narrowKey) hash() uint64 {
	hi, lo := bits.Mul64(k[0]^0xa0761d6478bd642f, k[1]^0xe7037ed1a0b428db)
	return hi ^ lo
}

// hashWide returns the hash of a word that is longer than narrowWord.
func hashWide(w []byte) uint64 {
	h := uint64(len(w)) * 0x8ebc6af09c88c6e3
	mix := func(s []byte) {
		hi, lo := bits.Mul64(binary.LittleEndian.Uint64(s)^0xa0761d6478bd642f^h,
			binary.LittleEndian.Uint64(s[8:])^0xe7037ed1a0b428db)
		h = hi ^ lo
	}
	end := w[len(w)-16:]
	for ; len(w) > 16; w = w[16:] {
		mix(w)
	}
	mix(end)
	return h
}

// wordCache caches the ids of words of at most cachedWord bytes. The ids of most words are in the
// entry of their key. The ids of others are in a ring, with the bytes of words that have no narrow
// key. New records overwrite the oldest.
//
// A set has room for two words. A new word mostly takes the second place, so that words that occur
// once rarely displace the first word, which is a frequent one if the text does not change.
type wordCache struct {
	packing *packing
	narrow  []narrowSet
	wide    []wideSet
	ring    []uint32
	added   uint   // words that replaced others
	head    uint64 // how many numbers have ever been added to ring
}

const (
	narrowBits = 17
	wideBits   = 16
	ringBits   = 22
)

type (
	narrowSet [2]narrowEntry // a cache line
	wideSet   [2]wideEntry   // a cache line
)

type narrowEntry struct {
	key narrowKey // zero if the entry is empty: no word has length 0
	ids packedIDs
}

// packedIDs are the ids of a narrow word with as many bits each as the vocabulary needs. The upper
// four bits are the number of ids. If there are more than fit, the first half is the position of
// their record in the ring instead.
type packedIDs [2]uint64

func (p *packedIDs) count() int { return int(p[1] >> 60) }

// A packing is how the ids of a vocabulary are packed. The arrays are for vector instructions,
// which take four bytes with each id, shift them, and mask the id.
type packing struct {
	bytes [4 * narrowIDs]byte
	shift [narrowIDs]uint32
	mask  [narrowIDs]uint32
	width int // bits of an id
	most  int // how many ids fit
}

// newPacking returns the packing of ids below n.
func newPacking(n int) *packing {
	p := &packing{width: bits.Len(uint(max(n, 2) - 1))}
	p.most = min(narrowIDs, 124/p.width)
	for i := range p.most {
		first := i * p.width / 8
		for k := range 4 {
			p.bytes[4*i+k] = byte(first + k)
			if first+k > 15 {
				p.bytes[4*i+k] = 0x80 // no byte
			}
		}
		p.shift[i], p.mask[i] = uint32(i*p.width%8), 1<<p.width-1
	}
	return p
}

// pack packs at most p.most ids.
func (p *packing) pack(ids []uint32) (packed packedIDs) {
	packed[1] = uint64(len(ids)) << 60
	for i, id := range ids {
		at := uint(i * p.width)
		packed[at/64] |= uint64(id) << (at % 64)
		if at < 64 && at+uint(p.width) > 64 {
			packed[1] |= uint64(id) >> (64 - at)
		}
	}
	return packed
}

// appendTo appends the ids, at most p.most.
func (p *packing) appendTo(dst []uint32, packed *packedIDs) []uint32 {
	for i := range packed.count() {
		at := uint(i * p.width)
		id := packed[at/64] >> (at % 64)
		if at < 64 {
			id |= packed[1] << (64 - at) // no bits if at is 0
		}
		dst = append(dst, uint32(id)&p.mask[i])
	}
	return dst
}

type wideEntry struct {
	hash uint64
	at   uint64 // position of the record in the ring: the word, in whole numbers, then its ids
	n, k uint32 // bytes and ids; n is 0 if the entry is empty
	_    uint64
}

// newWordCache returns a cache of ids below n.
func newWordCache(n int) *wordCache {
	return &wordCache{
		packing: newPacking(n), narrow: newTable[narrowSet](1 << narrowBits), wide: newTable[wideSet](1 << wideBits),
		ring: newTable[uint32](1 << ringBits),
	}
}

// A lookup is the state of looking up the words of a view.
type lookup struct {
	text    *byte      // of the view
	sets    *narrowSet // the first of all
	packing *packing
	ids     *uint32 // with room for an entry's ids more than the words have
	n       int     // how many ids there are
	next    int     // the next word
	count   int     // how many words there are
	lengths int     // the bits of all lengths
	ends    uint64  // where words end: a bit for each
	words   [maskedBytes]lookedUp
	word    []byte // follows the words of the view
}

// A lookedUp is a word of a view.
type lookedUp struct {
	key  narrowKey // its last byte is the word's length, even if the word is too long for a narrow key
	hash uint64    // of narrowKey, or hashWide
	end  int       // where the word ends in the view
}

func (w *lookedUp) length() int { return int(w.key[1] >> 56) }

// hasWide reports whether a word has no narrow key.
func (l *lookup) hasWide() bool { return l.lengths > narrowWord }

// hashWordsGo computes the keys and sets of the words of a view.
func hashWordsGo(l *lookup) {
	text := unsafe.Slice(l.text, maskedBytes+16)
	from := 0
	l.count, l.lengths = 0, 0
	for ends := l.ends; ends != 0; ends &= ends - 1 {
		w := &l.words[l.count]
		w.end = bits.TrailingZeros64(ends)
		n := w.end - from
		w.key = narrowKeyIn((*[16]byte)(text[from:]), n)
		w.hash = w.key.hash()
		l.lengths |= n
		from = w.end
		l.count++
	}
}

// addKnownGo adds the ids of words from narrow entries, until the next word has no such entry.
func addKnownGo(l *lookup) {
	sets := unsafe.Slice(l.sets, 1<<narrowBits)
	for l.next < l.count {
		w := &l.words[l.next]
		set := &sets[w.hash>>(64-narrowBits)]
		e := &set[0]
		if e.key != w.key {
			e = &set[1]
		}
		if e.key != w.key || e.ids.count() > l.packing.most {
			return
		}
		ids := unsafe.Slice(l.ids, l.n+narrowIDs)
		l.n = len(l.packing.appendTo(ids[:l.n], &e.ids))
		l.next++
	}
}

// record returns the record of n numbers at a position, or nil if it has been overwritten.
func (c *wordCache) record(at uint64, n int) []uint32 {
	if c.head-at > uint64(len(c.ring)) {
		return nil
	}
	i := at & uint64(len(c.ring)-1)
	return c.ring[i : i+uint64(n)]
}

// add reserves a record of n numbers.
func (c *wordCache) add(n int) (at uint64, record []uint32) {
	if room := len(c.ring) - int(c.head&uint64(len(c.ring)-1)); room < n { // records do not wrap around
		c.head += uint64(room)
	}
	at = c.head
	c.head += uint64(n)
	return at, c.record(at, n)
}

// place returns the entry for a new word: the first empty one of its two sets, otherwise mostly the
// second of the first set.
func place[E any](c *wordCache, first, second *[2]E, empty func(*E) bool) *E {
	for _, set := range []*[2]E{first, second} {
		for i := range set {
			if empty(&set[i]) {
				return &set[i]
			}
		}
	}
	if c.added++; c.added%8 == 0 {
		return &first[0]
	}
	return &first[1]
}

// sets returns the sets of a word: it is in the first set that had room for it.
func (c *wordCache) sets(hash uint64) [2]*narrowSet {
	return [2]*narrowSet{&c.narrow[hash>>(64-narrowBits)], &c.narrow[hash&(1<<narrowBits-1)]}
}

// appendNarrow appends the ids of a word. ok is false if it is not in the cache.
func (c *wordCache) appendNarrow(dst []uint32, key narrowKey, hash uint64) (with []uint32, ok bool) {
	for _, s := range c.sets(hash) {
		for i := range s {
			e := &s[i]
			if e.key != key {
				continue
			}
			n := e.ids.count()
			if n <= c.packing.most {
				return c.packing.appendTo(dst, &e.ids), true
			}
			if ids := c.record(e.ids[0], n); ids != nil {
				return append(dst, ids...), true
			}
			e.key = narrowKey{}
			return dst, false
		}
	}
	return dst, false
}

// addNarrow adds a word that is not in the cache.
func (c *wordCache) addNarrow(key narrowKey, hash uint64, ids []uint32) {
	sets := c.sets(hash)
	e := place(c, (*[2]narrowEntry)(sets[0]), (*[2]narrowEntry)(sets[1]), func(e *narrowEntry) bool {
		return e.key == (narrowKey{})
	})
	e.key = key
	if len(ids) <= c.packing.most {
		e.ids = c.packing.pack(ids)
		return
	}
	at, record := c.add(len(ids))
	copy(record, ids)
	e.ids = packedIDs{at, uint64(len(ids)) << 60}
}

// wideSets is sets for a word of more than narrowWord bytes.
func (c *wordCache) wideSets(hash uint64) [2]*wideSet {
	return [2]*wideSet{&c.wide[hash>>(64-wideBits)], &c.wide[hash&(1<<wideBits-1)]}
}

// prefetchWide prefetches the record of a word whose first set has been prefetched, or the second
// set.
func (c *wordCache) prefetchWide(hash uint64) {
	sets := c.wideSets(hash)
	for i := range sets[0] {
		if e := &sets[0][i]; e.hash == hash {
			prefetch(unsafe.Pointer(&c.ring[e.at&uint64(len(c.ring)-1)]))
			return
		}
	}
	prefetch(unsafe.Pointer(sets[1]))
}

// findWide returns the ids of a word, which are valid until the next word is added, or nil if it
// is not in the cache.
func (c *wordCache) findWide(w []byte, hash uint64) []uint32 {
	for _, s := range c.wideSets(hash) {
		for i := range s {
			e := &s[i]
			if e.hash != hash || int(e.n) != len(w) {
				continue
			}
			numbers := numbersOf(len(w))
			record := c.record(e.at, numbers+int(e.k))
			if record != nil && string(bytesOf(record)[:len(w)]) == string(w) {
				return record[numbers:]
			}
		}
	}
	return nil
}

// addWide adds a word that is not in the cache.
func (c *wordCache) addWide(w []byte, hash uint64, ids []uint32) {
	sets := c.wideSets(hash)
	e := place(c, (*[2]wideEntry)(sets[0]), (*[2]wideEntry)(sets[1]), func(e *wideEntry) bool { return e.n == 0 })
	numbers := numbersOf(len(w))
	at, record := c.add(numbers + len(ids))
	*e = wideEntry{hash: hash, at: at, n: uint32(len(w)), k: uint32(len(ids))}
	copy(bytesOf(record), w)
	copy(record[numbers:], ids)
}

// numbersOf returns how many uint32 hold n bytes.
func numbersOf(n int) int { return (n + 3) / 4 }

// bytesOf returns the bytes of x, which is not empty.
func bytesOf(x []uint32) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 4*len(x)) }

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
func newWordTable(n int) wordTable { return wordTable{newTable[wordBucket](1 << bits.Len(uint(n/2)))} }

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

// first returns the first bucket of words with this hash.
func (t *wordTable) first(hash uint64) *wordBucket { return &t.buckets[hash&uint64(len(t.buckets)-1)] }

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
