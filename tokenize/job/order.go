package job

import (
	"cmp"
	"context"
	"iter"
	"math"
)

// A cut is a position between two documents in the order of the output. It names the document after
// it.
type cut struct {
	// Without shuffling: the document of a segment.
	Unit     int `json:"unit"`
	Segment  int `json:"segment"`
	Document int `json:"document"`

	// With shuffling: the document with this key, or the first document after it.
	Key    uint64 `json:"key,omitempty"`
	Input  int    `json:"input,omitempty"`
	Offset int64  `json:"offset,omitempty"`

	Documents int64 `json:"documents"`     // of the output before the cut
	End       bool  `json:"end,omitempty"` // no document follows
}

// A spooled is a document in the order of the output.
type spooled struct {
	at     cut // before the document
	unit   int
	meta   meta
	tokens []uint32 // nil if only lengths were requested; valid until the next document
}

// An order yields all documents of the output in order. It waits for documents that are still being
// encoded.
type order interface {
	// from yields the documents after a cut. An error ends the iteration. If skip is not nil, the
	// documents have no tokens, and the order may omit ranges of documents that skip accepts.
	from(ctx context.Context, start cut, skip skipper) iter.Seq2[*spooled, error]
}

// A skipper reports whether the next documents, which have that many tokens, need not be yielded.
type skipper func(documents, tokens int64) bool

// shardEnd returns the cut at the end of a shard that starts at start: before the first document
// that exceeds size tokens. A shard has at least one document.
func shardEnd(ctx context.Context, o order, start cut, size int64) (cut, error) {
	var tokens, documents int64
	for d, err := range o.from(ctx, start, func(n, more int64) bool {
		all := tokens <= size-more // each of them fits
		if all {
			tokens, documents = tokens+more, documents+n
		}
		return all
	}) {
		if err != nil {
			return cut{}, err
		}
		if !fits(tokens, documents, d.meta.tokens, size) {
			return d.at, nil
		}
		tokens, documents = tokens+d.meta.tokens, documents+1
	}
	return cut{Documents: start.Documents + documents, End: true}, nil
}

// fits reports whether a shard with the given numbers of tokens and documents has space for another
// document.
func fits(tokens, documents, more, size int64) bool {
	return size == 0 || documents == 0 || tokens <= size-more
}

// A document is identified by the number of its input and its offset there. Random numbers for a
// document depend only on these and a seed, and not on workers, pieces or processes.

// mix is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
// Generators, OOPSLA 2014), a bijection in which every bit depends on all.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

const golden = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio, odd

// draw returns a random number for a document, uniform in 64 bits.
func draw(seed uint64, input int, offset int64) uint64 {
	return mix(mix(mix(seed+golden)+uint64(input)+golden) + uint64(offset) + golden)
}

// sampleSeed is the seed of the draws of --fraction. It is constant, so that a smaller fraction
// keeps a subset of the documents of a larger one. ("sample" in ASCII)
const sampleSeed = 0x73616d706c65

// sampleLimit is the number below which the draw of a document must be for it to be kept; all are
// if it is 0.
func sampleLimit(share float64) uint64 {
	if share <= 0 || share >= 1 {
		return 0
	}
	return uint64(math.Ldexp(share, 64))
}

// compareKeys is the order of a shuffled output.
func compareKeys(aKey uint64, aInput int, aOffset int64, bKey uint64, bInput int, bOffset int64) int {
	return cmp.Or(cmp.Compare(aKey, bKey), cmp.Compare(aInput, bInput), cmp.Compare(aOffset, bOffset))
}
