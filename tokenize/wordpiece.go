package tokenize

import (
	"slices"
	"unicode/utf8"
)

// wordPiece takes, again and again, the longest token that the rest of a word begins with. A word that this does not spell is one unknown token.
type wordPiece struct {
	tree     tokenTree
	inner    int32 // where the tokens that do not begin a word begin in the tree; noNode if there are none
	unk      string
	unkID    uint32
	maxRunes int // words of more characters are unknown
}

func newWordPiece(vocab map[string]uint32, unk, prefix string, maxRunes int) *wordPiece {
	w := &wordPiece{tree: newTokenTree(vocab), unk: unk, unkID: noToken, maxRunes: maxRunes}
	if id, ok := vocab[unk]; ok {
		w.unkID = id
	}
	for i := range len(prefix) {
		if w.inner = w.tree.step(w.inner, prefix[i]); w.inner == noNode {
			break
		}
	}
	return w
}

func (w *wordPiece) appendWord(_ *modelScratch, dst []uint32, word []byte) ([]uint32, error) {
	start := len(dst)
	known := len(word) <= w.maxRunes || runeCount(word) <= w.maxRunes
	node := int32(0)
	for rest := word; known && len(rest) > 0; node = w.inner {
		id, n := uint32(noToken), 0
		for i := 0; i < len(rest) && node != noNode; i++ {
			if node = w.tree.step(node, rest[i]); node == noNode {
				break
			}
			if x := w.tree.nodes[node].id; x != noToken {
				id, n = x, i+1
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

// runeCount is utf8.RuneCount for valid UTF-8. The one of Go 1.26 allocates.
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

// tokenTree holds tokens by their bytes, so that those which a text begins with are found in one pass.
type tokenTree struct {
	nodes []treeNode // nodes[0] is the root
	edges []treeEdge // of each node together, by byte
	root  [256]int32 // the children of the root
}

type treeNode struct {
	id         uint32 // of the token that ends here, or noToken
	start, end int32  // in edges
}

type treeEdge struct {
	c  byte
	to int32
}

// noNode is where no token leads.
const noNode = -1

func newTokenTree(vocab map[string]uint32) tokenTree {
	tokens := make([]string, 0, len(vocab))
	for token := range vocab {
		tokens = append(tokens, token)
	}
	slices.Sort(tokens)
	t := tokenTree{nodes: []treeNode{{id: noToken}}}
	// Each node has the tokens[from:to], which share their first depth bytes.
	type pending struct {
		node     int32
		from, to int
		depth    int
	}
	queue := []pending{{0, 0, len(tokens), 0}}
	for len(queue) > 0 {
		p := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		if p.from < p.to && len(tokens[p.from]) == p.depth {
			t.nodes[p.node].id = vocab[tokens[p.from]]
			p.from++
		}
		t.nodes[p.node].start = int32(len(t.edges))
		for p.from < p.to {
			c, to := tokens[p.from][p.depth], p.from+1
			for to < p.to && tokens[to][p.depth] == c {
				to++
			}
			child := int32(len(t.nodes))
			t.nodes = append(t.nodes, treeNode{id: noToken})
			t.edges = append(t.edges, treeEdge{c, child})
			queue = append(queue, pending{child, p.from, to, p.depth + 1})
			p.from = to
		}
		t.nodes[p.node].end = int32(len(t.edges))
	}
	for c := range t.root {
		t.root[c] = noNode
	}
	for _, e := range t.edges[t.nodes[0].start:t.nodes[0].end] {
		t.root[e.c] = e.to
	}
	return t
}

// step returns the node that c leads to from a node, or noNode.
func (t *tokenTree) step(node int32, c byte) int32 {
	if node == 0 {
		return t.root[c]
	}
	n := &t.nodes[node]
	edges := t.edges[n.start:n.end]
	if len(edges) > 8 {
		lo, hi := 0, len(edges)
		for lo < hi {
			if m := (lo + hi) / 2; edges[m].c < c {
				lo = m + 1
			} else {
				hi = m
			}
		}
		if lo < len(edges) && edges[lo].c == c {
			return edges[lo].to
		}
		return noNode
	}
	for _, e := range edges {
		if e.c == c {
			return e.to
		}
	}
	return noNode
}

// get returns the id of the token that is the whole of s.
func (t *tokenTree) get(s []byte) (uint32, bool) {
	node := int32(0)
	for _, c := range s {
		if node = t.step(node, c); node == noNode {
			return 0, false
		}
	}
	id := t.nodes[node].id
	return id, id != noToken
}
