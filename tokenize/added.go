package tokenize

// A trie finds added tokens in text: the leftmost, of those the longest.
type trie struct {
	nodes []trieNode // nodes[0] is the root
	first [256]bool
	two   [1 << 16 / 64]uint64 // pairs of first bytes, so that ordinary text is passed over quickly
	short bool                 // there is a token of one byte
}

type trieNode struct {
	c              byte
	end            bool  // a token ends here
	child, sibling int32 // 0 is none
	token          addedToken
}

// add reports whether the text, which is not empty, was new.
func (t *trie) add(text []byte, token addedToken) bool {
	if len(t.nodes) == 0 {
		t.nodes = append(t.nodes, trieNode{})
	}
	t.first[text[0]] = true
	if len(text) == 1 {
		t.short = true
	} else {
		k := int(text[0])<<8 | int(text[1])
		t.two[k>>6] |= 1 << (k & 63)
	}
	at := int32(0)
	for _, c := range text {
		next := t.step(at, c)
		if next == 0 {
			next = int32(len(t.nodes))
			t.nodes = append(t.nodes, trieNode{c: c, sibling: t.nodes[at].child})
			t.nodes[at].child = next
		}
		at = next
	}
	if t.nodes[at].end {
		return false
	}
	t.nodes[at].end, t.nodes[at].token = true, token
	return true
}

func (t *trie) step(at int32, c byte) int32 {
	at = t.nodes[at].child
	for at != 0 && t.nodes[at].c != c {
		at = t.nodes[at].sibling
	}
	return at
}

// find returns the first token in s[from:] and where it starts and ends in s. end is 0 if there is none.
func (t *trie) find(s []byte, from int) (start, end int, token addedToken) {
	for i := from; i < len(s); i++ {
		if !t.first[s[i]] {
			continue
		}
		if !t.short {
			if i+1 == len(s) {
				break
			}
			if k := int(s[i])<<8 | int(s[i+1]); t.two[k>>6]>>(k&63)&1 == 0 {
				continue
			}
		}
		at := int32(0)
		for j := i; j < len(s); j++ {
			if at = t.step(at, s[j]); at == 0 {
				break
			}
			if n := &t.nodes[at]; n.end {
				end, token = j+1, n.token
			}
		}
		if end > 0 {
			return i, end, token
		}
	}
	return 0, 0, addedToken{}
}
