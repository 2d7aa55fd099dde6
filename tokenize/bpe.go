package tokenize

import (
	"math"
	"math/bits"
	"slices"
)

// noToken is an id that does not exist. As a rank it is higher than all others.
const noToken = math.MaxUint32

// A merge turns two adjacent tokens into the token id. Lower ranks come first.
type merge struct{ rank, id uint32 }

var noMerge = merge{noToken, noToken}

// pairTable maps pairs of ids to their merge. It is an open-addressed hash table, at most half
// full. Most looked-up pairs have no merge: a filter with a bit for each hash, which is small
// enough for the cache, answers all but about 6 % of them.
type pairTable struct {
	slots  []pairSlot
	filter []uint64
	shift  uint // of a hash, for a slot; filterBits less for a bit of the filter
}

// filterBits is how many bits of the filter a slot has, as a power of two.
const filterBits = 3

type pairSlot struct {
	key uint64 // left<<32 | right, plus one: 0 is an empty slot
	merge
}

func newPairTable(n int) pairTable {
	b := bits.Len(uint(2*n + 15))
	return pairTable{newTable[pairSlot](1 << b), make([]uint64, 1<<b<<filterBits/64), uint(64 - b)}
}

func (t *pairTable) hash(key uint64) uint64 { return key * 0x9e3779b97f4a7c15 }

// put sets the merge of a pair. A later put of the same pair wins, as in the library.
func (t *pairTable) put(left, right uint32, m merge) {
	key := uint64(left)<<32 | uint64(right) + 1
	h := t.hash(key)
	bit := h >> (t.shift - filterBits)
	t.filter[bit>>6] |= 1 << (bit & 63)
	i := h >> t.shift
	for t.slots[i].key != 0 && t.slots[i].key != key {
		i = (i + 1) & uint64(len(t.slots)-1)
	}
	t.slots[i] = pairSlot{key, m}
}

func (t *pairTable) get(left, right uint32) merge {
	key := uint64(left)<<32 | uint64(right) + 1
	h := t.hash(key)
	if bit := h >> (t.shift - filterBits); t.filter[bit>>6]>>(bit&63)&1 == 0 {
		return noMerge
	}
	slots := t.slots
	for i := h >> t.shift; ; i++ {
		s := &slots[i&uint64(len(slots)-1)]
		if s.key == key {
			return s.merge
		}
		if s.key == 0 {
			return noMerge
		}
	}
}

// A pairMerge is a merge with its pair.
type pairMerge struct {
	left, right uint32
	merge
}

// byRank returns all merges in the order of their ranks.
func (t *pairTable) byRank() []pairMerge {
	ranks := 0
	for _, s := range t.slots {
		if s.key != 0 {
			ranks = max(ranks, int(s.rank)+1)
		}
	}
	at := make([]uint32, ranks) // by rank: its slot plus one, or 0 if a later merge has the pair
	for i, s := range t.slots {
		if s.key != 0 {
			at[s.rank] = uint32(i) + 1
		}
	}
	merges := make([]pairMerge, 0, ranks)
	for _, i := range at {
		if i > 0 {
			s := &t.slots[i-1]
			merges = append(merges, pairMerge{uint32((s.key - 1) >> 32), uint32(s.key - 1), s.merge})
		}
	}
	return merges
}

// shortWord is the length in bytes up to which searching all pairs for the lowest rank is faster
// than a heap.
const shortWord = 64

// merger merges the bytes of words. It is the scratch of one goroutine.
type merger struct {
	ids     [shortWord]uint32
	merges  [shortWord]merge
	symbols []symbol
	heap    []candidate
	dead    []uint64 // see greedy
	fits    []uint64 // see fit: pairs and in bit 0 the result, or 0
}

// merge appends the ids of the word w, which is not empty. ok is false if a byte of it has no
// token.
func (z *merger) merge(t *Tokenizer, dst []uint32, w []byte) (ids []uint32, ok bool) {
	if len(w) > shortWord {
		return z.mergeHeap(t, dst, w)
	}
	return z.mergeLinear(t, dst, w)
}

// mergeLinear is merge for words of at most shortWord bytes.
func (z *merger) mergeLinear(t *Tokenizer, dst []uint32, w []byte) ([]uint32, bool) {
	ids := z.ids[:len(w)]
	for i, c := range w {
		if ids[i] = t.bytes[c]; ids[i] == noToken {
			return dst, false
		}
	}
	return z.mergeFew(t, dst, ids), true
}

// mergeFew is mergeSymbols for at most shortWord symbols. It overwrites ids.
func (z *merger) mergeFew(t *Tokenizer, dst, ids []uint32) []uint32 {
	n := len(ids)
	merges := z.merges[:n]
	for i := range n - 1 {
		merges[i] = t.pairs.get(ids[i], ids[i+1])
	}
	for n > 1 {
		best, at := uint32(noToken), 0
		for i := range merges[:n-1] {
			if r := merges[i].rank; r < best { // not <=: the leftmost of equals
				best, at = r, i
			}
		}
		if best == noToken {
			break
		}
		ids[at] = merges[at].id
		copy(ids[at+1:n-1], ids[at+2:n])
		copy(merges[at:n-2], merges[at+1:n-1])
		n--
		if at+1 < n {
			merges[at] = t.pairs.get(ids[at], ids[at+1])
		}
		if at > 0 {
			merges[at-1] = t.pairs.get(ids[at-1], ids[at])
		}
	}
	return append(dst, ids[:n]...)
}

// symbol is a token in a doubly linked list; -1 ends it.
type symbol struct {
	id uint32
	// of the merge with the next symbol; noToken if there is no merge, or if this symbol was merged
	rank       uint32
	prev, next int32
}

// candidate is a possible merge of a symbol with the next one: its rank, and in the lower half the
// symbol's index, so that candidates compare in merge order. It is stale if the symbol has another
// rank.
type candidate uint64

func newCandidate(rank uint32, at int32) candidate { return candidate(rank)<<32 | candidate(at) }

func (c candidate) rank() uint32 { return uint32(c >> 32) }
func (c candidate) at() int32    { return int32(c) }

// keptWord is the length in bytes of the longest word whose scratch is kept for the next one.
const keptWord = 1 << 20

// mergeHeap is merge in time n log n.
func (z *merger) mergeHeap(t *Tokenizer, dst []uint32, w []byte) ([]uint32, bool) {
	list, heap := slices.Grow(z.symbols[:0], len(w)), slices.Grow(z.heap[:0], len(w))
	for i, c := range w {
		id := t.bytes[c]
		if id == noToken {
			return dst, false
		}
		list = append(list, symbol{id, noToken, int32(i) - 1, int32(i) + 1})
	}
	return z.mergeList(t, dst, list, heap), true
}

// mergeSymbols is mergeHeap for any symbols instead of bytes.
func (z *merger) mergeSymbols(t *Tokenizer, dst, ids []uint32) []uint32 {
	if len(ids) < 2 {
		return append(dst, ids...)
	}
	list, heap := slices.Grow(z.symbols[:0], len(ids)), slices.Grow(z.heap[:0], len(ids))
	for i, id := range ids {
		list = append(list, symbol{id, noToken, int32(i) - 1, int32(i) + 1})
	}
	return z.mergeList(t, dst, list, heap)
}

// mergeList merges the symbols of list, whose last symbols are not linked yet. heap is empty and
// has sufficient capacity.
func (z *merger) mergeList(t *Tokenizer, dst []uint32, list []symbol, heap []candidate) []uint32 {
	list[len(list)-1].next = -1
	for i := range list[1:] {
		rank := t.pairs.get(list[i].id, list[i+1].id).rank
		if list[i].rank = rank; rank != noToken {
			heap = append(heap, newCandidate(rank, int32(i)))
		}
	}
	z.symbols, z.heap = list, heap
	for i := len(heap)/heapArity + 1; i > 0; i-- {
		z.sink(i - 1)
	}
	for len(z.heap) > 0 {
		c := z.pop()
		left := &list[c.at()]
		if left.rank != c.rank() {
			continue // stale
		}
		right := &list[left.next]
		left.id, left.next = t.pairs.get(left.id, right.id).id, right.next
		right.rank = noToken
		if left.next >= 0 {
			list[left.next].prev = c.at()
		}
		z.consider(t, c.at())
		if left.prev >= 0 {
			z.consider(t, left.prev)
		}
	}
	for i := int32(0); i >= 0; i = list[i].next {
		dst = append(dst, list[i].id)
	}
	if len(list) > keptWord {
		z.symbols, z.heap = nil, nil
	}
	return dst
}

// consider stores the rank of the symbol at i and pushes its merge, if there is one.
func (z *merger) consider(t *Tokenizer, i int32) {
	left := &z.symbols[i]
	left.rank = noToken
	if left.next >= 0 {
		left.rank = t.pairs.get(left.id, z.symbols[left.next].id).rank
	}
	if left.rank != noToken {
		z.push(newCandidate(left.rank, i))
	}
}

// heapArity is how many children an element of the heap has. Four children are adjacent in memory,
// and the heap has half as many levels as with two.
const heapArity = 4

func (z *merger) push(c candidate) {
	h := append(z.heap, c)
	i := len(h) - 1
	for i > 0 {
		up := (i - 1) / heapArity
		if h[up] <= c {
			break
		}
		h[i] = h[up]
		i = up
	}
	h[i] = c
	z.heap = h
}

func (z *merger) pop() candidate {
	last := len(z.heap) - 1
	top := z.heap[0]
	z.heap[0] = z.heap[last]
	z.heap = z.heap[:last]
	z.sink(0)
	return top
}

// sink moves the element at i down to its position.
func (z *merger) sink(i int) {
	h := z.heap
	if i >= len(h) {
		return
	}
	c := h[i]
	for {
		first := heapArity*i + 1
		if first >= len(h) {
			break
		}
		down, least := first, h[first]
		for k := first + 1; k < min(first+heapArity, len(h)); k++ {
			if h[k] < least {
				down, least = k, h[k]
			}
		}
		if c <= least {
			break
		}
		h[i] = least
		i = down
	}
	h[i] = c
}
