package tokenize

import (
	"bytes"
	"math/bits"
	"slices"
)

// prefixTree finds the tokens that a text starts with. It is a double array (Aoe 1989): the child
// of a node by the byte c is the node at base XOR c, if that node's label is c. No two nodes with
// children have the same base, so the label is unambiguous.
type prefixTree struct{ nodes []prefixNode }

type prefixNode struct {
	base uint32
	info uint32 // label<<24, whole, merged, and the token's id in the lower 22 bits
}

const (
	wholeNode  = 1 << 23        // a token ends here
	mergedNode = 1 << 22        // merging the token's bytes results in the token
	idMask     = mergedNode - 1 // maxVocabulary - 1

	// treeRoot is the root's index. The first block has no other node, and serves as the base of
	// leaves.
	treeRoot  = 0
	treeBlock = 256
)

// A prefixToken is a token to enter: its bytes, which are not empty, and the lower 24 bits of its
// node.
type prefixToken struct {
	text []byte
	info uint32
}

// newVocabularyTree returns the tree of a vocabulary's tokens in their spelling there.
func newVocabularyTree(vocab map[string]uint32) prefixTree {
	tokens := make([]prefixToken, 0, len(vocab))
	for token, id := range vocab {
		if token != "" {
			tokens = append(tokens, prefixToken{[]byte(token), wholeNode | id})
		}
	}
	return newPrefixTree(tokens)
}

// newPrefixTree returns the tree of tokens with different bytes. It sorts them.
func newPrefixTree(tokens []prefixToken) prefixTree {
	slices.SortFunc(tokens, func(a, b prefixToken) int { return bytes.Compare(a.text, b.text) })
	b := &treeBuilder{}
	b.grow()                  // the block of leaves
	b.blocks[0].full = true   // no nodes are placed there
	b.blocks[0].bases[0] |= 1 // base 0 has no children
	b.blocks[0].places = [4]uint64{}
	// Depth first, so that the nodes on the path to a token are close together.
	type span struct{ node, first, last, depth int }
	stack := []span{{treeRoot, 0, len(tokens), 0}}
	var labels []byte
	var ends []int
	for len(stack) > 0 {
		s := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		first := s.first
		if first < s.last && len(tokens[first].text) == s.depth { // the shortest sorts first
			b.nodes[s.node].info |= tokens[first].info
			first++
		}
		labels, ends = labels[:0], ends[:0]
		for i := first; i < s.last; {
			c := tokens[i].text[s.depth]
			for i++; i < s.last && tokens[i].text[s.depth] == c; i++ {
			}
			labels, ends = append(labels, c), append(ends, i)
		}
		if len(labels) == 0 {
			continue
		}
		base := b.place(labels, s.node)
		b.nodes[s.node].base = base
		for i, c := range labels {
			child := int(base ^ uint32(c))
			b.nodes[child].info = uint32(c) << 24
			stack = append(stack, span{child, first, ends[i], s.depth + 1})
			first = ends[i]
		}
	}
	b.labelFree()
	nodes := newTable[prefixNode](len(b.nodes))
	copy(nodes, b.nodes)
	return prefixTree{nodes}
}

// treeBuilder is the state of all blocks of 256 nodes during construction.
type treeBuilder struct {
	nodes  []prefixNode
	blocks []treeBlockState
	open   []int // blocks with free nodes
}

type treeBlockState struct {
	places [4]uint64 // bit i is set if node i of the block is free
	bases  [4]uint64 // bit i is set if base i of the block is taken
	tries  int       // failed searches
	full   bool
}

// treeTries is how many failed searches close a block, and how many blocks a search tries before it
// adds a block.
const treeTries = 24

func (b *treeBuilder) grow() {
	all := ^uint64(0)
	b.open = append(b.open, len(b.blocks))
	b.blocks = append(b.blocks, treeBlockState{places: [4]uint64{all, all, all, all}})
	b.nodes = append(b.nodes, make([]prefixNode, treeBlock)...)
}

// place reserves a base for the node's children, and their nodes.
func (b *treeBuilder) place(labels []byte, node int) uint32 {
	if len(labels) == 1 { // the most frequent case: in the parent's cache line if possible
		if base, ok := b.blocks[node/treeBlock].near(labels[0], byte(node)); ok {
			return uint32(node&^(treeBlock-1)) | uint32(base)
		}
	}
	for at, looked := len(b.open)-1, 0; at >= 0 && looked < treeTries; at, looked = at-1, looked+1 {
		k := b.open[at]
		if base, ok := b.blocks[k].find(labels); ok {
			return uint32(k*treeBlock) | uint32(base)
		}
		if s := &b.blocks[k]; len(labels) == 1 || s.full {
			b.open = slices.Delete(b.open, at, at+1)
		} else if s.tries++; s.tries > treeTries {
			b.open = slices.Delete(b.open, at, at+1)
		}
	}
	b.grow()
	k := len(b.blocks) - 1
	base, _ := b.blocks[k].find(labels)
	return uint32(k*treeBlock) | uint32(base)
}

// near is find for a single child in the cache line of node p, which has eight nodes.
func (s *treeBlockState) near(label, p byte) (base byte, ok bool) {
	if s.full {
		return 0, false
	}
	for q := p &^ 7; ; q++ {
		base := q ^ label
		if s.places[q>>6]>>(q&63)&1 != 0 && s.bases[base>>6]>>(base&63)&1 == 0 {
			s.bases[base>>6] |= 1 << (base & 63)
			s.places[q>>6] &^= 1 << (q & 63)
			return base, true
		}
		if q&7 == 7 {
			return 0, false
		}
	}
}

func (s *treeBlockState) find(labels []byte) (base byte, ok bool) {
	if s.full {
		return 0, false
	}
	for w, free := range s.places {
		for ; free != 0; free &= free - 1 {
			base := byte(64*w+bits.TrailingZeros64(free)) ^ labels[0]
			if s.bases[base>>6]>>(base&63)&1 != 0 {
				continue
			}
			fits := true
			for _, c := range labels[1:] {
				if p := base ^ c; s.places[p>>6]>>(p&63)&1 == 0 {
					fits = false
					break
				}
			}
			if !fits {
				continue
			}
			s.bases[base>>6] |= 1 << (base & 63)
			for _, c := range labels {
				p := base ^ c
				s.places[p>>6] &^= 1 << (p & 63)
			}
			return base, true
		}
	}
	return 0, false
}

// labelFree assigns labels that match no base to the free nodes. Every block with a free node has a
// free base, because each used base uses at least one node.
func (b *treeBuilder) labelFree() {
	for k := range b.blocks {
		s := &b.blocks[k]
		free := s.places
		if k == 0 {
			// all but the root, whose label is never checked
			free = [4]uint64{^uint64(1), ^uint64(0), ^uint64(0), ^uint64(0)}
			b.nodes[treeRoot].info = b.nodes[treeRoot].info&(1<<24-1) | 0xff<<24
		}
		var unused byte
		for w, bases := range s.bases {
			if bases != ^uint64(0) {
				unused = byte(64*w + bits.TrailingZeros64(^bases))
				break
			}
		}
		for w, bits64 := range free {
			for ; bits64 != 0; bits64 &= bits64 - 1 {
				p := byte(64*w + bits.TrailingZeros64(bits64))
				b.nodes[k*treeBlock+int(p)].info = uint32(p^unused) << 24
			}
		}
	}
}

// step returns the child of the node at by the byte c.
func (t *prefixTree) step(at uint32, c byte) (child uint32, info uint32, ok bool) {
	child = t.nodes[at].base ^ uint32(c)
	info = t.nodes[child].info
	return child, info, byte(info>>24) == c
}

// whole returns the token whose bytes are w.
func (t *prefixTree) whole(w []byte) (id uint32, ok bool) {
	at, info := uint32(treeRoot), uint32(0)
	for _, c := range w {
		if at, info, ok = t.step(at, c); !ok {
			return noToken, false
		}
	}
	return info & idMask, info&wholeNode != 0
}

// longest returns the longest token that s starts with and that merging produces, or noToken.
func (t *prefixTree) longest(s []byte) uint32 {
	nodes := t.nodes
	id, base := uint32(noToken), nodes[treeRoot].base
	for _, c := range s {
		n := nodes[base^uint32(c)]
		if byte(n.info>>24) != c {
			break
		}
		if n.info&mergedNode != 0 {
			id = n.info & idMask
		}
		base = n.base
	}
	return id
}
