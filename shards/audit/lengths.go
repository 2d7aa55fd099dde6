package audit

import (
	"math/bits"
)

// Lengths has statistics of the lengths of documents, in tokens. Its memory does not depend on the
// number of documents: lengths below 256 are counted individually, longer ones in 128 steps per
// doubling. A quantile is therefore exact to one part in 128.
type Lengths struct {
	Documents int64     `json:"documents"`
	Tokens    int64     `json:"tokens"`
	Longest   int64     `json:"longest"`
	Mean      float64   `json:"mean"`
	Median    int64     `json:"median"`
	P90       int64     `json:"p90"` // nine of ten documents are at most this long
	P99       int64     `json:"p99"`
	Octaves   []Octave  `json:"histogram"`
	counts    []counter // indexed by step
}

// An Octave counts the documents with From to 2·From−1 tokens. The first octave counts the empty
// documents.
type Octave struct {
	From      int64 `json:"from"` // 0 or a power of two
	Documents int64 `json:"documents"`
	Tokens    int64 `json:"tokens"`
}

type counter struct{ documents, tokens int64 }

const stepBits = 7 // 2^stepBits steps for each doubling

// stepOf returns the index of the step of a length.
func stepOf(length int64) int {
	shift := max(0, bits.Len64(uint64(length))-stepBits-1)
	return shift<<stepBits + int(length>>shift)
}

// largestOf returns the largest length of a step.
func largestOf(step int) int64 {
	shift := max(0, step>>stepBits-1)
	return (int64(step-shift<<stepBits)+1)<<shift - 1
}

func (l *Lengths) add(length int64) {
	step := stepOf(length)
	for step >= len(l.counts) {
		l.counts = append(l.counts, counter{})
	}
	l.counts[step].documents++
	l.counts[step].tokens += length
	l.Documents++
	l.Tokens += length
	l.Longest = max(l.Longest, length)
}

// merge adds the counts of other.
func (l *Lengths) merge(other *Lengths) {
	for len(l.counts) < len(other.counts) {
		l.counts = append(l.counts, counter{})
	}
	for i, c := range other.counts {
		l.counts[i].documents += c.documents
		l.counts[i].tokens += c.tokens
	}
	l.Documents += other.Documents
	l.Tokens += other.Tokens
	l.Longest = max(l.Longest, other.Longest)
}

// finish computes the statistics from the counters.
func (l *Lengths) finish() {
	l.Octaves = nil
	if l.Documents == 0 {
		return
	}
	l.Mean = float64(l.Tokens) / float64(l.Documents)
	l.Median, l.P90, l.P99 = l.quantile(50), l.quantile(90), l.quantile(99)
	for step, c := range l.counts {
		if c.documents == 0 {
			continue
		}
		from := int64(0)
		if largest := largestOf(step); largest > 0 {
			from = 1 << (bits.Len64(uint64(largest)) - 1)
		}
		if n := len(l.Octaves); n == 0 || l.Octaves[n-1].From != from {
			l.Octaves = append(l.Octaves, Octave{From: from})
		}
		o := &l.Octaves[len(l.Octaves)-1]
		o.Documents += c.documents
		o.Tokens += c.tokens
	}
}

// quantile returns the smallest length that percent of the documents do not exceed, rounded up
// within its step.
func (l *Lengths) quantile(percent int64) int64 {
	rank := l.Documents/100*percent + (l.Documents%100*percent+99)/100 // from 1
	for step, c := range l.counts {
		if rank -= c.documents; rank <= 0 {
			return min(largestOf(step), l.Longest)
		}
	}
	return l.Longest
}
