package tokenize

import (
	"math"
	"math/bits"
)

// noToken stands for an id that does not exist. As a rank it comes after all others.
const noToken = math.MaxUint32

// A merge turns two adjacent tokens into the token id. Lower ranks come first.
type merge struct{ rank, id uint32 }

var noMerge = merge{noToken, noToken}

// pairTable maps pairs of ids to their merge. It is an open-addressed hash table, at most half full.
type pairTable struct {
	slots []pairSlot
	shift uint
}

type pairSlot struct {
	key uint64 // left<<32 | right, plus one: 0 is an empty slot
	merge
}

func newPairTable(n int) pairTable {
	b := bits.Len(uint(2*n + 15))
	return pairTable{make([]pairSlot, 1<<b), uint(64 - b)}
}

func (t *pairTable) start(key uint64) uint64 { return key * 0x9e3779b97f4a7c15 >> t.shift }

// put sets the merge of a pair. A later put of the same pair wins, as in the library.
func (t *pairTable) put(left, right uint32, m merge) {
	key := uint64(left)<<32 | uint64(right) + 1
	i := t.start(key)
	for t.slots[i].key != 0 && t.slots[i].key != key {
		i = (i + 1) & uint64(len(t.slots)-1)
	}
	t.slots[i] = pairSlot{key, m}
}

func (t *pairTable) get(left, right uint32) merge {
	key := uint64(left)<<32 | uint64(right) + 1
	slots := t.slots
	for i := t.start(key); ; i++ {
		s := &slots[i&uint64(len(slots)-1)]
		if s.key == key {
			return s.merge
		}
		if s.key == 0 {
			return noMerge
		}
	}
}

// shortWord is the length in bytes up to which searching all pairs for the lowest rank is quicker than a heap.
const shortWord = 64

// merger merges the bytes of words. It is the scratch of one goroutine.
type merger struct {
	ids     [shortWord]uint32
	merges  [shortWord]merge
	symbols []symbol
	heap    []candidate
}

// merge appends the ids of the word w, which is not empty. ok is false if a byte of it has no token.
func (z *merger) merge(t *Tokenizer, dst []uint32, w []byte) (ids []uint32, ok bool) {
	if len(w) > shortWord {
		return z.mergeHeap(t, dst, w)
	}
	return z.mergeLinear(t, dst, w)
}

// mergeLinear is merge for words of at most shortWord bytes.
func (z *merger) mergeLinear(t *Tokenizer, dst []uint32, w []byte) ([]uint32, bool) {
	n := len(w)
	ids, merges := z.ids[:n], z.merges[:n]
	for i, c := range w {
		if ids[i] = t.bytes[c]; ids[i] == noToken {
			return dst, false
		}
	}
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
	return append(dst, ids[:n]...), true
}

// symbol is a token in a doubly linked list; -1 ends it.
type symbol struct {
	id         uint32
	prev, next int32
}

// candidate is a merge of the symbols left and right, found at place at when it was pushed. It is stale once either is gone.
type candidate struct {
	merge
	at          int32
	left, right uint32
}

func (c *candidate) before(d *candidate) bool {
	return c.rank < d.rank || c.rank == d.rank && c.at < d.at
}

// mergeHeap is merge in time n log n.
func (z *merger) mergeHeap(t *Tokenizer, dst []uint32, w []byte) ([]uint32, bool) {
	list := z.symbols[:0]
	for i, c := range w {
		id := t.bytes[c]
		if id == noToken {
			return dst, false
		}
		list = append(list, symbol{id, int32(i) - 1, int32(i) + 1})
	}
	list[len(list)-1].next = -1
	z.symbols, z.heap = list, z.heap[:0]
	for i := range len(list) - 1 {
		z.consider(t, int32(i))
	}
	for len(z.heap) > 0 {
		c := z.pop()
		left := &list[c.at]
		if left.id != c.left || left.next < 0 || list[left.next].id != c.right {
			continue // stale
		}
		right := &list[left.next]
		left.id, left.next = c.id, right.next
		right.id = noToken
		if left.next >= 0 {
			list[left.next].prev = c.at
			z.consider(t, c.at)
		}
		if left.prev >= 0 {
			z.consider(t, left.prev)
		}
	}
	for i := int32(0); i >= 0; i = list[i].next {
		dst = append(dst, list[i].id)
	}
	return dst, true
}

// consider pushes the merge of the symbol at i with the one after it, if there is one.
func (z *merger) consider(t *Tokenizer, i int32) {
	left := &z.symbols[i]
	right := z.symbols[left.next].id
	if m := t.pairs.get(left.id, right); m.rank != noToken {
		z.push(candidate{m, i, left.id, right})
	}
}

func (z *merger) push(c candidate) {
	h := append(z.heap, c)
	i := len(h) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !c.before(&h[up]) {
			break
		}
		h[i] = h[up]
		i = up
	}
	h[i] = c
	z.heap = h
}

func (z *merger) pop() candidate {
	h := z.heap
	top, last := h[0], h[len(h)-1]
	h = h[:len(h)-1]
	z.heap = h
	if len(h) == 0 {
		return top
	}
	i := 0
	for {
		down := 2*i + 1
		if down >= len(h) {
			break
		}
		if r := down + 1; r < len(h) && h[r].before(&h[down]) {
			down = r
		}
		if !h[down].before(&last) {
			break
		}
		h[i] = h[down]
		i = down
	}
	h[i] = last
	return top
}
