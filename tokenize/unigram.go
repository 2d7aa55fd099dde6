package tokenize

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// unigram selects the tokens whose scores have the highest sum, as the best path through the word
// from left to right.
type unigram struct {
	tree         prefixTree
	scores       []float64 // by id
	unkScore     float64
	unkID        uint32      // noToken if there is none
	fallback     [256]uint32 // see fallbackBytes
	byteFallback bool
}

// unkPenalty is how far the score of an unknown character is below the lowest score of the
// vocabulary.
const unkPenalty = 10

func newUnigram(m *modelJSON) *unigram {
	vocab := m.Vocab.ids
	u := &unigram{tree: newVocabularyTree(vocab), unkID: noToken, fallback: fallbackBytes(vocab),
		byteFallback: isTrue(m.ByteFallback)}
	if m.UnkID != nil {
		u.unkID = *m.UnkID
	}
	for _, s := range m.Vocab.scored {
		u.scores = append(u.scores, s.score)
	}
	lowest := math.Inf(1)
	for _, s := range u.scores {
		lowest = min(lowest, s)
	}
	u.unkScore = lowest - unkPenalty
	return u
}

// pathNode is the last token of the best path that ends at a byte of the word.
type pathNode struct {
	score float64 // of the whole path
	start int32   // of the token; -1: no path ends here
	id    uint32
}

func (u *unigram) appendWord(z *modelScratch, dst []uint32, word []byte) ([]uint32, error) {
	first := len(dst)
	if len(word) >= math.MaxInt32 {
		return dst, fmt.Errorf("a word of %d bytes is too long", len(word))
	}
	if cap(z.paths) <= len(word) {
		z.paths = make([]pathNode, len(word)+1+len(word)/4)
	}
	paths := z.paths[:len(word)+1]
	for i := range paths {
		paths[i] = pathNode{start: -1}
	}
	nodes := u.tree.nodes
	root := nodes[treeRoot].base
	for at := 0; at < len(word); {
		size := 1
		switch c := word[at]; {
		case c >= 0xf0:
			size = 4
		case c >= 0xe0:
			size = 3
		case c >= utf8.RuneSelf:
			size = 2
		}
		here := paths[at].score
		single := false // a token is exactly the character that starts here
		base := root
		for i, c := range word[at:] {
			n := nodes[base^uint32(c)]
			if byte(n.info>>24) != c {
				break
			}
			if base = n.base; n.info&wholeNode == 0 {
				continue
			}
			id := n.info & idMask
			end := &paths[at+i+1]
			// For equal sums the first path found is kept: the path with the longest last token.
			if score := u.scores[id] + here; end.start < 0 || score > end.score {
				*end = pathNode{score, int32(at), id}
			}
			single = single || i+1 == size
		}
		if !single {
			end := &paths[at+size]
			if score := u.unkScore + here; end.start < 0 || score > end.score {
				if u.unkID == noToken {
					return dst, cannotSpell(fmt.Sprintf("%q", word[at:at+size]), word)
				}
				*end = pathNode{score, int32(at), u.unkID}
			}
		}
		at += size
	}
	for end := len(word); end > 0; {
		node := paths[end]
		start := int(node.start)
		if node.id != u.unkID || u.unkID == noToken {
			dst = append(dst, node.id)
			end = start
			continue
		}
		// Consecutive unknown characters are fused.
		for start > 0 && paths[start].id == u.unkID {
			start = int(paths[start].start)
		}
		dst = u.appendUnknown(dst, word[start:end])
		end = start
	}
	ids := dst[first:]
	for i, j := 0, len(ids)-1; i < j; i, j = i+1, j-1 {
		ids[i], ids[j] = ids[j], ids[i]
	}
	if len(paths) > keptScratch/4 {
		z.paths = nil
	}
	return dst, nil
}

// appendUnknown appends, in reverse, the ids of a text without tokens.
func (u *unigram) appendUnknown(dst []uint32, s []byte) []uint32 {
	if id, ok := u.tree.whole(s); ok {
		return append(dst, id)
	}
	if !u.byteFallback {
		return append(dst, u.unkID)
	}
	start := len(dst)
	for i := len(s) - 1; i >= 0; i-- {
		id := u.fallback[s[i]]
		if id == noToken {
			return append(dst[:start], u.unkID)
		}
		dst = append(dst, id)
	}
	return dst
}

// A scoredToken is ["token", score].
type scoredToken struct {
	token string
	score float64
}

func (s *scoredToken) UnmarshalJSON(b []byte) error {
	var pair []json.RawMessage
	if err := json.Unmarshal(b, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return fmt.Errorf("model.vocab: %s is not a token and its score", b)
	}
	if err := json.Unmarshal(pair[0], &s.token); err != nil {
		return err
	}
	if string(pair[1]) == "null" {
		return fmt.Errorf("model.vocab: %q has no score", s.token)
	}
	if err := json.Unmarshal(pair[1], &s.score); err != nil {
		return err
	}
	var err error
	if s.score, err = parseScore(string(pair[1])); err != nil {
		return fmt.Errorf("model.vocab: the score of %q: %w", s.token, err)
	}
	return nil
}

// parseScore parses a JSON number like the library's JSON parser, whose result is not always the
// nearest float. The digits that fit into 64 bits become a float, which is multiplied or divided by
// a power of ten, and each step rounds. One bit of a score can decide between two paths.
func parseScore(number string) (float64, error) {
	s, negative := strings.CutPrefix(number, "-")
	digits, exponent, hasExponent := strings.Cut(strings.ToLower(s), "e")
	whole, fraction, _ := strings.Cut(digits, ".")
	var significand uint64
	scale := 0
	full := false
	push := func(c byte) bool {
		d := uint64(c - '0')
		if full || significand > (math.MaxUint64-d)/10 {
			full = true
			return false
		}
		significand = significand*10 + d
		return true
	}
	for i := range len(whole) {
		if !push(whole[i]) {
			scale++
		}
	}
	// Digits after the point count separately: zeros may still fit if the integer part did not.
	full = false
	for i := range len(fraction) {
		if push(fraction[i]) {
			scale--
		}
	}
	if hasExponent {
		e, err := strconv.Atoi(exponent)
		if err != nil || e > 1<<20 || e < -1<<20 {
			return 0, errors.New("the exponent is too large")
		}
		scale += e
	}
	f := float64(significand)
	for ; f != 0 && scale < -308; scale += 308 {
		f /= 1e308
	}
	switch {
	case f == 0:
	case scale < 0:
		f /= powerOfTen(-scale)
	case scale > 308:
		return 0, errors.New("out of range")
	default:
		if f *= powerOfTen(scale); math.IsInf(f, 0) {
			return 0, errors.New("out of range")
		}
	}
	if negative {
		f = -f
	}
	return f, nil
}

// powerOfTen returns the float nearest to 10 to the n.
func powerOfTen(n int) float64 {
	f, err := strconv.ParseFloat("1e"+strconv.Itoa(n), 64)
	if err != nil {
		panic(err) // n is at most 308
	}
	return f
}
