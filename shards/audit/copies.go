package audit

import (
	"cmp"
	"math/bits"
	"slices"
)

// Copies counts documents whose tokens equal the tokens of another document. It is exact if all
// documents fit in memory. Otherwise it is estimated from the documents whose hash is a multiple of
// a power of two, which include all copies of each other (P. Gibbons, "Distinct Sampling for
// Highly-Accurate Answers to Distinct Values Queries", VLDB 2001).
type Copies struct {
	Sampled    int64    `json:"sampled_documents"` // non-empty documents that were compared
	Exact      bool     `json:"exact"`             // all documents were compared
	Copies     int64    `json:"copies"`            // copies among Sampled, without the first of each
	Share      float64  `json:"share"`             // Copies / Sampled
	TokenShare float64  `json:"token_share"`       // share of the copies in tokens
	Most       []Copied `json:"most"`              // the most frequent sampled documents, at most five
}

// A Copied is a document that occurs several times.
type Copied struct {
	Path     string `json:"path"` // shard of its first occurrence
	Document int64  `json:"document"`
	Tokens   int64  `json:"tokens"`
	Times    int64  `json:"times"`
}

// maxSampled is the maximum number of different documents in a sample.
const maxSampled = 1 << 17

// A sample holds the documents whose hash is a multiple of 2^shift, for the smallest shift that
// keeps their number within limit. The result does not depend on the order of documents.
type sample struct {
	limit int
	shift uint
	seen  map[uint64]sampled
}

type sampled struct {
	times, tokens int64
	shard         int // of its first occurrence
	document      int64
}

func newSample(limit int) *sample { return &sample{limit: limit, seen: map[uint64]sampled{}} }

// add counts an occurrence of a document.
func (s *sample) add(hash uint64, d sampled) {
	if hash&(1<<s.shift-1) != 0 {
		return
	}
	if was, ok := s.seen[hash]; ok {
		d.times += was.times
		if was.shard < d.shard || was.shard == d.shard && was.document < d.document {
			d.shard, d.document = was.shard, was.document
		}
	}
	s.seen[hash] = d
	for len(s.seen) > s.limit {
		s.thin(s.shift + 1)
	}
}

func (s *sample) thin(shift uint) {
	s.shift = shift
	for hash := range s.seen {
		if hash&(1<<shift-1) != 0 {
			delete(s.seen, hash)
		}
	}
}

func (s *sample) merge(other *sample) {
	if other.shift > s.shift {
		s.thin(other.shift)
	}
	for hash, d := range other.seen {
		s.add(hash, d)
	}
}

func (s *sample) copies(path func(shard int) string) Copies {
	c := Copies{Exact: s.shift == 0, Most: []Copied{}}
	var tokens, copied int64
	several := []sampled{}
	for _, d := range s.seen {
		c.Sampled += d.times
		c.Copies += d.times - 1
		tokens += d.times * d.tokens
		copied += (d.times - 1) * d.tokens
		if d.times > 1 {
			several = append(several, d)
		}
	}
	if c.Sampled > 0 {
		c.Share, c.TokenShare = float64(c.Copies)/float64(c.Sampled), float64(copied)/float64(tokens)
	}
	slices.SortFunc(several, func(a, b sampled) int {
		return cmp.Or(cmp.Compare(b.times, a.times), cmp.Compare(a.shard, b.shard), cmp.Compare(a.document, b.document))
	})
	for _, d := range several[:min(5, len(several))] {
		c.Most = append(c.Most, Copied{path(d.shard), d.document, d.tokens, d.times})
	}
	return c
}

// Odd numbers without a pattern: the fractional parts of the golden ratio and of the square root of
// 3.
const (
	hashA = 0x9e3779b97f4a7c15
	hashB = 0xbb67ae8584caa73b
)

// A documentHash is a 64-bit hash of a document's tokens, which are added in chunks. Four tokens at
// a time are multiplied to 128 bits, whose halves are combined. The hash depends only on the ids,
// not on their type on disk or on the chunks.
type documentHash struct {
	state   uint64
	tokens  uint64
	waiting [4]uint32 // fewer than four tokens
	n       int
}

func (h *documentHash) part(ids []uint32) {
	h.tokens += uint64(len(ids))
	for h.n > 0 && len(ids) > 0 {
		h.take(ids[0])
		ids = ids[1:]
	}
	state := h.state
	for ; len(ids) >= 4; ids = ids[4:] {
		state = mixFour(state, ids[0], ids[1], ids[2], ids[3])
	}
	h.state = state
	for _, id := range ids {
		h.take(id)
	}
}

func (h *documentHash) take(id uint32) {
	h.waiting[h.n] = id
	if h.n++; h.n == 4 {
		h.state = mixFour(h.state, h.waiting[0], h.waiting[1], h.waiting[2], h.waiting[3])
		h.n = 0
	}
}

func mixFour(state uint64, a, b, c, d uint32) uint64 {
	high, low := bits.Mul64(uint64(a)|uint64(b)<<32^hashA, uint64(c)|uint64(d)<<32^state^hashB)
	return high ^ low
}

// finish returns the hash and starts the next document.
func (h *documentHash) finish() uint64 {
	tokens := h.tokens
	for h.n > 0 {
		h.take(0)
	}
	high, low := bits.Mul64(h.state^hashB, tokens^hashA)
	*h = documentHash{}
	return high ^ low
}
