package index

import (
	"fmt"
	"math"
	"math/bits"
)

// Windows numbers the windows of a list of shards. A window is L+1 consecutive tokens of one shard:
// L inputs, and the same tokens shifted by one as targets. Window w of a shard is its tokens [w·L,
// w·L+L+1), so neighbours share one token, and every token but the first is a target once. A shard
// of T tokens has max(0, (T−1) div L) windows. They are numbered in shard order. A Windows is
// immutable.
type Windows struct {
	length int64
	starts []int64 // starts[i] is the number of the first window of shard i; one more entry holds the count

	// Locate starts its search with the shard of the first window with the same upper bits. There
	// are about two such groups of windows for each shard, so with shards of similar size the
	// search ends there or at the next shard.
	shift  uint
	groups []int32 // and one more entry for the last shard
}

// NewWindows numbers the windows of length sequenceLength (L, at least 1) of shards with the given
// numbers of tokens.
func NewWindows(sequenceLength int, tokens []int64) (*Windows, error) {
	if sequenceLength < 1 {
		return nil, fmt.Errorf("sequence length %d: must be at least 1", sequenceLength)
	}
	w := &Windows{length: int64(sequenceLength), starts: make([]int64, len(tokens)+1)}
	for i, t := range tokens {
		if t < 0 {
			return nil, fmt.Errorf("shard %d has an invalid number of tokens, %d", i, t)
		}
		n := ShardWindows(sequenceLength, t)
		if n > math.MaxInt64-w.starts[i] {
			return nil, fmt.Errorf("the first %d shards have more than 2^63 windows", i+1)
		}
		w.starts[i+1] = w.starts[i] + n
	}
	if len(tokens) > math.MaxInt32 {
		return nil, fmt.Errorf("%d shards are too many; at most 2^31 are supported", len(tokens))
	}
	w.shift = uint(max(0, bits.Len64(uint64(w.Count()))-bits.Len(uint(len(tokens)))))
	last := max(0, len(tokens)-1)
	shard := 0
	for group := int64(0); w.Count() > 0 && group <= (w.Count()-1)>>w.shift; group++ {
		for shard < last && w.starts[shard+1] <= group<<w.shift {
			shard++
		}
		w.groups = append(w.groups, int32(shard))
	}
	w.groups = append(w.groups, int32(last))
	return w, nil
}

// ShardWindows returns the number of windows of length sequenceLength (L, at least 1) of a shard
// with the given number of tokens.
func ShardWindows(sequenceLength int, tokens int64) int64 {
	return max(0, tokens-1) / int64(sequenceLength)
}

// Count returns the number of windows of all shards.
func (w *Windows) Count() int64 { return w.starts[len(w.starts)-1] }

// ShardCount returns the number of windows of one shard.
func (w *Windows) ShardCount(shard int) int64 { return w.starts[shard+1] - w.starts[shard] }

// Locate returns the shard of window i, and the offset of its first token there. i must be in [0,
// Count).
func (w *Windows) Locate(i int64) (shard int, token int64) {
	group := i >> w.shift
	low, high := int(w.groups[group]), int(w.groups[group+1]) // the shard is one of these
	for high-low > 4 {
		if middle := low + (high-low)/2; w.starts[middle+1] > i {
			high = middle
		} else {
			low = middle + 1
		}
	}
	for w.starts[low+1] <= i {
		low++
	}
	return low, (i - w.starts[low]) * w.length
}

// Reading returns the numbers of the first and the last window that contain any of the shard's
// tokens [from, to); ok is false if no window does. Two windows contain a token that ends one
// window and starts the next. The last tokens of a shard, too few for a window, are in no window.
func (w *Windows) Reading(shard int, from, to int64) (first, last int64, ok bool) {
	count := w.ShardCount(shard)
	if from < 0 || to <= from || count == 0 {
		return 0, 0, false
	}
	// Token t is in window t div L, and also in the previous window if it starts a window.
	first = max(0, from-1) / w.length
	last = min((to-1)/w.length, count-1)
	if first > last {
		return 0, 0, false
	}
	return w.starts[shard] + first, w.starts[shard] + last, true
}
